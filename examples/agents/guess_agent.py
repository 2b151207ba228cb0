"""Train an agent that plays "guess my number" with the policy over several turns, through the official OpenAI client.

pip install 'nemo-rl-cpp[serve,smollm2]' openai
nemo-rl-cpp train --config examples/agents/guess_agent.yaml"""

from nemo_rl_cpp.environments.agents import AgentTask
from openai import AsyncOpenAI

TURNS = 3


async def play(task: AgentTask) -> float:
    """Play one game and return its reward: 1 for the secret number, less for a number near it, 0 without a number."""
    secret = int(task.info["ground_truth"])
    messages = [*task.messages]
    # the headers name the rollout: its token ids are trained, and a rollout that is run again gets its samples again
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, default_headers=task.headers) as client:
        best = 0.0
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=8)
            message = answer.choices[0].message
            # the very message goes back, so the server knows its tokens and tokenises nothing again
            messages.append({"role": "assistant", "content": message.content})
            digits = "".join(filter(str.isdigit, message.content or ""))[:3]
            if not digits:
                messages.append({"role": "user", "content": "Answer with a number."})
                continue
            guess = int(digits)
            best = max(best, 1.0 - min(abs(guess - secret), 10) / 10)
            if guess == secret:
                break
            messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
    return best
