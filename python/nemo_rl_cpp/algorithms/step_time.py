"""Forecast of a training step's duration. The native core generates and trains with a few layers of the run's model for
about a second; numbers of floating-point operations scale the measured times to a whole step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

import torch

from nemo_rl_cpp._native import C
from nemo_rl_cpp.algorithms.custom_components import make_loss
from nemo_rl_cpp.algorithms.loss import MseValueLossFn
from nemo_rl_cpp.checks.banner import rows_of
from nemo_rl_cpp.checks.data import Lengths, mean_lengths
from nemo_rl_cpp.config.data import plain_sections
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.distributed.cluster import use_threads
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import local_folder
from nemo_rl_cpp.metrics.memory import available_bytes
from nemo_rl_cpp.models import memory
from nemo_rl_cpp.models.generation.native import native_runner
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.model_folder import ModelFolder, read_model_folder, tiny_random
from nemo_rl_cpp.models.model_sizes import ModelSizes
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.policy.train_step import Scoring
from nemo_rl_cpp.models.weights import pack_blocks
from nemo_rl_cpp.report.page import duration

Native = dict[str, Plain]
"""The keyword arguments of the native `DecoderModel`."""
_IN_MEMORY, _MOST_OPERATIONS, _STEPS = 64e6, 8e9, 3
"""Bytes of weights that do not all stay in a processor's cache from one decode step to the next; operations of a measured
pass, a tenth of a second at 80 billion a second; measured decode steps."""
_SHORT, LONG_RUN = 0.5, 6e13
"""Seconds of a step below which Python, whose time is not forecast, takes a large part of the step; operations of a run,
ten minutes at 100 billion a second, above which a measurement delays the run's start by little."""


@dataclass(frozen=True)
class Shape:
    """The tokens of a step: `prompts` prompts of `prompt` tokens, with `responses` responses of `new` tokens each."""

    prompts: int
    responses: float
    prompt: int
    new: int

    @property
    def rows(self) -> float:
        return self.prompts * self.responses

    @property
    def keys(self) -> float:
        """The mean number of tokens that a token of a response attends to."""
        return self.prompt + self.new / 2

    @classmethod
    def of(cls, config: TrainMasterConfig, lengths: Lengths | None) -> Shape:
        """Return the shape of a step in which every response has the maximum length, and every prompt the mean length
        in `lengths`. If that is None, prompts fill the rest of the longest sequence, and no step takes longer. In
        supervised fine-tuning, `lengths` also has the mean length of the responses."""
        policy, loop = config.policy, config.loop
        longest = policy.generation.effective_max_model_len(policy.max_total_sequence_length)
        most = min(config.data.max_input_seq_length or longest, longest - 1)
        known = lengths or Lengths(most, most)
        if config.algorithm == "sft":
            whole = min(known.prompt, longest)  # longer rows are cut
            answer = min(known.answer, whole)
            return cls(loop.num_prompts_per_step, 1, round(whole - answer), max(1, round(answer)))
        new = min(policy.generation.max_new_tokens or longest, longest - 1)
        prompt = min(most, longest - new) if lengths is None else max(1, round(min(known.prompt, longest - 1)))
        new = min(new, longest - prompt)
        return cls(loop.num_prompts_per_step, loop.num_generations_per_prompt, prompt, new)

    def in_micro_batches(self, model: TrainedModelConfig) -> Shape:
        """Return the shape of the work of training `model`: each prompt counts once for every micro-batch that has
        responses to it, because each of these micro-batches computes the prompt."""
        budget = next((each for each in (model.sequence_packing, model.dynamic_batching) if each.enabled), None)
        rows = model.train_micro_batch_size if budget is None else (budget.train_mb_tokens - self.prompt) // self.new
        parts = ceil(self.responses / max(1, rows if model.share_prompt_prefix else 1))
        return replace(self, prompts=self.prompts * parts, responses=self.responses / parts)


