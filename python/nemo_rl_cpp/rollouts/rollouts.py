"""Rollouts: draw prompts, then let the policy respond and the environment reply, turn by turn, until the conversation
ends. Training uses exactly the token ids that were sampled. Only environments and people read the text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nemo_rl_cpp.data.interfaces import LLMMessageLogType, TokenizerType, tokens_of
from nemo_rl_cpp.data.texts import text_of
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict, RaggedBatch, offsets_of
from nemo_rl_cpp.distributed.worker_calls import Future, is_done
from nemo_rl_cpp.environments.interfaces import Environment, EnvironmentReturn, WeightedParts, checked_return
from nemo_rl_cpp.environments.remote import answer_of, call_remote
from nemo_rl_cpp.models.generation.interfaces import Answer, GenerationInterface, Responses
from nemo_rl_cpp.rollouts.agent_rollouts import are_made_by_agents, run_agent_rollouts
from nemo_rl_cpp.rollouts.batches import DatumBatch, Rollouts
from nemo_rl_cpp.rollouts.rollout_metrics import SampleStats, environment_metrics, rollout_metrics

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.train_state import TrainState
    from nemo_rl_cpp.data.dataloader import MultipleDataloaderWrapper, StatefulDataLoader


PASSED_TO_GENERATION = ("draw_ids", "sample_index", "stream")
"""Keys of a batch that the generation engine receives, because they seed its sampling."""


_ENOUGH_IDS = 64  # decoding must start at a token that has text; the last 64 ids contain one


# ---- one turn


def attach_responses(
    outputs: Answer, batch: DatumBatch, tokenizer: TokenizerType, input_lengths: torch.Tensor
) -> list[torch.Tensor]:
    """Append an engine's responses to `batch["message_log"]`, in place, and return the generated ids of each row.

    A message holds `content` (without special tokens), `token_ids`, `generation_logprobs` if the engine returns them,
    and `token_versions` (of the weights that sampled each token) if the weights may change while the engine generates.
    `batch["truncated"]` [B] marks truncated responses, if the engine reports them."""
    responses = Responses.of(outputs, input_lengths)
    generated = responses.rows(responses.token_ids)
    for log, ids in zip(batch["message_log"], generated, strict=True):
        text = text_of(tokenizer, ids.tolist(), last_ids(log))
        log.append({"role": "assistant", "content": text, "token_ids": ids})
    of_tokens = {"generation_logprobs": responses.logprobs, "token_versions": responses.token_versions}
    for name, values in of_tokens.items():
        if values is not None:
            for log, row in zip(batch["message_log"], responses.rows(values), strict=True):
                log[-1][name] = row
    if responses.truncated is not None:
        batch["truncated"] = responses.truncated
    return generated


def calculate_rewards(
    batch: DatumBatch, task_to_env: Mapping[str, Environment], begun: Sequence[tuple[list[int], object]] = ()
) -> EnvironmentReturn:
    """Call the environment of every row, selected by `task_name`, and return the results in the order of the rows.
    Different environments run concurrently.

    Environments see only `role` and `content` of the messages, and `extra_env_info`. Rewards are float32 [B], or a
    dictionary of such tensors. `begun` lists (rows, future) of calls that are already in flight (`EarlyScoring`).

    Raise ValueError for a task without an environment, or if only some environments return components."""
    rows_of: dict[str, list[int]] = {}
    asked = {row for rows, _ in begun for row in rows}
    for row, task in enumerate(batch["task_name"]):
        if task not in task_to_env:
            raise ValueError(
                f"No environment found for task type: {task}; there are environments for {sorted(map(str, task_to_env))}"
            )
        if row not in asked:
            rows_of.setdefault(task, []).append(row)
    started = list(begun)
    for task, rows in rows_of.items():
        logs = [visible(batch["message_log"][row]) for row in rows]
        infos = [batch["extra_env_info"][row] for row in rows]
        started.append((rows, call_remote(task_to_env[task], "step", logs, infos)))
    # an environment may return a plain tuple of the same six fields
    answers = []
    for rows, result in started:
        task = batch["task_name"][rows[0]]
        answers.append((rows, checked_return(answer_of(task_to_env[task], result, task), len(rows), task)))
    return merged_returns(answers, len(batch["message_log"]))


def merged_returns(parts: list[tuple[list[int], EnvironmentReturn]], size: int) -> EnvironmentReturn:
    """Merge the results of several environments, (rows, result) each, in the order of the batch's rows."""
    if len({isinstance(part.rewards, dict) for _, part in parts}) > 1:
        raise ValueError("some environments of this batch give one reward, others a dictionary of them")
    order = [row for rows, _ in parts for row in rows]

    def listed(name: str) -> list[Any]:
        result = [None] * size
        values = [v for rows, part in parts for v in (getattr(part, name) or [None] * len(rows))]
        for row, value in zip(order, values):
            result[row] = value
        return result

    def tensor(pieces: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        joined = torch.cat([torch.as_tensor(piece, dtype=dtype).cpu() for piece in pieces])
        return torch.empty_like(joined).index_copy_(0, torch.tensor(order, dtype=torch.long), joined)

    given = [part.rewards for _, part in parts]
    if isinstance(given[0], dict):
        rewards = {}
        for name in dict.fromkeys(name for each in given for name in each):
            of_parts = [part.rewards.get(name, torch.zeros(len(rows))) for rows, part in parts]
            rewards[name] = tensor(of_parts, torch.float32)
        if weighted := [each for each in given if isinstance(each, WeightedParts)]:
            rewards = WeightedParts(rewards, {name: w for each in weighted for name, w in each.weights.items()})
    else:
        rewards = tensor(given, torch.float32)
    lists = {name: listed(name) for name in ("observations", "metadata", "next_stop_strings", "answers")}
    return EnvironmentReturn(rewards=rewards, terminateds=tensor([part.terminateds for _, part in parts]), **lists)


class EarlyScoring:
    """A scorer of responses that end while the engine still generates others of the same turn; `calculate_rewards`
    scores the rest. Only environments that score rows independently (`scores_rows_alone`) and run concurrently
    (`.remote`) are called early. Rows that end while their environment is busy are scored together in its next call."""

    def __init__(self, active: DatumBatch, tokenizer: TokenizerType, task_to_env: Mapping[str, Environment]) -> None:
        self._active, self._tokenizer = active, tokenizer
        self._environments = {
            task: environment
            for task, environment in task_to_env.items()
            if getattr(environment, "scores_rows_alone", False) is True and hasattr(environment.step, "remote")
        }
        self._waiting: dict[str, list[tuple[int, list[int]]]] = {}
        self.begun: list[tuple[list[int], Future]] = []
        """(rows of the turn, future of `step`'s result), in the order of the calls."""
        self._latest: dict[str, Future] = {}
        self.is_possible = any(task in self._environments for task in active["task_name"])
        """Whether any row of this turn may be scored early."""

    def finished(self, rows: list[int], token_ids: list[list[int]]) -> None:
        """Start to score the responses `token_ids` of `rows`, which have ended. Called by the engine between steps."""
        for row, ids in zip(rows, token_ids, strict=True):
            task = self._active["task_name"][row]
            if task in self._environments:
                self._waiting.setdefault(task, []).append((row, ids))
        for task, waiting in self._waiting.items():
            if waiting and (task not in self._latest or is_done(self._latest[task])):
                self._begin(task)

    def _begin(self, task: str) -> None:
        rows, ids = zip(*self._waiting[task], strict=True)
        self._waiting[task] = []
        logs = []
        for row, own in zip(rows, ids, strict=True):
            log = self._active["message_log"][row]
            text = text_of(self._tokenizer, own, last_ids(log))
            logs.append([*visible(log), {"role": "assistant", "content": text}])
        infos = [self._active["extra_env_info"][row] for row in rows]
        self._latest[task] = call_remote(self._environments[task], "step", logs, infos)
        self.begun.append((list(rows), self._latest[task]))


def visible(message_log: LLMMessageLogType) -> LLMMessageLogType:
    """Return the part of a conversation that environments see: the role and text of each message."""
    return [{"role": message["role"], "content": message["content"]} for message in message_log]


def last_ids(message_log: LLMMessageLogType) -> list[int]:
    """Return at most the last 64 token ids of a conversation, which suffice to decode the tokens that follow."""
    return torch.cat([message["token_ids"] for message in message_log])[-_ENOUGH_IDS:].tolist()


# ---- conversations of several turns


class Turn(NamedTuple):
    """The conversations of a batch that take part in one turn."""

    active: BatchedDataDict  # their rows of the batch, with the current stop strings and environment state
    inputs: RaggedBatch


class Conversations:
    """The conversations of a batch. In each turn, the caller calls `begin`, generates with the engine, calls `respond`
    and the environments, and calls `observe` with their results."""

    def __init__(self, batch: DatumBatch, tokenizer: TokenizerType, max_seq_len: int) -> None:
        size = len(batch["message_log"])
        self.batch, self.tokenizer, self.max_seq_len = batch, tokenizer, max_seq_len
        self.active = list(range(size))
        self.stats = [SampleStats() for _ in range(size)]
        self.rewards: dict[str, torch.Tensor] = {}
        self.weights: dict[str, float] = {}
        self.stop_strings = list(batch.get("stop_strings") or [None] * size)
        self.extra_env_info = list(batch["extra_env_info"])
        self.masked: dict[int, bool] = {}

    def begin(self) -> Turn:
        """Return the next turn: the rows of unfinished conversations, with their tokens as the engine's inputs."""
        keys = ["message_log", "task_name", *PASSED_TO_GENERATION]
        known = BatchedDataDict({key: self.batch[key] for key in keys if key in self.batch})
        active = known.select_indices(self.active)
        active["stop_strings"] = [self.stop_strings[row] for row in self.active]
        active["extra_env_info"] = [self.extra_env_info[row] for row in self.active]
        logs = active["message_log"]
        lengths = torch.tensor([tokens_of(log) for log in logs], dtype=torch.int64)
        ids = torch.cat([message["token_ids"] for log in logs for message in log])
        of_rows = {key: active[key] for key in ("stop_strings", *PASSED_TO_GENERATION) if key in active}
        pad = self.tokenizer.pad_token_id or 0
        inputs = RaggedBatch(offsets_of(lengths), {"input_ids": ids}, of_rows, pad_token_id=pad)
        return Turn(active, inputs)

    def respond(self, turn: Turn, outputs: Answer) -> None:
        """Append the engine's responses `outputs` to the turn's conversations, and count turns and tokens."""
        generated = attach_responses(outputs, turn.active, self.tokenizer, turn.inputs.lengths)
        cut = turn.active["truncated"].tolist() if "truncated" in turn.active else [False] * len(generated)
        for row, ids, truncated in zip(self.active, generated, cut):
            self.stats[row].turns += 1
            self.stats[row].assistant_tokens += len(ids)
            self.stats[row].truncated |= truncated

    def observe(self, turn: Turn, answer: EnvironmentReturn) -> None:
        """Add the environments' rewards and observations, and determine which conversations continue.

        An observation is tokenized without a chat template, and truncated where the conversation reaches `max_seq_len`.
        Such a conversation ends and counts as truncated, even if the observation just fits, because no response can
        follow. Raise ValueError if prompt and response already exceed `max_seq_len`."""
        self._add_rewards(answer.rewards)
        terminated = answer.terminateds.bool().tolist()
        going_on = []
        texts = [observation["content"] for observation in answer.observations]
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = turn.inputs.lengths.tolist()
        for i, row in enumerate(self.active):
            stats, log, observation = self.stats[row], self.batch["message_log"][row], answer.observations[i]
            used = prompts[i] + log[-1]["token_ids"].numel()
            if used > self.max_seq_len:
                raise ValueError(
                    f"prompt and response have {used} tokens, more than max_seq_len {self.max_seq_len}: set "
                    "data.max_input_seq_length and policy.generation.vllm_cfg.max_model_len to at most "
                    "policy.max_total_sequence_length, or raise the latter"
                )
            overflowed = used + len(ids[i]) >= self.max_seq_len
            seen = torch.tensor(ids[i][: self.max_seq_len - used], dtype=torch.int64)
            log.append({"role": observation["role"], "content": observation["content"], "token_ids": seen})
            stats.env_tokens += len(seen)
            stats.truncated |= overflowed
            stats.done = terminated[i] or overflowed
            self._mask(row, answer.metadata[i])
            if stats.done:
                continue
            going_on.append(row)
            self.stop_strings[row] = answer.next_stop_strings[i]
            if answer.metadata[i] is not None:
                self.extra_env_info[row] = answer.metadata[i]
        self.active = going_on

    def _mask(self, row: int, metadata: object) -> None:
        """Record whether the environment excludes a conversation from training (`mask_sample` of its last turn)."""
        if not isinstance(metadata, Mapping) or "mask_sample" not in metadata:
            return
        if metadata["mask_sample"] not in (True, False):
            raise ValueError(
                f"an environment's metadata has mask_sample {metadata['mask_sample']!r}: give True or False"
            )
        self.masked[row] = bool(metadata["mask_sample"])

    def _add_rewards(self, rewards: torch.Tensor | dict[str, torch.Tensor]) -> None:
        components = rewards if isinstance(rewards, dict) else {"": rewards}
        if isinstance(rewards, WeightedParts):
            self.weights |= {name.removeprefix("reward/"): weight for name, weight in rewards.weights.items()}
        for name, values in components.items():
            none = torch.zeros(len(self.stats), dtype=torch.float32)
            self.rewards.setdefault(name.removeprefix("reward/"), none)[self.active] += values

    def finish(self) -> DatumBatch:
        """Return the batch with `total_reward`, `reward/<component>`, `truncated` and the last `stop_strings`, and with
        `mask_sample` bool [B] if an environment gave this flag. Conversations that are still active count as having
        reached the turn limit."""
        for row in self.active:
            self.stats[row].max_turns_reached = True
        self.batch["extra_env_info"] = self.extra_env_info
        self.batch["stop_strings"] = self.stop_strings
        self.batch |= {f"reward/{name}": values for name, values in self.rewards.items() if name}
        weighted = (values * self.weights.get(name, 1.0) for name, values in self.rewards.items())
        self.batch["total_reward"] = sum(weighted, torch.zeros(len(self.stats), dtype=torch.float32))
        self.batch["truncated"] = torch.tensor([stats.truncated for stats in self.stats], dtype=torch.bool)
        if self.masked:
            self.batch["mask_sample"] = torch.tensor([self.masked.get(row, False) for row in range(len(self.stats))])
        return self.batch


def repeat_prompts(
    batch: DatumBatch, num_generations: int, first_draw_id: int = 0, stream: str = "train"
) -> DatumBatch:
    """Repeat every prompt `num_generations` times (copies are adjacent), with columns that distinguish the copies.

    Three are int64 [B * num_generations]: `group_id` (the prompt's index in this batch), `draw_ids` (`first_draw_id` +
    group_id, which counts prompts over the whole run) and `sample_index` (the index of the copy). A list `stream` has
    the argument `stream` for every copy."""
    logs = batch["message_log"]
    others = type(batch)({key: value for key, value in batch.items() if key != "message_log"})
    repeated = others.repeat_interleave(num_generations)
    # each copy has separate messages; their token ids are shared, because nothing modifies them
    repeated["message_log"] = [[dict(message) for message in log] for log in logs for _ in range(num_generations)]
    repeated["group_id"] = torch.arange(batch.size).repeat_interleave(num_generations)
    repeated["draw_ids"] = repeated["group_id"] + first_draw_id
    repeated["sample_index"] = torch.arange(num_generations).repeat(batch.size)
    repeated["stream"] = [stream] * repeated.size
    return repeated


def run_multi_turn_rollout(
    policy_generation: GenerationInterface, input_batch: DatumBatch, tokenizer: TokenizerType, task_to_env: Mapping[str, Environment],
    max_seq_len: int, max_rollout_turns: int = 999999, greedy: bool = False,
) -> tuple[DatumBatch, dict[str, float]]:  # fmt: skip
    """Continue every conversation of the batch until it ends, or for `max_rollout_turns` turns. Return (batch, metrics
    of the rollouts and the environments).

    Messages are appended to the rows' message logs in place. The returned batch also has `total_reward` float32 [B],
    summed over turns, with components under `reward/<name>`, and `truncated` bool [B]: whether a response or an
    observation was truncated. The engine gets `draw_ids`, `sample_index` and `stream`. Agents of environments with
    `runs_rollouts` make the rollouts instead."""
    if are_made_by_agents(input_batch, task_to_env):
        return run_agent_rollouts(policy_generation, input_batch, tokenizer, task_to_env, greedy)
    conversations = Conversations(input_batch.copy(), tokenizer, max_seq_len)
    for _ in range(max_rollout_turns):
        if not conversations.active:
            break
        turn = conversations.begin()
        early = EarlyScoring(turn.active, tokenizer, task_to_env)
        tells = getattr(policy_generation, "reports_finished", False) and early.is_possible
        beside = {"on_finished": early.finished} if tells else {}
        conversations.respond(turn, policy_generation.generate(turn.inputs, greedy=greedy, **beside))
        conversations.observe(turn, calculate_rewards(turn.active, task_to_env, early.begun))
    batch = conversations.finish()
    return batch, rollout_metrics(conversations.stats) | environment_metrics(task_to_env, batch["task_name"])


def with_greedy_baseline(
    roll_out: Callable[..., tuple[DatumBatch, dict[str, float]]],
    final_rewards: Callable[[Rollouts], torch.Tensor],
    prompts: DatumBatch,
) -> tuple[DatumBatch, dict[str, float]]:
    """Call `roll_out` for a greedy response to each distinct prompt, then for `prompts`. Return the second batch and
    metrics with two additions.

    The batch gets `reward_baseline` float32 [B], which the advantage estimator ReMax needs: the reward of the greedy
    response to the row's prompt after `final_rewards` (penalties, scaling and shaping). The metrics get
    `greedy_reward`, the mean of these rewards over the prompts."""
    groups, group = torch.unique(prompts["group_id"], return_inverse=True)
    firsts = [int((group == g).nonzero()[0]) for g in range(len(groups))]
    greedy, _ = roll_out(copy.deepcopy(prompts.select_indices(firsts)), greedy=True)
    rewards = final_rewards(Rollouts(greedy.data)).float()
    finished, metrics = roll_out(prompts)
    finished["reward_baseline"] = rewards[group]
    return finished, metrics | {"greedy_reward": float(rewards.mean())}


class PromptSource:
    """A source of prompts from a data loader, which starts over at its end. Each prompt is repeated `num_generations`
    times. It gets the run's next draw id from `state`; the draw id seeds its responses, and is their `group_id`."""

    def __init__(
        self, loader: StatefulDataLoader | MultipleDataloaderWrapper, num_generations: int, state: TrainState
    ) -> None:
        self.loader, self.num_generations, self._state = loader, num_generations, state
        self._batches: Iterator[BatchedDataDict] | None = None
        self.finished_epochs = 0  # epochs that ended since a reader set this to 0

    def next(self) -> BatchedDataDict:
        """Return the next prompts, each repeated `num_generations` times, with the columns of `repeat_prompts`."""
        batch = self._draw()
        repeated = repeat_prompts(batch, self.num_generations, self._state.draw(batch.size), stream="train")
        repeated["group_id"] = repeated["draw_ids"].clone()  # unique in the run: a group may be kept for a later step
        return repeated

    def _draw(self) -> BatchedDataDict:
        epoch = begun = getattr(self.loader, "epoch", 0)  # alternating loaders have no epochs
        if self._batches is None:
            self._batches = iter(self.loader)  # skips an epoch whose rest is too small for a batch
            begun = getattr(self.loader, "epoch", 0)
        batch = next(self._batches)
        now = getattr(self.loader, "epoch", 0)
        if now != begun:
            self._batches = None
        self.finished_epochs += now - epoch
        return batch
