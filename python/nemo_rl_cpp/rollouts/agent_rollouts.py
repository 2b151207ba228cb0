"""Rollouts made by agents, which call the policy through its server. The policy trains on the engine's token ids and
log-probabilities; only agents and people read the text."""

from collections.abc import Mapping, Sequence

import torch

from nemo_rl_cpp.config.env import TOOL_CALL_TAGS
from nemo_rl_cpp.data.interfaces import LLMMessageLogType, TokenizerType, tokens_of
from nemo_rl_cpp.data.texts import text_of
from nemo_rl_cpp.environments.agents import AgentResult, AgentTask
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.environments.remote import answer_of, call_remote
from nemo_rl_cpp.rollouts.batches import DatumBatch
from nemo_rl_cpp.rollouts.rollout_metrics import SampleStats, environment_metrics, rollout_metrics
from nemo_rl_cpp.serving.chat import END_OF_THINKING, THINK, find_calls
from nemo_rl_cpp.serving.engine import LENGTH, STOP_TOKEN
from nemo_rl_cpp.serving.generation import ServedDedicatedGeneration, ServedGeneration
from nemo_rl_cpp.serving.rollouts import Call, Rollout, longest_chain


def is_agent(environment: Environment | None) -> bool:
    """Return whether the environment makes its rollouts itself, with an agent."""
    return getattr(environment, "runs_rollouts", False) is True


def are_made_by_agents(batch: DatumBatch, task_to_env: Mapping[str, Environment]) -> bool:
    """Return whether agents make the batch's rollouts. Raise ValueError if only some environments have agents."""
    tasks = set(batch["task_name"])
    agents = sorted(task for task in tasks if is_agent(task_to_env.get(task)))
    if agents and len(agents) < len(tasks):
        raise ValueError(
            f"the tasks {', '.join(agents)} have agents that make their rollouts, the others have not: train them in runs of their own"
        )
    return bool(agents)


def run_agent_rollouts(
    policy: ServedGeneration | ServedDedicatedGeneration, batch: DatumBatch, tokenizer: TokenizerType,
    task_to_env: Mapping[str, Environment], greedy: bool = False
) -> tuple[DatumBatch, dict[str, float]]:  # fmt: skip
    """Have the environments' agents make one rollout per row. Return (batch, metrics of rollouts and environments).

    The returned message logs hold the prompts that the agent sent and the engine's responses; other keys are those of
    `run_multi_turn_rollout`. `mask_sample` marks rollouts that are not trained on: those that failed, sent no request,
    or have a result that says so. Only the longest conversation of a rollout is trained on; `agent_calls_left_out`
    counts the other calls. Raise RuntimeError if every rollout failed."""
    batch, address = batch.copy(), policy.address
    keys: list[str] = []
    try:
        for stream, draw, sample in zip(batch["stream"], batch["draw_ids"], batch["sample_index"]):
            keys.append(policy.begin_rollout(f"{stream}-{int(draw)}-{int(sample)}", stream, greedy))
        tasks = []
        for key, log, info in zip(keys, batch["message_log"], batch["extra_env_info"]):
            info = info or {}
            messages = info.get("messages")  # the row's messages; otherwise the rendered prompt
            if not isinstance(messages, list):
                messages = [{name: str(message[name]) for name in ("role", "content")} for message in log]
            tasks.append(AgentTask(key, [dict(message) for message in messages], info, address))
        results = _results(tasks, batch["task_name"], task_to_env)
    finally:
        rollouts = [policy.end_rollout(key) for key in keys]
    if all(result.error is not None for result in results):
        raise RuntimeError(f"all {len(results)} rollouts of the agent failed; the first one: {results[0].error}")
    stats = _attach(batch, rollouts, results, tokenizer)
    metrics = rollout_metrics(stats) | environment_metrics(task_to_env, batch["task_name"])
    calls = sum(len(rollout.calls) for rollout in rollouts)
    metrics["agent_calls"] = float(calls)
    metrics["agent_calls_left_out"] = float(calls - sum(s.turns for s in stats))
    return batch, metrics


def _results(
    tasks: Sequence[AgentTask], names: Sequence[str], task_to_env: Mapping[str, Environment]
) -> list[AgentResult]:
    rows_of = {name: [row for row, of in enumerate(names) if of == name] for name in dict.fromkeys(names)}
    begun = {
        name: call_remote(task_to_env[name], "run_rollouts", [tasks[row] for row in rows])
        for name, rows in rows_of.items()
    }
    results: list[AgentResult] = [AgentResult()] * len(tasks)
    for name, rows in rows_of.items():
        for row, result in zip(rows, answer_of(task_to_env[name], begun[name], name), strict=True):
            results[row] = result
    return results


