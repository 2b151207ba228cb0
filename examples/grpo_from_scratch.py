"""Train a model of 100 thousand random weights with GRPO, on one page: it learns to repeat the first digit of its prompt
three times, "47=" -> "444".

    python examples/grpo_from_scratch.py [FOLDER]      # the trained model is saved there

GRPO (Shao et al., 2024, https://arxiv.org/abs/2402.03300) repeats four things:

    1. sample      the model generates several responses to each prompt; the responses to one prompt are a group
    2. reward      a function scores each response
    3. advantage   how much better a response is than the mean of its group, so no second model has to judge it
    4. update      raise the probability of the tokens of better responses, lower that of worse ones

`nemo_rl_cpp/algorithms/loop.py` is the same loop with everything else that a long run needs, such as checkpoints."""

import sys

import nemo_rl_cpp
import torch

STEPS = 60
PROMPTS = 16  # different prompts in a step
GROUP = 16  # answers to each
UPDATES = 2  # optimizer steps on the answers of a step
CLIP = 0.2
LEARNING_RATE = 2e-3


def reward(prompt: str, answer: str) -> float:
    """Return the share of correct digits. A reward may be any number; values between 0 and 1 make learning easier."""
    return sum(digit == prompt[0] for digit in answer[:3]) / 3


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return the advantages [prompts * GROUP] of rewards of this shape: each reward minus the mean of its group, divided
    by the group's standard deviation.

    The mean is the baseline: a response counts by how much better it is than the model's average on the same prompt. In
    a group with equal rewards all advantages are 0."""
    groups = rewards.view(-1, GROUP)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def clipped_loss(logprobs: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor):
    """Return the clipped loss of PPO and GRPO, a scalar. All arguments have the shape [tokens].

    `ratio` is a token's probability now, divided by its probability when it was sampled; its gradient is the policy
    gradient. The minimum removes this gradient once the ratio has moved by CLIP in the direction of the advantage,
    because the responses say little about a model that is far from the one that sampled them."""
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(gain * mask).sum() / mask.sum()


def train(steps: int = STEPS, seed: int = 0) -> tuple[nemo_rl_cpp.Model, list[float], float]:
    """Train for `steps` steps. Return the model, the mean reward of each step, and the largest difference between the
    log-probabilities of generation and of training."""
    torch.set_num_threads(1)  # threads would wait for each other more than they compute, at this size
    model = nemo_rl_cpp.Model("tiny-random", seed=seed)  # or the name of a pretrained one
    tokenizer = model.tokenizer  # a token each for digits, "+" and "="
    # Both read the model's weights in place: an update needs no copy before the engine samples from it.
    engine = nemo_rl_cpp.Engine(model, seed=seed, max_new_tokens=3)
    trainer = nemo_rl_cpp.Trainer(model)

    random = torch.Generator().manual_seed(seed)
    mean_rewards, largest_gap = [], 0.0
    for step in range(steps):
        # 1. Sample. A batch has no padding: all tokens lie in one row, prompt and answer after prompt and answer.
        numbers = torch.randperm(100, generator=random)[:PROMPTS].tolist()
        prompts = [f"{number:02}=" for number in numbers]
        batch = engine.sample([tokenizer(prompt)["input_ids"] for prompt in prompts], n=GROUP)
        sampled, old = batch.tokens["token_mask"], batch.tokens["generation_logprobs"]

        # 2. Reward. The first three tokens are the prompt, the rest is the answer.
        texts = [tokenizer.decode(ids[3:], skip_special_tokens=True) for ids in batch.rows(batch.tokens["input_ids"])]
        rewards = torch.tensor([reward(prompts[i // GROUP], text) for i, text in enumerate(texts)])

        # 3. Advantage: one number an answer, which all of its tokens share.
        advantage = batch.by_token(advantages(rewards))

        # 4. Update. The first update of a step sees the weights that sampled, so the trainer must find the very
        #    log-probabilities that the engine reported: a gap would mean to train another model than the one that answered.
        for update in range(UPDATES):
            _, logprobs = trainer.forward_backward(batch, lambda new: clipped_loss(new, old, advantage, sampled))
            if update == 0:
                gap = (logprobs - old).abs().max().item()
            trainer.step(LEARNING_RATE)

        mean_rewards.append(rewards.mean().item())
        largest_gap = max(largest_gap, gap)
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step + 1:3}   reward {mean_rewards[-1]:.2f}   gap {gap:g}   {prompts[0]}{texts[0]}")
    return model, mean_rewards, largest_gap


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "results/grpo_from_scratch"
    trained, _, _ = train()
    trained.save(folder)
    print(f"saved to {folder}, which transformers loads, too")