@dataclass(frozen=True)
class Costs:
    """The floating-point operations of a forward pass per token. `layers`: 2 for each weight of the layers' matrices,
    counting only the experts that process the token. `head`: 2 for each weight of the LM head, if the token gets
    logits. `per_key`: 4 for each element of the token's query vectors, for each key that the token attends to."""

    layers: float
    head: float
    per_key: float

    @classmethod
    def of(cls, native: Native) -> Costs:
        """Return the costs of the model that `native` describes, without quantisation."""
        experts = native.get("experts")
        share = experts["chosen"] / experts["count"] if experts else 1.0
        tables = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight", "lm_head.weight")
        matrices = [spec for spec in C.ParameterLayout(native).specs if len(spec.shape) > 1 and spec.name not in tables]
        weights = sum(prod(spec.shape) * (share if ".experts." in spec.name else 1.0) for spec in matrices)
        head = 0.0 if native["value_head"] else 2.0 * native["hidden_size"] * native["vocab_size"]
        return cls(2.0 * weights, head, 4.0 * sum(each.query for each in ModelSizes.of(native).attention))

    def forward(self, tokens: float, keys: float, logits: float) -> float:
        """Return the operations for `tokens` tokens that attend to `keys` keys on average and `logits` of which get
        logits."""
        return tokens * (self.layers + self.per_key * keys) + logits * self.head

    def of_prompts(self, shape: Shape) -> float:
        return self.forward(shape.prompts * shape.prompt, shape.prompt / 2, 0)

    def of_responses(self, shape: Shape) -> float:
        tokens = shape.rows * shape.new
        return self.forward(tokens, shape.keys, tokens)


@dataclass(frozen=True)
class Rates:
    """Measured seconds per operation of a forward pass: in decode steps, in scoring (and prefill), and in training,
    which includes the backward pass; and the seconds of an optimizer step."""

    decode: float
    score: float
    train: float
    update: float


def few_layers(native: Native, layers: int, vocabulary: int) -> Native:
    """Return the description of a model's first `layers` layers, with a vocabulary of `vocabulary` tokens."""
    cut = {**native, "layers": native["layers"][:layers], "vocab_size": vocabulary}
    for part in {"recurrent", "experts"} & native.keys():
        cut[part] = {**native[part], "layers": [layer for layer in native[part]["layers"] if layer < layers]}
        if not cut[part]["layers"]:
            del cut[part]
    return cut | ({"one_block": native["one_block"][:layers]} if "one_block" in native else {})


def layers_of_all_kinds(native: Native) -> int:
    """Return the smallest n for which the first n layers include every kind of layer that the model has."""
    parts = [native.get(part, {}).get("layers", ()) for part in ("recurrent", "experts")]
    blocks = native.get("one_block") or [True] * len(native["layers"])
    kinds = [(kind, blocks[i], *(i in part for part in parts)) for i, kind in enumerate(native["layers"])]
    return 1 + max(map(kinds.index, kinds))


@dataclass(frozen=True)
class _FewLayers(ModelFolder):
    """A model folder without weights: a model's first layers, a smaller vocabulary, and random parameters."""

    size: tuple[int, int] = (0, 0)  # numbers of layers and of tokens in the vocabulary

    def native(self) -> Native:
        return few_layers(super().native(), *self.size)

    def fill(self, model: C.DecoderModel) -> None:
        numbers = torch.randn(65537, generator=torch.Generator().manual_seed(0)) * 0.02
        weights = model.compute if model.masters is None else model.masters
        for part in weights.split(len(numbers)):
            part.copy_(numbers[: len(part)])
        for spec in model.blocks:
            times = ceil(prod(spec.shape) / len(numbers))
            if len(spec.shape) > 1:
                pack_blocks(model, spec, numbers.repeat(times)[: prod(spec.shape)].view(spec.shape))
        model.masters_changed()


