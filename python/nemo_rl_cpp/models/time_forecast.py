"""Forecasts how long a run takes: measures the passes of its models for about a second, and adds up those of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nemo_rl_cpp.config.lora import LayerKinds, adapted_modules
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.hub.sources import TINY_RANDOM, local_folder
from nemo_rl_cpp.metrics.memory import available_bytes
from nemo_rl_cpp.models.footprint import Buffers
from nemo_rl_cpp.models.memory import cache_bytes, checkpoint_bytes, micro_batch_tokens, with_known_sizes
from nemo_rl_cpp.models.model_folder import ModelFolder, read_model_folder, tiny_random
from nemo_rl_cpp.models.model_sizes import ModelSizes, model_sizes
from nemo_rl_cpp.threads import threads_at_start

_LEAST_PARAMETERS = 10_000_000
"""In a run of a smaller model Python takes a large part of the time, so there is no forecast."""
_LONGEST = 30.0  # seconds of measuring on a machine that has other work, after which there is no forecast
_DISK = 3e8  # bytes per second that a checkpoint writes
_PROGRAM = (
    "import json, sys; from nemo_rl_cpp import _text; threads, config, run = json.load(sys.stdin); "
    "_text.set_num_threads(threads); print(json.dumps(_text.pass_times(config, run)))"
)


class Lengths(NamedTuple):
    """The mean number of tokens of a prompt, and of a response if the data have responses."""

    prompt: float
    response: float = 0.0


class _Rollouts(NamedTuple):
    """A batch of rollouts: the number of prompts, and the number of responses to each prompt."""

    prompts: int
    each: int

    @property
    def rows(self) -> int:
        return self.prompts * self.each


@dataclass(frozen=True)
class TimeForecast:
    """The numbers of forward, backward and decode passes of a run. `seconds` measures each pass and adds up their
    times.

    Attributes:
        prompt, response: tokens of a prompt and of a response.
        val_rows: rows of the validation data."""

    config: TrainMasterConfig
    sizes: ModelSizes
    prompt: int
    response: int
    val_rows: int

    @staticmethod
    def of(config: TrainMasterConfig, lengths: Lengths, val_rows: int = 0) -> TimeForecast | None:
        """Return the forecast of a run; None if the run's time is not mainly that of the native core in this process:
        with several processes, a GPU, transformers, vLLM, several turns, agents, teachers, or a small model."""
        config = with_known_sizes(config)
        policy, generation = config.policy, config.policy.generation
        sizes = [model_sizes(model.model_name, model.hf_config_overrides) for model in config.trained_models().values()]
        if None in sizes or sizes[0].parameters < _LEAST_PARAMETERS or config.loop.max_rollout_turns > 1:
            return None
        elsewhere = config.cluster.has_workers or config.cluster.device != "cpu" or policy.backend != "native"
        served = generation.runs_vllm or generation.expose_http_server or config.algorithm == "distillation"
        if elsewhere or served or config.teachers or config.loss_fn.score_centering_k is not None:
            return None
        longest = policy.max_total_sequence_length
        if config.algorithm == "sft":
            prompt, response = round(lengths.prompt), round(lengths.response)
        else:
            longest = generation.effective_max_model_len(longest)
            prompt, response = round(lengths.prompt), generation.max_new_tokens or longest
        prompt = max(1, min(prompt, longest - 1))
        return TimeForecast(config, sizes[0], prompt, max(1, min(response, longest - prompt)), val_rows)

    # ---- the work of a step

    @property
    def _step(self) -> _Rollouts:
        loop = self.config.loop
        return _Rollouts(loop.num_prompts_per_step, loop.num_generations_per_prompt)

    def _rows(self, model: TrainedModelConfig) -> int:
        """Return the number of sequences of a micro-batch."""
        by_tokens = model.sequence_packing.enabled or model.dynamic_batching.enabled
        length = self.prompt + self.response if by_tokens else model.max_total_sequence_length
        return max(1, micro_batch_tokens(model, "train") // length)

    def _packed(self, model: TrainedModelConfig) -> int:
        """Return the number of tokens that the passes over a step compute; a prompt that samples of a micro-batch share
        counts once."""
        prompts, each = self._step
        shared = min(each, self._rows(model)) if model.share_prompt_prefix else 1
        return prompts * (-(-each // shared) * self.prompt + each * self.response)

    def _scoring_passes(self) -> int:
        """Return the number of passes over a step in which the policy or its reference model scores the tokens."""
        loop, loss = self.config.loop, self.config.loss_fn
        passes = (loss.reference_policy_kl_penalty != 0) + (loss.top_entropy_quantile < 1)
        return passes + self._scores_old_policy + 2 * (loop.adv_estimator.name == "optimal_token_baseline")

    @property
    def _scores_old_policy(self) -> bool:
        config = self.config
        never = config.policy.reuse_generation_logprobs == "never" and not config.loss_fn.bypass_mode
        return config.algorithm != "sft" and (never or config.loop.seq_logprob_error_threshold is not None)

    def _kept_tokens(self) -> float:
        """Return the mean number of tokens per step that are trained on generation's activations: those of the first
        update, but none in every kept_activations_check_period-th step."""
        policy = self.config.policy
        if self.config.algorithm == "sft" or policy.activation_checkpointing or self._scores_old_policy:
            return 0.0
        tokens, limit, period = self._packed(policy), policy.kept_activations_gb, policy.kept_activations_check_period
        need = tokens * Buffers(self.sizes, _width(policy)).kept
        fits = float(need <= available_bytes() / 4) if limit is None else min(1.0, limit * 1e9 / need)
        return fits * tokens / self._updates(policy) * (1 - 1 / period if period else 1)

    def _decode_steps(self, rollouts: _Rollouts) -> dict[tuple[int, int, int, int], int]:
        """Return {kind of decode step (see csrc/forecast/pass_times.h): number of such steps} for a batch of rollouts.
        Responses that find no slot or no room in the KV cache wait for others to end."""
        policy, generation = self.config.policy, self.config.policy.generation
        slots = min(rollouts.rows, generation.max_batch_size or rollouts.rows)
        if generation.kv_cache_gb:
            own = cache_bytes(policy, self.sizes, self.response + self.prompt // rollouts.each)
            slots = max(1, min(slots, int(generation.kv_cache_gb * 1e9 / own)))
        full, rest = divmod(rollouts.rows, slots)
        counts = {slots: full, rest: 1} if rest else {slots: full}
        step = self.prompt, self.response // 2, rollouts.each
        return {(rows, *step): count * (self.response - 1) for rows, count in counts.items()}

    # ---- the time

    def seconds(self, steps: int, begins: bool) -> float | None:
        """Measure, and return the seconds of `steps` steps with their validations and checkpoints; None if the core
        cannot try the model. `begins`: the run starts from scratch.

        The time of environments, rewards and data is not included."""
        config, loop = self.config, self.config.loop
        generated = [] if config.algorithm == "sft" else [self._step._replace(prompts=loop.prompts_per_round)]
        batches_of_validation = self._validation()
        batches = generated + [batch for batch, _ in batches_of_validation]
        decode = sorted({step for batch in batches for step in self._decode_steps(batch)}, reverse=True)
        critics = [config.value] if config.has_critic else []
        try:
            times = self._measure(config.policy, decode)
            of_critic = [self._measure(critic, value_head=True) for critic in critics]
        except subprocess.SubprocessError:
            return None
        of_step = dict(zip(decode, times["decode"]))

        def generation(batch: _Rollouts) -> float:
            prefill = batch.prompts * self.prompt * times["prefill"]
            return prefill + sum(count * of_step[step] for step, count in self._decode_steps(batch).items())

        # the first decode steps after an update read the weights in place, which takes about as long as packing
        step = sum(generation(batch) + 2 * times["packing"] for batch in generated)
        step += self._scoring_passes() * self._packed(config.policy) * times["score"]
        step += self._training(config.policy, times, loop.policy_epochs)
        # the layers' forward pass of the first update is omitted if generation has kept their activations
        step -= self._kept_tokens() * times["prefill"]
        for critic, of in zip(critics, of_critic):
            step += self._packed(critic) * of["score"] + self._training(critic, of, loop.critic_epochs)
        validation = sum(count * generation(batch) for batch, count in batches_of_validation)
        if config.algorithm == "sft":
            validation = self._val_rows * (self.prompt + self.response) * times["forward"]
        validations = steps // loop.val_period if loop.val_period > 0 else loop.val_at_end
        seconds = steps * step + (validations + (loop.val_at_start and begins)) * validation
        if config.checkpointing.enabled:
            saved = -(-steps // config.checkpointing.save_period)
            seconds += saved * (checkpoint_bytes(config) or 0.0) / _DISK
        return seconds

    def _training(self, model: TrainedModelConfig, times: dict[str, float], epochs: int) -> float:
        """Return the seconds of training on one step's samples for `epochs` epochs. `times` holds the seconds of each
        kind of pass."""
        of_tokens = self._packed(model) * (times["forward"] + times["backward"])
        return epochs * (of_tokens + self._updates(model) * times["update"])

    def _updates(self, model: TrainedModelConfig) -> int:
        return max(1, self._step.rows // (model.train_global_batch_size or self._step.rows))

    @property
    def _val_rows(self) -> int:
        """Return the number of prompts, or of answers, of a validation."""
        most = self.config.loop.max_val_samples
        return self.val_rows if most is None else min(self.val_rows, most)

    def _validation(self) -> list[tuple[_Rollouts, int]]:
        """Return (batch of rollouts, how many such batches) for the batches of a validation."""
        loop, rows = self.config.loop, self._val_rows
        if not rows or self.config.algorithm == "sft":
            return []
        full, rest = divmod(rows, size := min(loop.val_batch_size or rows, rows))
        each = loop.val_num_generations_per_prompt
        batches = [(_Rollouts(size, each), full), (_Rollouts(rest, each), 1)]
        return [(batch, count) for batch, count in batches if batch.prompts]

    def _measure(
        self, model: TrainedModelConfig, decode: Sequence[tuple[int, ...]] = (), value_head: bool = False
    ) -> dict[str, float]:
        """Return the seconds of each kind of pass of a model (see csrc/forecast/pass_times.h). Raise SubprocessError if
        measuring fails or takes long.

        A separate process measures them, because torch's threads would remain in this one, which will start
        environments by forking."""
        config, generation = self.config, self.config.policy.generation
        folder = _folder(model, value_head)
        run: dict[str, object] = {
            "dtype": model.precision,
            "scores": value_head or self._scoring_passes() > 0,
            "checkpoint": model.activation_checkpointing,
            "packs": generation.packed_weights != "off",
            "length": self.prompt + self.response,
            "micro_batch": self._rows(model) * (self.prompt + self.response),
            "trained": self._step.rows * self.response / self._packed(model),
            "temperature": generation.temperature or 1.0,
            "top_p": generation.top_p or 1.0,
            "top_k": max(generation.top_k or 0, 0),
            "decode": decode,
        }
        if model.lora is not None:
            modules = adapted_modules(model.lora, LayerKinds.of_native(folder.native()))
            matrices = sorted({module.rpartition(".")[2] for module in modules})
            run["lora"] = model.lora.dim, model.lora.alpha, matrices, model.lora.merge
        given = json.dumps([threads_at_start(config.cluster.cpus_per_worker), folder.native(), run])
        program = [sys.executable, "-P", "-c", _PROGRAM]
        done = subprocess.run(program, input=given, capture_output=True, text=True, timeout=_LONGEST, check=True)
        return json.loads(done.stdout)


def _width(model: TrainedModelConfig) -> int:
    return 2 if model.precision == "bfloat16" else 4


def _folder(model: TrainedModelConfig, value_head: bool) -> ModelFolder:
    fields = {"value_head": value_head, "max_length": model.max_total_sequence_length}
    path = None if model.model_name == TINY_RANDOM else local_folder(model.model_name)
    if path is None:
        folder = tiny_random(model.hf_config_overrides, **fields)
    else:
        folder = read_model_folder(path, model.hf_config_overrides, **fields)
    return replace(folder, quantization=model.quantization)


def time_text(seconds: float) -> str:
    """Return a duration as text with two figures, such as "40 s", "2 h 10 min" or "3 days"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    minutes = seconds / 60
    if minutes < 100:
        return f"{round(minutes)} min"
    if minutes < 48 * 60:
        hours, rest = divmod(round(minutes / 10) * 10, 60)
        return f"{hours} h {rest} min" if rest and hours < 10 else f"{round(minutes / 60)} h"
    return f"{round(minutes / 60 / 24)} days"
