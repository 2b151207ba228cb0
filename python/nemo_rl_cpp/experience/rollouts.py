"""Rollouts: generate, let the environment answer, and again until the conversation ends.

Tokens in, tokens out: the ids that a sample is trained on are the ids that were sampled; text is only what
environments and people read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp.experience.agent_rollouts import are_made_by_agents, run_agent_rollouts
from nemo_rl_cpp.experience.conversations import Conversations
from nemo_rl_cpp.experience.early_scoring import EarlyScoring
from nemo_rl_cpp.experience.rollout_metrics import environment_metrics, rollout_metrics
from nemo_rl_cpp.experience.turns import append_observation, attach_responses, calculate_rewards, generate_responses

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import DatumSpec, TokenizerType
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl_cpp.environments.interfaces import Environment
    from nemo_rl_cpp.models.generation.interfaces import GenerationInterface

__all__ = [
    "append_observation",
    "attach_responses",
    "calculate_rewards",
    "generate_responses",
    "repeat_prompts",
    "run_multi_turn_rollout",
]


def repeat_prompts(
    batch: "BatchedDataDict[DatumSpec]", num_generations: int, first_draw_id: int = 0, stream: str = "train"
) -> "BatchedDataDict[DatumSpec]":
    """Every prompt `num_generations` times, side by side, with what tells the copies apart.

    Adds int64 [B * num_generations]: `group_id` (which prompt of this batch), `draw_ids` (`first_draw_id` + group_id:
    it counts prompts over the whole run) and `sample_index` (which of the copies); and `stream`, a list.
    """
    if num_generations < 1:
        raise ValueError(f"num_generations_per_prompt is {num_generations}; it must be at least 1")
    logs = batch["message_log"]
    repeated = type(batch)({key: value for key, value in batch.items() if key != "message_log"}).repeat_interleave(
        num_generations
    )
    # each copy has messages of its own; their token ids, which nothing writes into, are shared
    repeated["message_log"] = [[dict(message) for message in log] for log in logs for _ in range(num_generations)]
    repeated["group_id"] = torch.arange(batch.size).repeat_interleave(num_generations)
    repeated["draw_ids"] = repeated["group_id"] + first_draw_id
    repeated["sample_index"] = torch.arange(num_generations).repeat(batch.size)
    repeated["stream"] = [stream] * repeated.size
    return repeated


def run_multi_turn_rollout(
    policy_generation: "GenerationInterface",
    input_batch: "BatchedDataDict[DatumSpec]",
    tokenizer: "TokenizerType",
    task_to_env: "Mapping[str, Environment]",
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    deduplicate_multimodal_data: bool = False,
) -> "tuple[BatchedDataDict[DatumSpec], dict[str, float]]":
    """Rolls every conversation of the batch out to its end, or for `max_rollout_turns` turns.

    Messages are appended to the rows' message logs in place. The result has, besides the input's keys,
    `total_reward` float32 [B] (summed over turns; components under `reward/<name>`) and `truncated` bool [B]: a
    response ran out of room, or an observation did not fit. `draw_ids`, `sample_index` and `stream` of the batch go
    to the engine. Environments that score rows alone do so while other rows are still generated, where the engine says
    which have ended. `deduplicate_multimodal_data` concerns images only, which this package does not have. Environments whose
    agents make the rollouts (`runs_rollouts`) are let do so.

    Returns (batch, rollout metrics with those of the environments).
    """
    if are_made_by_agents(input_batch, task_to_env):
        return run_agent_rollouts(policy_generation, input_batch, tokenizer, task_to_env, greedy)
    conversations = Conversations(input_batch.copy(), tokenizer, max_seq_len)
    for _ in range(max_rollout_turns):
        if not conversations.active:
            break
        turn = conversations.begin()
        early = EarlyScoring(turn.active, tokenizer, task_to_env)
        beside = (
            {"on_finished": early.finished}
            if getattr(policy_generation, "reports_finished", False) and early.useful
            else {}
        )
        conversations.respond(turn, policy_generation.generate(turn.inputs, greedy=greedy, **beside))
        conversations.observe(turn, calculate_rewards(turn.active, task_to_env, early.begun))
    batch = conversations.finish()
    return batch, rollout_metrics(conversations.stats) | environment_metrics(task_to_env)