class _Sample:
    """A small model, whose speed is measured: some layers of the run's model `section` ("policy" or "value") and the
    same share of its vocabulary. The whole model, in `folder`, has `factor` times as many layers. If `decodes`, the
    small model has so many layers that decode steps read its weights from memory, as in the whole model."""

    def __init__(
        self, config: TrainMasterConfig, section: str, folder: ModelFolder, shape: Shape, decodes: bool
    ) -> None:
        self.config, self.settings, self.shape = config, getattr(config, section), shape
        whole, times = folder.native(), 1
        kinds, count, vocabulary = layers_of_all_kinds(whole), len(whole["layers"]), whole["vocab_size"]
        if decodes:
            unit, width = Costs.of(few_layers(whole, kinds, 1)), 2 if self.settings.precision == "bfloat16" else 4
            affordable = _MOST_OPERATIONS / (2 * shape.rows * unit.forward(1, shape.keys, 0))
            times = max(1, min(ceil(_IN_MEMORY / (unit.layers / 2 * width)), int(affordable)))
        layers = min(kinds * times, count)
        self.factor = count / layers
        size = layers, min(vocabulary, ceil(vocabulary * layers / count / 64) * 64)
        options = {"value_head": folder.value_head, "quantization": self.settings.quantization}
        few = _FewLayers(folder.config, None, **options, size=size)

        class Few(Value if section == "value" else Policy):
            def _open_folder(self, seed: int) -> ModelFolder:
                return few

        self.model = Few(None, self.settings, None, **({} if section == "value" else {"init_reference_model": False}))
        self.loss = MseValueLossFn(config.value_loss_fn) if section == "value" else make_loss(config.loss_fn)
        self.costs = Costs.of(few_layers(whole, *size))

    def decoding(self) -> float:
        """Return the measured seconds per operation of decode steps."""
        shape, costs, settings = self.shape, self.costs, self.settings.generation
        keys = min(int(shape.keys), self._most_tokens(shape.keys / 2))
        prompts = max(1, min(shape.prompts, min(self._most_tokens(keys / 2), settings.prefill_chunk_tokens) // keys))
        rows = min(int(shape.rows), settings.max_batch_size or 4096, self._most_tokens(keys))
        engine = C.Engine(
            native_runner(self.model.model, settings), max_batch_size=rows + 1, prefill_chunk_tokens=settings.prefill_chunk_tokens
        )  # fmt: skip
        scoring, index, new = Scoring.of(settings), torch.arange(rows + 1), torch.full((rows + 1,), _STEPS + 1)
        new[0] = 1  # this response ends with the prefill
        requests = C.GenerationRequests(
            prompt_index=index % prompts, draw_ids=index, sample_index=index, streams=index * 0, max_new_tokens=new,
            stop_set=index * 0 - 1, seed=0, stop_token_ids=[], stop_sets=[],
            rule=C.SamplingRule(scoring.temperature, scoring.top_p, scoring.top_k, settings.temperature == 0),
        )  # fmt: skip

        ids, offsets, ends = self._ids(prompts * keys), torch.arange(prompts + 1) * keys, [0.0]

        def generate() -> None:
            ends.clear()
            engine.generate(ids, offsets, requests, lambda *ended: ends.append(time.perf_counter()))

        return _shortest(generate, lambda _: ends[0]) / (_STEPS * costs.forward(rows, keys, rows))

    def training(self) -> tuple[float, float, float]:
        """Return the measured seconds per operation of scoring and of training, and those of an optimizer step."""
        batch, shape = self._batch()
        trained = _shortest(lambda: self.model.train_part(batch, self.loss, gbs=batch.size))
        updated = _shortest(lambda: self.model._step(batch, 0.0, 0.0))
        scored = _shortest(lambda: self.model._score(self.model.model, batch))
        prompts, responses = self.costs.of_prompts(shape), self.costs.of_responses(shape)
        spared = prompts / len(self.model.folder.native()["layers"])  # scoring leaves the last layer to the responses
        work = prompts + responses
        return scored / (work - spared), (trained - updated) / work, updated * self.factor

    def _batch(self) -> tuple[RaggedBatch, Shape]:
        """Return a batch like a micro-batch of the run, or smaller if that takes too long to measure, and its shape."""
        shape, most = self.shape.in_micro_batches(self.settings), self._most_tokens(self.shape.keys) // 2
        part = min(1.0, most / (shape.prompt + shape.new))
        prompt, new = int(shape.prompt * part), max(1, int(shape.new * part))
        responses = int(max(1, min(shape.responses, (most - prompt) // new)))
        shape = Shape(int(max(1, min(shape.prompts, most // (prompt + responses * new)))), responses, prompt, new)
        rows, length = int(shape.rows), prompt + new
        ids, mask = self._ids(rows * length).view(rows, length), torch.ones(rows, length)
        ids[:, :prompt], mask[:, :prompt] = self._ids(prompt), 0.0
        names = "advantages returns generation_logprobs values reference_policy_logprobs kl_cov_penalty".split()
        tokens = dict.fromkeys(names, torch.ones(ids.numel())) | {
            "input_ids": ids.flatten(),
            "token_mask": mask.flatten(),
        }
        samples = {"sample_mask": torch.ones(rows), "rewards": torch.ones(rows)}
        samples["group_id"] = torch.arange(shape.prompts).repeat_interleave(responses)
        return RaggedBatch(offsets_of(torch.full((rows,), length)), tokens, samples), shape

    def _ids(self, count: int) -> torch.Tensor:
        return torch.arange(count) * 7919 % self.model.folder.native()["vocab_size"]

    def _most_tokens(self, keys: float) -> int:
        """Return how many tokens a measured forward pass has if each token attends to `keys` keys: so few that the
        measurement is short."""
        return max(16, min(4096, int(_MOST_OPERATIONS / self.costs.forward(1, keys, 1))))


def _shortest(work: Callable[[], object], begin: Callable[[float], float] = lambda began: began) -> float:
    """Return the seconds of the fastest of three calls of `work`, because the first call allocates buffers, and other
    programs may slow a call down. `begin` is called after each call with the time at which the call began, and returns
    the time from which its seconds are counted."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin(began))
    return min(times)


def step_time(
    config: TrainMasterConfig, shape: Shape, costs: Mapping[str, Costs], rates: Mapping[str, Rates], kept: float
) -> tuple[float, float]:  # fmt: skip
    """Return the seconds of a step's generation and of the rest of the step. `costs` and `rates` have the keys "policy"
    and "value". `kept` is the share of tokens whose activations generation keeps for the first update."""
    loop, penalty, generation, training = config.loop, config.loss_fn.reference_policy_kl_penalty, 0.0, 0.0
    for section, model in config.trained_models().items():
        of, rate, epochs, scored = costs[section], rates[section], loop.critic_epochs, 1
        packed, batch = shape.in_micro_batches(model), model.train_global_batch_size or shape.rows
        work = of.of_prompts(packed) + of.of_responses(packed)
        if section == "policy":
            epochs, scored = loop.policy_epochs, (penalty != 0) + (model.reuse_generation_logprobs == "never")
            layers, first = replace(of, head=0.0), min(1.0, batch / shape.rows)
            # a backward pass has two products for each of the forward pass, or one if the weights are frozen
            passes = 3 if model.lora is None else 2
            spared = kept * first * (layers.of_prompts(packed) + layers.of_responses(packed))
            training -= spared * rate.train / passes
            generation = rate.score * of.of_prompts(shape) + rate.decode * of.of_responses(shape)
            generation *= loop.prompts_per_round / loop.num_prompts_per_step  # above 1 with dynamic sampling
        training += (epochs * rate.train + scored * rate.score) * work + epochs * shape.rows / batch * rate.update
    return (0.0 if config.algorithm == "sft" else generation), training


def _folders(config: TrainMasterConfig) -> dict[str, ModelFolder]:
    """Return the folders of the trained models, by the names of their sections: "policy" and perhaps "value"."""
    folders = {}
    for section, model in config.trained_models().items():
        path = local_folder(model.model_name)
        of = {"overrides": model.hf_config_overrides, "value_head": section == "value"}
        folders[section] = tiny_random(**of) if path is None else read_model_folder(path, **of)
    return folders


def measured_step_time(config: TrainMasterConfig, shape: Shape) -> tuple[float, float]:
    """Measure for about a second, and return the seconds of a step's generation and of the rest of the step."""
    use_threads(config.cluster)
    costs, rates, needed = {}, {}, 0.0
    for section, folder in _folders(config).items():
        costs[section], decode = Costs.of(folder.native()), 0.0
        if section == "policy" and config.algorithm != "sft":
            sample = _Sample(config, section, folder, shape, decodes=True)
            decode, tokens = sample.decoding(), shape.prompts * shape.prompt + shape.rows * shape.new
            needed = sample.factor * sample.model.model.kept_bytes_per_token * tokens
        rates[section] = Rates(decode, *_Sample(config, section, folder, shape, decodes=False).training())
    return step_time(config, shape, costs, rates, _kept_share(config, needed))


def _kept_share(config: TrainMasterConfig, needed: float) -> float:
    """Return the share of a step's activations, `needed` bytes in all, that generation keeps for training."""
    policy, given = config.policy, config.policy.kept_activations_gb
    if not needed or policy.activation_checkpointing or policy.reuse_generation_logprobs == "never":
        return 0.0
    if given is not None:
        return min(1.0, given * 1e9 / needed)
    held = (memory.certain_bytes(config) or 0.0) + needed  # the first step has activations of its own
    return float(needed <= (available_bytes() - held) / 4)


def configured_steps(config: TrainMasterConfig) -> int:
    """Return the number of steps of a run that starts from scratch."""
    loop, steps = config.loop, config.loop.max_num_steps
    rows = [rows_of(section) for where, section in plain_sections(config.data) if where.startswith("data.train")]
    if None in rows or config.data.use_multiple_dataloader:
        return steps
    return min(steps, loop.max_num_epochs * (sum(rows) // loop.prompts_per_round))


def time_text(config: TrainMasterConfig, steps: int, least: float = 0.0) -> str | None:
    """Return a sentence on how long a step and `steps` steps take, for a run that `has_time_forecast`. Return None if
    the steps have fewer than `least` floating-point operations, or if the measurement fails, by a lack of memory
    perhaps: the run may still train."""
    try:
        costs = {section: Costs.of(folder.native()) for section, folder in _folders(config).items()}
        each = dict.fromkeys(costs, Rates(decode=1.0, score=1.0, train=3.0, update=0.0))
        operations = lambda shape: steps * sum(step_time(config, shape, costs, each, kept=0.0))  # noqa: E731
        if operations(Shape.of(config, None)) < least:  # without reading the data set
            return None
        lengths = mean_lengths(config)
        shape = Shape.of(config, lengths)
        if operations(shape) < least:
            return None
        generation, training = measured_step_time(config, shape)
    except Exception:  # noqa: BLE001 - see above
        return None
    if generation + training < _SHORT:
        return "a step takes less than a second"
    whole, total = duration(generation + training), f"{steps:,} steps {duration(steps * (generation + training))}"
    if config.algorithm == "sft":
        return f"a step takes {'' if lengths else 'at most '}about {whole}; {total}"
    rounds = " in one round of sampling" if getattr(config.loop, "use_dynamic_sampling", False) else ""
    parts = f"generation {duration(generation)}, training {duration(training)}"
    assumed = f"if every response has {shape.new:,} tokens" + ("" if lengths else f" and every prompt {shape.prompt:,}")
    return f"a step takes at most about {whole}{rounds} ({parts}), {assumed}; {total}"