def _attach(
    batch: DatumBatch, rollouts: list[Rollout], results: list[AgentResult], tokenizer: TokenizerType
) -> list[SampleStats]:
    chains = [longest_chain(rollout.calls) for rollout in rollouts]
    counts = [bool(chain) and result.error is None and result.trained for chain, result in zip(chains, results)]
    cut = [bool(chain) and chain[-1].sample.reason == LENGTH for chain in chains]
    prompts = list(zip(chains, batch["message_log"]))
    lengths = [len(chain[0].prompt_ids) if chain else tokens_of(log) for chain, log in prompts]
    logs = [message_log(chain, tokenizer) if chain else log for chain, log in prompts]
    batch["message_log"], batch["length"] = logs, torch.tensor(lengths)
    batch["mask_sample"] = ~torch.tensor(counts, dtype=torch.bool)
    batch["truncated"] = torch.tensor(cut, dtype=torch.bool)
    components = [result.reward if isinstance(result.reward, dict) else {} for result in results]
    for name in dict.fromkeys(name for each in components for name in each):
        batch[f"reward/{name}"] = torch.tensor([each.get(name, 0.0) for each in components], dtype=torch.float32)
    totals = [sum(r.reward.values()) if isinstance(r.reward, dict) else r.reward for r in results]
    batch["total_reward"] = torch.tensor([float(total) for total in totals], dtype=torch.float32)
    return [
        SampleStats(
            turns=len(chain),
            assistant_tokens=sum(len(call.sample.token_ids) for call in chain),
            env_tokens=sum(len(m["token_ids"]) for m in log[1:] if m["role"] != "assistant") if chain else 0,
            done=result.error is None,
            truncated=truncated,
        )
        for chain, log, result, truncated in zip(chains, logs, results, cut)
    ]


def message_log(chain: Sequence[Call], tokenizer: TokenizerType) -> LLMMessageLogType:
    """Return an agent's consecutive calls of the policy, `chain`, as messages with the engine's own token ids."""
    log: LLMMessageLogType = []
    before = 0
    for call in chain:
        new, prompt = call.prompt_ids[before:], ""
        if new:
            role = "environment" if log else "user"
            prompt = text_of(tokenizer, new, call.prompt_ids[:before], skip_special=False)
            log.append({"role": role, "content": prompt, "token_ids": torch.tensor(new)})
        ids, logprobs = call.sample.token_ids, torch.tensor(call.sample.logprobs, dtype=torch.float32)
        text = text_of(tokenizer, ids, call.prompt_ids)
        of_tokens = {"token_ids": torch.tensor(ids), "generation_logprobs": logprobs}
        log.append({"role": "assistant", "content": text, **of_tokens})
        kept = ids[:-1] if call.sample.reason == STOP_TOKEN else ids
        spelled = text_of(tokenizer, kept, call.prompt_ids, skip_special=False)
        log[-1] |= flags_of(spelled, opens_thinking=prompt.rstrip().endswith(THINK))
        before = len(call.prompt_ids) + len(ids)
    return log


def flags_of(text: str, opens_thinking: bool) -> dict[str, bool]:
    """Return {flag: True} for each flag that NeMo RL's rules for NeMo Gym give to a response. A response with a
    complete tool call has no flag. Otherwise the answer is inspected, or the reasoning if the answer is empty.

    `is_invalid_tool_call`: the inspected part has a tag of a tool call. `has_malformed_thinking`: the answer has a
    thinking tag, or the reasoning has one more than once. `opens_thinking`: whether the prompt ends with `<think>`."""
    if find_calls(text, "", opens_thinking).calls:
        return {}
    reasoning, end, answer = text.partition(END_OF_THINKING)
    begins = text.lstrip().startswith(THINK)
    if not end and not opens_thinking and not begins:
        reasoning, answer = "", text
    elif begins:
        reasoning = reasoning.lstrip().removeprefix(THINK)
    part, most = (answer, 0) if answer.strip() else (reasoning, 1)
    flags = {
        "is_invalid_tool_call": any(tag in part for tag in TOOL_CALL_TAGS),
        "has_malformed_thinking": any(part.count(tag) > most for tag in (THINK, END_OF_THINKING)),
    }
    return {name: True for name, is_set in flags.items() if is_set}
