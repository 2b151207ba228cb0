"""The sections `policy` and `value`: the models that are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from .base import (
    Count,
    Entry,
    NonNegative,
    OneOf,
    Positive,
    Quantization,
    Section,
    Table,
    Text,
    fields_of,
    fill,
    key,
    no_effect,
    section,
)
from .errors import Report
from .generation import GenerationConfig
from .lora import Adapters, check_lora
from .optimizer import DTensorConfig, MegatronConfig, OptimizerConfig, OptimizerSettings, SchedulerStage

PACKERS: Table[Entry] = Table(
    "packer",
    {
        "concatenative": Entry("nemo_rl_cpp._native:C.pack_concatenative"),
        "first_fit_decreasing": Entry("nemo_rl_cpp._native:C.pack_first_fit_decreasing"),
        "first_fit_shuffle": Entry("nemo_rl_cpp.models.policy.micro_batches:pack_shuffled"),
        "modified_first_fit_decreasing": Entry("nemo_rl_cpp._native:C.pack_modified_first_fit_decreasing"),
    },
)
"""The table of bin-packing algorithms: name -> function (costs, capacity), which returns for each bin the indices of its items."""


PackingAlgorithm = Annotated[
    str,
    OneOf(lambda: list(PACKERS)),
    BeforeValidator(lambda value: "modified_first_fit_decreasing" if value == "modified_ffd" else value),
]
Precision = Literal["float32", "bfloat16"]
Schedule = Annotated[list[SchedulerStage], BeforeValidator(lambda value: [value] if isinstance(value, dict) else value)]


class TokenizerConfig(Section):
    """Settings of the tokenizer and its chat template."""

    name: str | None = None
    """Tokenizer: a local folder, or a name on the Hugging Face Hub. null: policy.model_name."""
    chat_template: str | None = "default"
    """Chat template: default (the tokenizer's), a .jinja file, or a template. null: none, prompts are plain text."""
    chat_template_kwargs: dict[str, object] | None = key(None, "Arguments of the chat template. null: none.")


class TokenBudget(Section):
    """Settings of the token budget of a micro-batch."""

    train_mb_tokens: Positive | None = None
    """Maximum number of tokens in a training micro-batch. null: max_total_sequence_length * train_micro_batch_size."""
    logprob_mb_tokens: Positive | None = None
    """Tokens per micro-batch of the log-probability pass. null: max_total_sequence_length * logprob_batch_size."""


class DynamicBatchingConfig(TokenBudget):
    """Settings of dynamic batching: micro-batches of sequences with similar lengths, up to a token budget. It cannot be
    combined with sequence_packing."""

    enabled: bool = key(False, "Sort sequences by length and fill each micro-batch up to the token budget.")
    sequence_length_round: Positive = 64
    """Lengths are rounded up to a multiple of this number before micro-batches are formed."""


class SequencePackingConfig(TokenBudget):
    """Settings of sequence packing: micro-batches of concatenated sequences without padding, up to a token budget."""

    enabled: bool = key(True, "Pack sequences.")
    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"
    """Bin-packing algorithm that assigns sequences, or with share_prompt_prefix whole groups, to micro-batches."""
    microbatch_order: Literal["packer", "largest_first"] | None = "packer"
    """Order of the micro-batches. packer or null: by their first sequence. largest_first: most tokens first."""


class DraftConfig(Section):
    """Settings of the draft model of speculative decoding, which is not supported."""


class RouterReplayConfig(Section):
    """Settings of router replay: training a mixture-of-experts model with the expert choices of generation. The native
    backend does not need it, because its routers choose the same experts in both."""

    is_switched = True
    model_config = ConfigDict(extra="allow")


class HfConfig(Section):
    """Settings with which transformers loads a model. Used if the section's key `backend` is hf."""

    attn_implementation: str | None = None
    """transformers' attention implementation: sdpa, eager, flash_attention_2, ... null: transformers chooses."""
    trust_remote_code: bool = key(False, "Run the Python code in the model's folder (auto_map). Read the code first.")


MEMORY_BUDGET = "policy.memory_budget_gb"
Backend = Literal["native", "hf"]
"""The implementation that trains: native (the C++ core) or hf (transformers)."""


class TrainedModelConfig(Section):
    """The base class of the sections `policy` and `value`, with the keys that they share, such as batch sizes."""

    spellings = {
        "automodel_cfg": "dtensor_cfg",
        **{f"automodel_cfg.{key}": f"dtensor_cfg.{key}" for key, _ in fields_of(DTensorConfig)},
    }
    backend: Backend | None = key(None, "Implementation that trains: native or hf. null: the policy's.")
    hf_cfg: HfConfig = section(HfConfig)
    model_name: str | None = None
    """Model: a local folder, a GGUF file, a packaged model, or a name on the Hugging Face Hub. null: the policy's."""
    hf_config_overrides: dict[str, object] | None = key({}, "Values that replace entries of the model's config.json.")
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    train_global_batch_size: Positive | None = key(None, "Number of samples per optimizer step. null: the policy's.")
    train_micro_batch_size: Positive | None = None
    """Number of samples in a training micro-batch. With sequence packing or dynamic batching the token budget decides
    instead. null: the policy's."""
    logprob_batch_size: Positive | None = None
    """Number of samples in a micro-batch of the log-probability pass. null: train_micro_batch_size."""
    max_total_sequence_length: Positive | None = None
    """Maximum length of a sequence (prompt and response) in tokens. null: the policy's."""
    precision: Precision = "bfloat16"
    """bfloat16: compute in bfloat16, with float32 master weights and optimizer state. float32: all in float32."""
    quantization: Quantization | None = None
    """With LoRA: format of the frozen matrices of the layers. q8_0 and q4_0, in llama.cpp's blocks, take 8.5 and 4.5
    bits per weight, and embedding and LM head 8.5; nf4, bitsandbytes' format, takes 5. null: they are in `precision`.
    See docs/lora.md."""
    make_sequence_length_divisible_by: Positive = key(1, "The length of padded batches is a multiple of this number.")
    max_grad_norm: NonNegative | None = 1.0
    """Maximum global norm of the gradient. null or 0: no clipping. Used if dtensor_cfg.enabled is true."""
    optimizer: OptimizerConfig | None = section(OptimizerConfig)
    scheduler: Schedule | None = None
    """List of successive learning-rate schedules. null: constant. Used if dtensor_cfg.enabled is true."""
    dtensor_cfg: DTensorConfig = section(DTensorConfig)
    megatron_cfg: MegatronConfig = section(MegatronConfig)
    gradient_blocks: Positive | None = None
    """Number of blocks of a global batch, a power of two. The gradients of the blocks are summed in a fixed tree, so
    the trained weights are bit-identical for every number of processes that divides it. Each doubling needs memory for
    one more gradient in a process that has all blocks. null: one block per process; for the critic:
    policy.gradient_blocks."""
    data_parallel_sharding_strategy: Literal["optim", "optim_grads"] | None = None
    """What is sharded over the training processes. optim: optimizer state and master weights (ZeRO-1). optim_grads:
    gradients as well (ZeRO-2), which saves memory if a block of gradient_blocks is one micro-batch. The weights are
    bit-identical. null: the strategy of megatron_cfg.distributed_data_parallel_config if megatron_cfg is enabled,
    otherwise optim; for the critic: the policy's key."""
    overlap_grad_reduce: bool | None = None
    """true: reduce gradients over the processes layer by layer during the last backward pass. false: after it. The
    weights are bit-identical. null: the value of megatron_cfg.distributed_data_parallel_config if megatron_cfg is
    enabled, otherwise false; for the critic: the policy's key."""
    share_prompt_prefix: bool = key(True, "Compute the prompt of a group only once in training. backend native only.")
    dynamic_batching: DynamicBatchingConfig = section(DynamicBatchingConfig)
    sequence_packing: SequencePackingConfig = section(SequencePackingConfig)

    @model_validator(mode="after")
    def _one_backend(self) -> TrainedModelConfig:
        # DTensor is enabled by default, so a file that enables Megatron disables it
        if self.megatron_cfg.enabled and "enabled" not in self.dtensor_cfg.model_fields_set:
            object.__setattr__(self.dtensor_cfg, "enabled", False)
        return self

    @property
    def shards_gradients(self) -> bool:
        """Whether each process of the native trainer keeps only a shard of the gradients (ZeRO-2). False for backend
        hf, whose FSDP2 always shards."""
        if self.backend == "hf":
            return False
        exchange = self.megatron_cfg.distributed_data_parallel_config
        custom, theirs = exchange.use_custom_fsdp, exchange.data_parallel_sharding_strategy
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy == "optim_grads"
        return self.megatron_cfg.enabled and custom and theirs.startswith("optim_grads")

    @property
    def overlaps_grad_reduce(self) -> bool:
        """Whether the processes of the native trainer sum gradients during the backward pass. False for backend hf."""
        if self.backend == "hf":
            return False
        theirs = self.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce
        return self.megatron_cfg.enabled and theirs if self.overlap_grad_reduce is None else self.overlap_grad_reduce

    @property
    def activation_checkpointing(self) -> bool:
        """Whether the backward pass recomputes activations, as the section of the enabled backend sets."""
        used = self.megatron_cfg if self.megatron_cfg.enabled else self.dtensor_cfg
        return used.activation_checkpointing

    @property
    def lora(self) -> Adapters | None:
        """The LoRA settings; None if all weights are trained."""
        given = self.megatron_cfg.peft if self.megatron_cfg.enabled else self.dtensor_cfg.lora_cfg
        is_read = self.megatron_cfg.enabled or self.dtensor_cfg.enabled
        return given if is_read and given.enabled else None

    def lora_key(self, section: str) -> str:
        """Return the dotted key of the LoRA settings of the enabled backend; `section` is "policy" or "value"."""
        return f"{section}.{'megatron_cfg.peft' if self.megatron_cfg.enabled else 'dtensor_cfg.lora_cfg'}"

    @property
    def router_bias_update_rate(self) -> float:
        """The value of megatron_cfg.moe_router_bias_update_rate if megatron_cfg is enabled, otherwise 0."""
        return self.megatron_cfg.moe_router_bias_update_rate if self.megatron_cfg.enabled else 0.0

    @property
    def freezes_routers(self) -> bool:
        """Whether the routers of experts are frozen: megatron_cfg.freeze_moe_router, or False if megatron_cfg is
        disabled."""
        return self.megatron_cfg.enabled and self.megatron_cfg.freeze_moe_router

    def effective_optimizer(self) -> OptimizerSettings:
        """Return AdamW's settings: megatron_cfg.optimizer if megatron_cfg is enabled, otherwise `optimizer`."""
        if self.megatron_cfg.enabled:
            given = self.megatron_cfg.optimizer
            betas, eps = (given.adam_beta1, given.adam_beta2), given.adam_eps
        else:
            given = (self.optimizer or OptimizerConfig()).kwargs
            betas, eps = (given.betas[0], given.betas[1]), given.eps
        has_copies = self.backend == "native" and self.precision == "bfloat16" and self.lora is None
        moments, halves = (given.exp_avg_dtype, given.exp_avg_sq_dtype), given.store_param_remainders and has_copies
        return OptimizerSettings(given.lr, given.weight_decay, betas, eps, *moments, halves)

    def tensor_parallel(self, processes: int) -> int:
        """Return the tensor-parallel size set in the section of the enabled backend. Return 1 if it does not divide the
        number of `processes`, or if backend is hf."""
        if self.backend == "hf":  # models of transformers are not split
            return 1
        wanted = self.megatron_cfg.tensor_model_parallel_size if self.megatron_cfg.enabled else 1
        if self.dtensor_cfg.enabled and not self.megatron_cfg.enabled:
            wanted = self.dtensor_cfg.tensor_parallel_size
        return wanted if processes % wanted == 0 else 1

    def tensor_parallel_key(self, section: str) -> str:
        """Return the dotted key of the tensor-parallel size; `section` is "policy" or "value"."""
        if self.megatron_cfg.enabled:
            return f"{section}.megatron_cfg.tensor_model_parallel_size"
        return f"{section}.dtensor_cfg.tensor_parallel_size"

    def effective_max_grad_norm(self) -> float | None:
        """Return the maximum norm of the gradient, from the enabled backend's section; None: no clipping."""
        return (self.megatron_cfg.optimizer.clip_grad if self.megatron_cfg.enabled else self.max_grad_norm) or None

    def fill_batching(self) -> None:
        """Set batch sizes, token budgets, the tokenizer's name and `lora_cfg.merge` where they are not given."""
        fill(self, logprob_batch_size=self.train_micro_batch_size)
        fill(self.tokenizer, name=self.model_name)
        for adapters in (self.dtensor_cfg.lora_cfg, self.megatron_cfg.peft):
            if self.quantization is not None and "merge" not in adapters.model_fields_set:
                adapters.__dict__["merge"] = False
        longest = self.max_total_sequence_length
        train, logprob = longest * self.train_micro_batch_size, longest * self.logprob_batch_size
        for budget in (self.dynamic_batching, self.sequence_packing):
            fill(budget, train_mb_tokens=train, logprob_mb_tokens=logprob)


class PolicyConfig(TrainedModelConfig):
    """Settings of the policy: its model, training and generation."""

    model_name: Text
    """Model to train: a folder, a GGUF file, a packaged model (smollm2-135m-instruct), tiny-random, or a Hub name."""
    train_global_batch_size: Positive = 512
    """Number of samples per optimizer step. The samples of a step (prompts * responses) must be a multiple of it."""
    train_micro_batch_size: Positive = 4
    """Samples in a training micro-batch, unless sequence packing or dynamic batching sets a token budget."""
    max_total_sequence_length: Positive = key(512, "Maximum length of a sequence (prompt and response) in tokens.")
    backend: Backend = "native"
    """Implementation that trains. native: the C++ core, for the architectures in docs/supported-models.md. hf:
    transformers, for any causal language model; slower, and needs the extra `hf`."""
    reuse_generation_logprobs: Literal["auto", "always", "never"] = "auto"
    """Use the log-probabilities of generation as those of the old policy, instead of recomputing them. auto: as long as
    generation and training are bit-identical."""
    memory_budget_gb: Annotated[float, Field(gt=0)] | None = None
    """CPU only, native backend, one process: memory in GB that the run may take at its peak. As far as it is needed,
    micro-batches get smaller, generation's activations are not kept, activation_checkpointing is set, and the KV cache
    gets smaller, in this order. Keys that are set in the same file as this key, in a file that inherits from it, or on
    the command line, keep their values. null: all keys do. See docs/supported-models.md."""
    kept_activations_gb: NonNegative | None = None
    """CPU only: memory in GB for keeping the activations of generation, with which the first update needs no forward
    pass. null: a quarter of the free memory, if the activations of a step fit in it. 0: keep none."""
    kept_activations_check_period: Count = 20
    """Number of steps between checks of the kept activations. In a check, the first update makes its own forward pass,
    which is compared with generation's. 0: check only in the first step of a run."""
    logprob_chunk_size: Positive | None = None
    """backend hf: number of tokens whose float32 logits are in memory at a time. null: as many as fit in 64 MB. The
    native backend does not use it: its logits never take more than 224 MB."""
    refit_buffer_size_gb: Annotated[float, Field(gt=0)] | None = None
    """With policy.generation.colocated.enabled false: GB of weights in one message to the engines. null: 0.008."""
    refit: Literal["full", "delta"] = "full"
    """With policy.generation.colocated.enabled false: weights that are sent to the engines. full: all. delta: only
    those that have changed since the last refit, which pays with bfloat16 and small learning rates; the trainer then
    keeps a copy of the previous weights. The engines' weights are the same either way."""
    generation: GenerationConfig = section(GenerationConfig)
    draft: DraftConfig | None = section(DraftConfig)
    router_replay: RouterReplayConfig | None = section(RouterReplayConfig)

    def fill_defaults(self) -> None:
        self.fill_batching()
        limit, generation = self.max_total_sequence_length, self.generation
        fill(generation, backend=self.backend, max_new_tokens=limit)
        generation.fill_validation()
        fill(generation.vllm_cfg, max_model_len=limit, precision=self.precision)


class RewardModelConfig(Section):
    """NeMo RL's switch for a scalar head in place of the LM head. The section is ignored, because the critic always has
    a scalar head."""


class ValuePackingConfig(SequencePackingConfig):
    """Settings of sequence packing of the critic."""

    enabled: bool = key(False, "Pack sequences.")


class ValueTokenizerConfig(TokenizerConfig):
    """Settings of the critic's tokenizer. The section is ignored, because the critic reads the policy's token ids."""

    name: str | None = no_effect(None, "the critic reads what the policy's tokenizer wrote")


FROM_THE_POLICY = (
    "backend", "model_name", "precision", "train_global_batch_size", "train_micro_batch_size",
    "max_total_sequence_length", "gradient_blocks", "data_parallel_sharding_strategy", "overlap_grad_reduce",
)  # fmt: skip


class ValueConfig(TrainedModelConfig):
    """Settings of the critic: the policy's architecture with a scalar head. Keys that are null take the policy's
    values."""

    backend: Backend | None = key(None, "Implementation that trains the critic: native or hf. null: policy.backend.")
    tokenizer: ValueTokenizerConfig = section(ValueTokenizerConfig)
    precision: Precision | None = key(None, "Precision of the critic, float32 or bfloat16. null: policy.precision.")
    sequence_packing: ValuePackingConfig = section(ValuePackingConfig)
    reward_model_cfg: RewardModelConfig | None = section(RewardModelConfig)


def check_trained_model(model: TrainedModelConfig, name: str, report: Report) -> None:
    megatron = f"{name}.megatron_cfg"
    _not_both(name, "megatron_cfg", "dtensor_cfg", model, report)
    check_lora(model, name, report)
    _check_quantization(model, name, report)
    _not_both(name, "dynamic_batching", "sequence_packing", model, report)
    longest, key = model.max_total_sequence_length, "max_total_sequence_length"
    for batching in ("sequence_packing", "dynamic_batching"):
        config = getattr(model, batching)
        for budget in ("train_mb_tokens", "logprob_mb_tokens"):
            if config.enabled and (tokens := getattr(config, budget)) < longest:
                text = f"is {tokens}, too small for one sequence of {key} {longest}; raise it"
                report.add(f"{name}.{batching}.{budget}", text, f"{name}.{key}")
    _check_moments(model, name, report)
    unread = ("optimizer.",) if model.megatron_cfg.enabled else ("megatron_cfg.optimizer.", "megatron_cfg.scheduler.")
    for key in sorted((f"{name}.{key}" for key in type(model).known_keys() if key.startswith(unread)), reverse=True):
        if report.nearness(key) == 3:
            read = f"{megatron}.optimizer" if model.megatron_cfg.enabled else f"{name}.optimizer.kwargs"
            is_set = str(model.megatron_cfg.enabled).lower()
            report.add(key, f"has no effect with {megatron}.enabled={is_set}: set the key of {read}, or leave this out")
    if model.megatron_cfg.enabled:
        _check_megatron_schedule(model.megatron_cfg, megatron, report)
    else:
        _check_torch_optimizer(model, name, report)


def _check_moments(model: TrainedModelConfig, name: str, report: Report) -> None:
    optimizer = model.effective_optimizer()
    first, second = optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype
    if (first == "uint8") != (second == "uint8"):
        section = f"{name}.megatron_cfg.optimizer" if model.megatron_cfg.enabled else f"{name}.optimizer.kwargs"
        text = f"is {second}, but exp_avg_dtype {first}: in uint8 the first moment is kept relative to the second; set both to uint8, or none"
        report.add(f"{section}.exp_avg_sq_dtype", text, f"{section}.exp_avg_dtype")


def _check_quantization(model: TrainedModelConfig, name: str, report: Report) -> None:
    key, adapters = f"{name}.quantization", f"{model.lora_key(name)}.enabled"
    if model.quantization is None:
        return
    if model.backend == "hf":
        text = f"is {model.quantization}, which the native core alone reads: set {name}.backend=native, or null here"
        report.add(key, text, f"{name}.backend")
    elif model.lora is None:
        text = f"is {model.quantization}, and quantised weights are frozen: set {adapters}=true, or null here"
        report.add(key, text, adapters)
    elif model.lora.merge:
        merge = f"{model.lora_key(name)}.merge"
        text = f"is true, but {key} {model.quantization} has no room for merged weights: set it to false, or {key}=null"
        report.add(merge, text, key)


def _not_both(name: str, one: str, other: str, model: TrainedModelConfig, report: Report) -> None:
    if getattr(model, one).enabled and getattr(model, other).enabled:
        second = f"{name}.{other}.enabled"
        report.add(f"{name}.{one}.enabled", f"and {second} are both true; set one of them to false", second)


def _check_megatron_schedule(megatron: MegatronConfig, name: str, report: Report) -> None:
    optimizer, schedule, scheduler = megatron.optimizer, megatron.scheduler, f"{name}.scheduler"
    warmup, decay = schedule.lr_warmup_iters, schedule.lr_decay_iters
    rates = [(f"{name}.optimizer.min_lr", optimizer.min_lr)]
    if warmup:
        rates.append((f"{scheduler}.lr_warmup_init", schedule.lr_warmup_init))
    for place, rate in rates:
        if rate > optimizer.lr:
            report.add(place, f"{rate:g} is above lr {optimizer.lr:g}; lower it", f"{name}.optimizer.lr")
    if schedule.lr_decay_style != "constant" and decay is not None and warmup >= decay:
        text = f"{warmup} must be below lr_decay_iters {decay}, because the rate decays after the warm-up"
        report.add(f"{scheduler}.lr_warmup_iters", text, f"{scheduler}.lr_decay_iters")
    start, end = schedule.weight_decays(optimizer.weight_decay)
    if schedule.weight_decay_incr_style == "constant" and start != end:
        text = f"is {start:g}, but end_weight_decay {end:g}; set both alike, or weight_decay_incr_style to linear or cosine"
        report.add(f"{scheduler}.start_weight_decay", text, f"{scheduler}.end_weight_decay")


def _check_torch_optimizer(model: TrainedModelConfig, name: str, report: Report) -> None:
    if model.optimizer is None:
        backend = f"{name}.megatron_cfg.enabled"
        text = f"is null but {backend} is false; give an optimizer (torch.optim.AdamW) or enable that backend"
        report.add(f"{name}.optimizer", text, backend)
    stages = model.scheduler or []
    named = sum(stage.name is not None for stage in stages)
    milestones = [stage.milestones for stage in stages if stage.milestones is not None]
    given = len(milestones[0]) if milestones else 0
    fault = None
    if len(milestones) > 1:
        fault = "has milestones twice; give them once"
    elif stages and not named:
        fault = "has milestones but no schedule; add an entry with a name, or write null"
    elif named and given != named - 1:
        fault = f"has {named} schedules, which need {named - 1} milestones (where the next begins), not {given}"
    if fault is not None:
        report.add(f"{name}.scheduler", fault)
