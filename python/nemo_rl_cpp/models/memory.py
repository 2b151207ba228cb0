"""Estimate a run's peak memory by phase, from the model's sizes and the configuration alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp.config.cluster import engines_of, trainers_of
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.config.policy import PolicyConfig, TrainedModelConfig
from nemo_rl_cpp.metrics.memory import meminfo_bytes
from nemo_rl_cpp.models.footprint import KEY_TILE, Buffers
from nemo_rl_cpp.models.model_sizes import ModelSizes, adapter_sizes, known_model, model_sizes

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import WholeConfig


def machine_memory() -> float | None:
    """Return the bytes of memory that this process may use: the machine's, or a lower cgroup limit; None: unknown."""
    amounts = [meminfo_bytes("MemTotal")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            amounts.append(int(Path(file).read_text()))
    return float(min(amounts)) or None


def tape_bytes(sizes: ModelSizes, width: int) -> float:
    """Return the bytes per token that torch keeps for the backward pass of one transformers layer.

    Torch keeps the input, the normalised form and the output of each norm; queries, keys and values; the attention's
    output twice; and of the MLP the gate, its activation, up, and the product of the last two. Norms of bfloat16 inputs
    are computed in float32. `width`: bytes per element."""
    query, key_value = sizes.query_size, sizes.key_value_size
    norms = 6 * sizes.hidden_size * width + (0 if width == 4 else 2 * sizes.hidden_size * 4)
    return norms + (3 * query + 2 * key_value + 4 * sizes.experts_per_token * sizes.intermediate_size) * width


def gradient_bytes(model: TrainedModelConfig, sizes: ModelSizes, parameters: int, processes: int) -> float:
    """Return the bytes of float32 gradients that each of `processes` ranks holds while it trains `parameters` weights,
    in several partial sums over its gradient blocks (see `Ranks.blocks`), or shards of them."""
    blocks = model.gradient_blocks or processes
    sums = parameters * 4.0 * max(1, blocks // processes).bit_length()
    if processes == 1 or not model.shards_gradients:
        return sums
    # a shard of each sum, and the gradient of the current block; if a block is one micro-batch, only a part of that
    # gradient exists at a time: the embedding and four layers
    by_tokens = model.sequence_packing.enabled or model.dynamic_batching.enabled
    alone = not by_tokens and (model.train_global_batch_size or 0) <= blocks * (model.train_micro_batch_size or 0)
    few = sizes.embedding_parameters + 4 * sizes.layer_parameters
    return sums / processes + 4.0 * (min(parameters, few) if alone else parameters)


Parts = tuple[tuple[str, float], ...]
"""Uses of memory: pairs (description, bytes)."""


@dataclass(frozen=True)
class Phase:
    """A phase of a training step, and its memory."""

    name: str
    parts: Parts

    @property
    def total(self) -> float:
        return sum(size for _, size in self.parts)


def with_known_sizes(config: TrainMasterConfig) -> TrainMasterConfig:
    """Return the configuration for an estimate before models are downloaded: a model that is in the table of known
    models but not on this machine gets the table's sizes in hf_config_overrides. `config` itself is not changed."""
    changed: dict[str, object] = {}
    for name, model in config.trained_models().items():
        known = known_model(model.model_name)
        if known is not None and model_sizes(model.model_name, model.hf_config_overrides) is None:
            sizes = known.config | (model.hf_config_overrides or {})
            changed[name] = model.model_copy(update={"hf_config_overrides": sizes})
    return config.model_copy(update=changed) if changed else config


def generation_bytes(model: PolicyConfig) -> float | None:
    """Return the bytes of the weights for generation: in the run's precision, plus the packed copy for fast decoding.
    Return None if the model's sizes are not known."""
    sizes = model_sizes(model.model_name, model.hf_config_overrides)
    if sizes is None:
        return None
    return float(sizes.parameters * _width(model)) + sum(size for _, size in _packed_weights(model, sizes))


def forecast(config: TrainMasterConfig) -> list[Phase] | None:
    """Return the phases of a step with their memory in bytes, for sequences of the maximum length; None if the policy's
    sizes are not known on this machine.

    The estimate is the sum over all processes that train or generate. Each process holds the weights (with tensor
    parallelism a slice), its gradients and its micro-batch. Master weights and optimizer state are sharded. With the
    transformers backend weights and gradients are sharded too, and weights are gathered for computation. The native
    core keeps gradients and activation buffers for the next step, so they take memory in every phase."""
    policy, critic = config.policy, config.value if config.has_critic else None
    whole = model_sizes(policy.model_name, policy.hf_config_overrides)
    if whole is None:
        return None
    count, engines = max(trainers_of(config), 1), engines_of(config)
    slices = {"policy": policy.tensor_parallel(count)}
    sizes = whole.slice(slices["policy"])
    resting = (("Python and libraries", LIBRARIES), *_resting(policy, sizes.parameters, "policy", sizes, count))
    once = list(_ONCE) + (["policy weights", "policy gradients", "reference weights"] if policy.backend == "hf" else [])
    if critic is not None:
        slices["value"] = critic.tensor_parallel(count)
        value = (model_sizes(critic.model_name, critic.hf_config_overrides) or whole).slice(slices["value"])
        resting += _resting(critic, value.backbone_parameters, "value", value, count)
        once += ["value weights", "value gradients"] if critic.backend == "hf" else []
    if config.loss_fn.reference_policy_kl_penalty:
        if policy.lora is None:
            kept = _width(policy) if policy.backend == "native" or count == 1 else 4
            resting += (("reference weights", sizes.parameters * kept),)
        resting += _scoring_buffers(config, "reference", sizes)
    for teacher in dict.fromkeys(config.teachers.values()):
        if (taught := model_sizes(teacher, None)) is not None:
            resting += (("teacher weights", taught.slice(slices["policy"]).parameters * _width(policy)),)
            resting += _scoring_buffers(config, "teacher", taught)
    if config.cluster.device == "cpu" and not engines:
        resting += _packed_weights(policy, sizes)

    computed = _gathered(policy, sizes.layer_parameters + sizes.embedding_parameters, count)
    trained = {"policy": _of_training(config, "policy", sizes, sizes.parameters, count // slices["policy"])}
    table = {
        "generation": _of_generation(config, sizes, whole.vocab_size) + _gathered(policy, sizes.parameters, count),
        "log-probabilities": (*_of_scoring(config, sizes), *computed),
        "policy training": (*trained["policy"].now, *computed),
    }
    if config.algorithm == "sft":
        table = {"policy training": table["policy training"]}
    if critic is not None:
        trained["value"] = _of_training(config, "value", value, value.backbone_parameters, count // slices["value"])
        table["value training"] = trained["value"].now
    if config.checkpointing.enabled:
        table["checkpoint"] = _of_checkpoint(config.trained_models().values(), sizes)
    for phase, parts in table.items():
        table[phase] = (*parts, *(part for name, each in trained.items() if name not in phase for part in each.held))

    def in_all(part: str, size: float) -> tuple[str, float]:
        shared = part.endswith(tuple(once))
        return part, size * (slices["value" if part.startswith("value") else "policy"] if shared else count)

    apart = _engines(policy, whole, engines)
    return [Phase(name, tuple(in_all(*part) for part in (*resting, *parts)) + apart) for name, parts in table.items()]


LIBRARIES = 660e6
"""Bytes of Python, torch and the data of a small run in one process, measured."""
_ONCE = ("master weights", "optimizer", "KV cache", "recurrent states", "logits")
"""Parts that exist once for each tensor-parallel slice, sharded over processes; other parts exist in every process."""


def _engines(policy: PolicyConfig, sizes: ModelSizes, count: int) -> Parts:
    """Return the memory of `count` engines in separate workers in all phases: weights, and buffers for refits."""
    if count == 0:
        return ()
    weights = float(sizes.parameters * _width(policy) * count)
    packed = tuple((f"engines' {name}", size * count) for name, size in _packed_weights(policy, sizes))
    last = (("weights of the last refit", weights / count),) if policy.refit == "delta" else ()
    return (("engines' weights", weights), ("engines' next weights", weights), *last, *packed)


def checkpoint_bytes(config: TrainMasterConfig) -> float | None:
    """Return the bytes of one checkpoint (weights unless quantised, adapters, with save_optimizer also master weights
    and moments); None if a model's sizes are not known on this machine."""
    total = 0.0
    for name, model in config.trained_models().items():
        sizes = model_sizes(model.model_name, model.hf_config_overrides)
        if sizes is None:
            return None
        parameters = sizes.parameters if name == "policy" else sizes.backbone_parameters
        trained = _trained(model, parameters, sizes)
        total += 0.0 if model.quantization else parameters * _width(model)
        total += trained * 4.0 if model.lora is not None else 0.0
        if config.checkpointing.save_optimizer:
            optimizer = model.effective_optimizer()
            masters = 0.0 if model.lora is not None or model.precision != "bfloat16" else optimizer.master_bytes
            total += trained * (masters + optimizer.moment_bytes)
    return total


def _width(model: TrainedModelConfig) -> int:
    return 2 if model.precision == "bfloat16" else 4


def _trained(model: TrainedModelConfig, parameters: int, sizes: ModelSizes) -> int:
    return parameters if model.lora is None else adapter_sizes(model.lora, sizes).trained


def _resting(model: TrainedModelConfig, parameters: int, name: str, sizes: ModelSizes, processes: int) -> Parts:
    """Return the memory of the model `name` ("policy" or "value") in all phases: weights, master weights and moments;
    with LoRA weights, adapters, their moments, and with `lora_cfg.merge` a copy of the adapted weights."""
    width, masters = _width(model), ()
    if model.backend == "hf" and processes > 1:
        width = 4  # FSDP2 keeps only the master weights
    elif model.lora is not None:
        trained, kept = adapter_sizes(model.lora, sizes)
        if model.lora.merge:
            masters = ((f"{name} frozen weights", float(kept * width)), (f"{name} adapters", trained * (4.0 + width)))
        else:
            masters = ((f"{name} adapters", trained * (9.0 if width == 2 else 10.0)),)  # see csrc/model/adapters.h
    elif model.precision == "bfloat16":
        masters = ((f"{name} master weights", parameters * model.effective_optimizer().master_bytes),)
    moments = _trained(model, parameters, sizes) * model.effective_optimizer().moment_bytes
    weights = float(parameters * width)
    if model.quantization and model.backend != "hf":
        quantised, values = sizes.quantised_parameters, sizes.value_parameters
        tables = 0 if model.quantization == "nf4" else sizes.embedding_parameters  # in q8_0
        if parameters < sizes.parameters and tables and not sizes.tie_word_embeddings:  # a critic has no LM head
            tables //= 2
        others = parameters - quantised - tables
        blocks = (quantised - values) * _BLOCK_BYTES[model.quantization] + (tables + values) * _BLOCK_BYTES["q8_0"]
        weights = blocks / 32 + others * _width(model)
    return ((f"{name} weights", weights), *masters, (f"{name} optimizer", moments))


def cache_bytes(policy: PolicyConfig, sizes: ModelSizes, tokens: int, windowed: int) -> float:
    """Return the bytes of a KV cache for `tokens` tokens in layers with full attention, `windowed` in others."""
    values = tokens * sizes.cached_values(windowed=False) + windowed * sizes.cached_values(windowed=True)
    return float(values * _width(policy))


def least_cache_bytes(policy: PolicyConfig, sizes: ModelSizes) -> float:
    """Return the bytes of a KV cache that is large enough for one sequence of the maximum length."""
    length = policy.generation.effective_max_model_len(policy.max_total_sequence_length) + 2 * KEY_TILE
    step = sizes.window + policy.generation.prefill_chunk_tokens + 3 * KEY_TILE
    return cache_bytes(policy, sizes, length, min(length, step) if policy.backend == "native" else length)


def _kv_cache(config: TrainMasterConfig, sizes: ModelSizes, responses: int, sequences: int) -> float:
    """Return the bytes of the KV cache for `sequences` sequences, of which every `responses` share a prompt. In layers
    with a sliding window the native engine keeps only the blocks that later tokens read, of each sequence and of each
    shared prompt, and the tokens of one prefill step (csrc/generation/engine.cpp)."""
    policy, tokens = config.policy, _generated_tokens(config, responses, sequences)
    windowed = tokens
    if policy.backend == "native" and sizes.windowed_layers:
        prompts = -(-sequences // responses) if responses > 1 else 0
        longest = policy.generation.effective_max_model_len(policy.max_total_sequence_length)
        step = min(policy.generation.prefill_chunk_tokens, max(0, longest - sizes.window))
        alone = responses == 1 or getattr(config.loop, "max_rollout_turns", 1) > 1
        own = longest if alone else min(policy.generation.max_new_tokens or longest, longest)
        held = sequences * (min(own, sizes.window) + KEY_TILE) + prompts * (sizes.window + KEY_TILE) + step
        windowed = min(tokens, held)
    full, limit = cache_bytes(policy, sizes, tokens, windowed), policy.generation.kv_cache_gb
    return min(full, limit * 1e9) if limit else full


def _states(policy: PolicyConfig, sizes: ModelSizes, sequences: int, prompts: int) -> Parts:
    """Return the memory of the states of the recurrent layers, for `sequences` sequences and their `prompts` distinct
    prompts (csrc/generation/engine.cpp)."""
    if not sizes.recurrent_layers:
        return ()
    states = len(sizes.recurrent_layers) * float(sequences + min(prompts, sequences))
    return (("recurrent states", states * sizes.state_bytes(_width(policy))),)


_PACK_AFTER = 16
"""Decode steps with few sequences after which weights are packed (csrc/kernels/product_figures.h)."""


def _packed_weights(policy: PolicyConfig, sizes: ModelSizes) -> Parts:
    """Return the memory of the weights' copy for decoding, 12 bits per weight (csrc/kernels/packed_weights.h)."""
    generation = policy.generation
    ends_before = generation.packed_weights == "auto" and (generation.max_new_tokens or math.inf) <= _PACK_AFTER
    in_blocks = policy.quantization in ("q8_0", "q4_0")  # of every large matrix; blocks are not packed
    is_native = policy.backend != "hf" and policy.precision == "bfloat16"
    if not is_native or in_blocks or ends_before or generation.packed_weights == "off":
        return ()
    packed = sizes.vocab_size * sizes.hidden_size if policy.quantization else sizes.parameters  # nf4: the LM head
    return (("packed weights", packed * (1.5 + 1 / 16)),)


def micro_batch_tokens(model: TrainedModelConfig, kind: str) -> int:
    """Return the maximum number of tokens in a micro-batch. `kind` is "train" or "logprob"."""
    budget = next((each for each in (model.sequence_packing, model.dynamic_batching) if each.enabled), None)
    samples = model.train_micro_batch_size if kind == "train" else model.logprob_batch_size
    tokens = samples * model.max_total_sequence_length if budget is None else getattr(budget, f"{kind}_mb_tokens")
    return min(tokens, (model.train_global_batch_size or math.inf) * model.max_total_sequence_length)


def _shared_tokens(config: TrainMasterConfig, model: TrainedModelConfig, kind: str) -> float:
    """Return the maximum number of tokens that the native core computes for a micro-batch of the `kind` "train" or
    "logprob", with a prompt that several responses share counted once."""
    tokens = micro_batch_tokens(model, kind)
    if config.algorithm == "sft" or not model.share_prompt_prefix:
        return tokens
    sequences = model.train_global_batch_size if kind == "train" else None
    return min(tokens, _generated_tokens(config, config.loop.num_generations_per_prompt, sequences))


class _Training(NamedTuple):
    """The memory of training a model: `now` is in use while the model trains, `held` during the other phases of a
    step."""

    now: Parts
    held: Parts = ()


def _of_training(config: TrainMasterConfig, name: str, sizes: ModelSizes, parameters: int, ranks: int) -> _Training:
    """Return the memory of training the model `name` ("policy" or "value"): the maximum of the first step, which reuses
    no activations of generation, and of a later step."""
    model: TrainedModelConfig = getattr(config, name)
    gradients = (f"{name} gradients", gradient_bytes(model, sizes, _trained(model, parameters, sizes), ranks))
    head = (_head(model, sizes, "train", _scored_share(config)),) if name == "policy" else ()
    tokens, layers = micro_batch_tokens(model, "train"), sizes.num_hidden_layers
    if model.backend == "hf":
        layer = float(tokens * tape_bytes(sizes, _width(model)))
        inputs = float(tokens * layers * sizes.hidden_size * _width(model)) + layer
        activations = inputs if model.activation_checkpointing else layer * layers
        return _Training((gradients, ("activations", activations), *head))
    buffers, tokens = Buffers(sizes, _width(model)), _shared_tokens(config, model, "train")
    whole = tokens * buffers.training(model.activation_checkpointing, _scored_share(config))
    kept = kept_activations_bytes(config, sizes) if name == "policy" else 0.0
    if not kept:
        return _Training((gradients, ("activations", whole), *head), (gradients, (f"{name} buffers", whole), *head))
    a_layer = tokens * buffers.training(checkpointing=True, scored=_scored_share(config))
    beside = (gradients, ("kept activations", kept), (f"{name} buffers", a_layer), *head)
    return _Training(beside if kept + a_layer > whole else (gradients, ("activations", whole), *head), beside)


def kept_activations_bytes(config: TrainMasterConfig, sizes: ModelSizes) -> float:
    """Return the bytes of generation's activations that a step keeps; 0 if policy.kept_activations_gb is null."""
    policy = config.policy
    tokens = _generated_tokens(config, config.loop.num_generations_per_prompt)
    return min((policy.kept_activations_gb or 0.0) * 1e9, tokens * Buffers(sizes, _width(policy)).kept)


def _generated_tokens(config: TrainMasterConfig, responses: int, sequences: int | None = None) -> int:
    """Return the maximum number of tokens in `sequences` (None: all of a step), if every `responses` share a prompt."""
    policy, generation = config.policy, config.policy.generation
    length = generation.effective_max_model_len(policy.max_total_sequence_length)
    prompt = min(config.data.max_input_seq_length or length, length)
    sequences = config.loop.prompts_per_round * responses if sequences is None else sequences
    if getattr(config.loop, "max_rollout_turns", 1) > 1:
        return sequences * length
    own = min(generation.max_new_tokens or length, length)
    return min(sequences * length, sequences * own + -(-sequences // responses) * prompt)


def _scored_share(config: TrainMasterConfig) -> float:
    """Return the maximum fraction of a sequence's tokens that are in the loss, for a sequence of the maximum length."""
    policy = config.policy
    if config.algorithm == "sft" or getattr(config.loop, "max_rollout_turns", 1) > 1:
        return 1.0
    return min(1.0, (policy.generation.max_new_tokens or math.inf) / policy.max_total_sequence_length)


def _of_generation(config: TrainMasterConfig, sizes: ModelSizes, vocabulary: int) -> Parts:
    """Return the memory of generating the rollouts of a step, or of a validation if it has more sequences."""
    policy, loop = config.policy, config.loop
    batches = [(loop.prompts_per_round * loop.num_generations_per_prompt, loop.num_generations_per_prompt)]
    validates = loop.val_at_start or loop.val_at_end or loop.val_period > 0
    if validates and config.data.validation is not None and config.algorithm != "sft":
        prompts = min(loop.val_batch_size or loop.max_val_samples or 0, loop.max_val_samples or math.inf)
        each = loop.val_num_generations_per_prompt
        batches.append((prompts * each, each))
    limit = policy.generation.max_batch_size
    at_once = [(min(limit or count, count), each) for count, each in batches]
    sequences = max(count for count, _ in at_once)
    tokens = max(_generated_tokens(config, each, count) for count, each in at_once)
    parts = (
        ("KV cache", max(_kv_cache(config, sizes, each, count) for count, each in at_once)),
        *_states(policy, sizes, sequences, loop.prompts_per_round),
        ("logits", sequences * vocabulary * 4.0),
    )
    if policy.backend == "hf":
        return parts
    rows = max(sequences, min(policy.generation.prefill_chunk_tokens, tokens))
    return (*parts, ("prefill", rows * Buffers(sizes, _width(policy)).prefill))


def _of_checkpoint(models: Iterable[TrainedModelConfig], sizes: ModelSizes) -> Parts:
    """Return the memory of the copy of a model's weights that saving needs to merge adapters, or to write experts in
    the file's layout. Models are saved one after the other, so only the largest copy counts."""
    needed = 0.0
    for model in models:
        in_place = model.backend != "hf" and sizes.experts == 1 and (model.lora is None or model.lora.merge)
        if not model.quantization and not in_place:
            needed = max(needed, float(sizes.parameters * _width(model)))
    return (("weight copies", needed),)


def _of_scoring(config: TrainMasterConfig, sizes: ModelSizes) -> Parts:
    """Return the memory of computing log-probabilities, without the buffers that training keeps."""
    policy, scored = config.policy, _scored_share(config)
    if policy.backend == "hf":
        size = float(micro_batch_tokens(policy, "logprob") * tape_bytes(sizes, _width(policy)))
    else:
        buffers, tokens = Buffers(sizes, _width(policy)), _shared_tokens(config, policy, "logprob")
        held = _shared_tokens(config, policy, "train") * buffers.training(policy.activation_checkpointing, scored)
        stream = 4.0 * tokens * sizes.hidden_size  # the only buffer that training does not have
        size = max(stream, tokens * buffers.scoring(scored) - held)
    return ("activations", size), _head(policy, sizes, "logprob", scored)


def _scoring_buffers(config: TrainMasterConfig, name: str, sizes: ModelSizes) -> Parts:
    """Return the memory of the buffers that the native core keeps after scoring with the frozen model `name`
    ("reference" or "teacher")."""
    if config.policy.backend == "hf":
        return ()
    tokens = micro_batch_tokens(config.policy, "logprob")
    return ((f"{name} buffers", tokens * Buffers(sizes, _width(config.policy)).scoring(_scored_share(config))),)


def _head(policy: TrainedModelConfig, sizes: ModelSizes, kind: str, scored: float) -> tuple[str, float]:
    """Return (description, bytes) of the logits in a micro-batch of the `kind` "train" or "logprob"; the share `scored`
    of its tokens gets logits."""
    tokens = micro_batch_tokens(policy, kind)
    if policy.backend == "hf":
        logits = tokens * sizes.vocab_size
        copies = 2 if kind == "train" else 1  # training holds logits and their gradient
        # a chunk's logits in float32, and three arrays of that size for the backward pass (models/hf/outputs.py)
        chunk = 2**24 if policy.logprob_chunk_size is None else policy.logprob_chunk_size * sizes.vocab_size
        return "logits of a micro-batch", float(copies * logits * _width(policy)) + 16.0 * min(logits, chunk)
    generation = policy.generation
    # top-k and top-p need whole rows of logits (csrc/model/vocabulary_head.cpp: kRowLogits)
    filtered = 2.0**26 if (generation.top_k or 0) > 0 or (generation.top_p or 1.0) < 1 else 0.0
    if kind != "train":
        return "logits chunk", filtered
    return "logits chunk", 2 * filtered or Buffers(sizes, _width(policy)).logits(scored * tokens)


def _gathered(policy: PolicyConfig, parameters: int, processes: int) -> Parts:
    """Return the memory of the `parameters` weights that each process of the transformers backend gathers."""
    return (("gathered", float(parameters * _width(policy))),) if policy.backend == "hf" and processes > 1 else ()


def forecast_summary(config: WholeConfig) -> str | None:
    """Return one line with the estimated peak memory and this machine's memory; None for an evaluation."""
    if not config.trained_models():
        return None
    config = with_known_sizes(config)
    machine = machine_memory() if config.cluster.device == "cpu" else None
    has = f", this machine has {size_text(machine)}" if machine else ""
    phases = forecast(config)
    if phases is not None:
        peak = max(phases, key=lambda phase: phase.total)
        return f"{size_text(peak.total)} at the peak, in {peak.name}{has}"
    policy = config.policy
    # 30B-A3B states 30 and 3: all experts are trained
    found = re.findall(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])", policy.model_name.rpartition("/")[2])
    if not found:
        return f"not known, the sizes of {policy.model_name} are not on this machine"
    billions, each = max(map(float, found)), float(_BYTES_OF_TRAINING)
    if policy.lora is not None:
        block = _BLOCK_BYTES.get(policy.quantization)
        each = _width(policy) * (2 if policy.lora.merge else 1) if block is None else block / 32
    what = "" if policy.lora is not None else "weights, gradients and AdamW of "
    adapters = ", of which adapters are trained" if policy.lora is not None else ""
    least = size_text(billions * 1e9 * each)
    return f"about {least} for {what}{billions:g} billion parameters (by the model's name) alone{adapters}{has}"


def certain_bytes(config: TrainMasterConfig) -> float | None:
    """Return the bytes of weights, gradients and optimizer, which do not depend on lengths; None if unknown."""
    phases = forecast(config)
    if phases is None:
        return None
    kept = ("weights", "optimizer", "gradients", "adapters")
    counted = [[size for name, size in phase.parts if name.endswith(kept) and "packed" not in name] for phase in phases]
    return max(map(sum, counted))


def fit_text(config: TrainMasterConfig) -> str:
    """Return a sentence on whether the estimated peak fits into this machine's memory, with a remedy if it does not."""
    if config.cluster.device != "cpu":
        return "of the GPU's memory, which is not looked at here"
    amount = machine_memory()
    if fits(config) is not False:
        return f"fits into this machine's {size_text(amount)}" if amount else "this machine's memory is not known"
    phase = max(forecast(config) or [], key=lambda phase: phase.total)
    largest = max(phase.parts, key=lambda part: part[1])[0]
    remedy = {
        "activations": _FEWER_ACTIVATIONS,
        "policy buffers": _FEWER_ACTIVATIONS,
        "kept activations": "set policy.kept_activations_gb=0",
        "logits": "set policy.generation.max_batch_size",
        "logits of a micro-batch": "lower policy.sequence_packing.train_mb_tokens, or policy.train_micro_batch_size",
        "recurrent states": "set policy.generation.max_batch_size",
        "KV cache": "set policy.generation.kv_cache_gb, or lower policy.max_total_sequence_length",
    }.get(largest, "take a smaller model, or a machine with more memory")
    return f"does not fit into this machine's {size_text(amount or 0)}; most is {largest} in {phase.name}: {remedy}"


_FEWER_ACTIVATIONS = "set policy.dtensor_cfg.activation_checkpointing=true, or lower policy.train_micro_batch_size"


def fits(config: TrainMasterConfig) -> bool | None:
    """Return whether the estimated peak is at most this machine's memory; None: unknown, or the run uses a GPU."""
    phases, amount = forecast(config), machine_memory()
    if phases is None or amount is None or config.cluster.device != "cpu":
        return None
    return max(phase.total for phase in phases) <= amount


_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "nf4": 20}
"""Format -> bytes of a block of 32 weights (csrc/kernels/weight_blocks.h)."""
_BYTES_OF_TRAINING = 18  # per weight: bfloat16, float32 master, gradient and two moments


def forecast_text(config: TrainMasterConfig) -> str:
    """Return the memory estimate as a table of phases for the terminal."""
    config = with_known_sizes(config)
    phases = forecast(config)
    if phases is None:
        return (
            f"Peak memory: not known, because the sizes of {config.policy.model_name} are not on this machine; "
            "set policy.model_name to a model folder (with config.json) for a forecast."
        )
    lines = ["Peak memory by phase (estimate; environments in processes of their own come on top):"]
    for phase in phases:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in phase.parts)
        lines.append(f"  {phase.name:<18} {size_text(phase.total):>9}   {parts}")
    lines.append(f"  {'peak':<18} {size_text(max(phase.total for phase in phases)):>9}   {fit_text(config)}")
    policy, kept = config.policy, config.policy.kept_activations_gb
    elsewhere = policy.backend != "native" or engines_of(config) or policy.generation.runs_vllm
    if not (kept == 0 or elsewhere or policy.reuse_generation_logprobs == "never" or policy.activation_checkpointing):
        amount = "a quarter of what is free" if kept is None else f"{kept:g} GB"
        lines.append(
            f"  On the CPU generation's activations are kept beside it for training, in up to {amount} (policy.kept_activations_gb)."
        )
    return "\n".join(lines)


def size_text(size: float) -> str:
    """Return a number of bytes as text with a suitable unit: "1.8 GB", "300 kB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
