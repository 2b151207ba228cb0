"""The `policy.generation` section (`generation` in an evaluation). The sections of other engines are in engines.py."""

from typing import Literal

from pydantic import PrivateAttr

from .base import Int, Positive, Real, Section, StopStrings, StopTokenIds, Temperature, TopP, key, section
from .engines import ColocatedConfig, McoreGenerationConfig, RefitConfig, VllmConfig
from .serving import HttpServerConfig


class GenerationConfig(Section):
    """How responses are sampled, and by which engine."""

    backend: Literal["native", "hf", "vllm", "sglang", "megatron", "trtllm", "dynamo"] | None = key(
        None,
        "native: the C++ engine; hf: transformers; each reads the weights of a trainer of its name; vllm with vllm_cfg.python or vllm_cfg.server_url: vLLM itself; null: that of policy.backend, and so are the names of NeMo RL's engines, with a notice",
    )
    max_new_tokens: Positive | None = key(None, "longest response in tokens; null: policy.max_total_sequence_length")
    temperature: Temperature = key(
        1.0, "sampling temperature (also divides the training logits); 0: greedy, in evaluations only"
    )
    top_p: TopP = key(1.0, "nucleus sampling; training's log-probabilities are filtered too; 1: off")
    top_k: Int | None = key(
        None,
        "sample among the k likeliest tokens; training's log-probabilities are filtered too; null or -1: off",
        ge=-1,
    )
    val_temperature: Temperature | None = key(None, "temperature in validation; null: temperature")
    val_top_p: TopP | None = key(None, "top_p in validation; null: top_p")
    val_top_k: Int | None = key(None, "top_k in validation; null: top_k", ge=-1)
    stop_token_ids: StopTokenIds | None = key(None, "tokens that end a response; null: the end tokens of the model")
    stop_strings: StopStrings | None = key(None, "texts that end a response; the response keeps them")
    expose_http_server: bool = key(
        False,
        "true: the policy is served over HTTP during training, by the routes of OpenAI and vLLM, and agents can train through it: "
        "docs/serving.md (alias: policy.generation.vllm_cfg.expose_http_server)",
    )
    http_server: HttpServerConfig = section(HttpServerConfig, "where and within which limits it is served")
    kv_cache_gb: Real | None = key(
        None, "memory for keys and values in GB; null: what the largest batch needs, within the free memory", gt=0
    )
    max_batch_size: Positive | None = key(
        None, "responses generated at the same time; null: as many as kv_cache_gb holds"
    )
    prefill_chunk_tokens: Positive = key(2048, "prompt tokens that the model computes at once; fewer save memory")
    packed_weights: Literal["off", "on", "auto"] = key(
        "auto",
        "on: steps of few texts (up to 12; 64 without bfloat16 instructions, 4 with AMX) read a copy of bfloat16 weights in 12 bits each, the same bits "
        "(CPU with AVX-512; 1.5 bytes a parameter); auto: once 16 such steps have run since the weights changed; off: never",
    )
    vllm_cfg: VllmConfig = section(VllmConfig, "vLLM's settings; of these max_model_len and enforce_eager are read")
    colocated: ColocatedConfig = section(ColocatedConfig, "whether generation shares the trainer's device")
    refit_cfg: RefitConfig = section(RefitConfig, "weight transfer of NeMo RL, not needed here")
    mcore_generation_config: McoreGenerationConfig = section(McoreGenerationConfig, "Megatron's engine, not used here")
    vllm_kwargs: dict[str, object] = key(
        {},
        "with vllm_cfg.python: further options of vLLM's server, by their names in vllm.LLM; else not read, but what would change results is refused",
    )
    # set by the program, see models.generation.configure_generation_config
    _pad_token_id: int | None = PrivateAttr(None)
    _mtp_weights_from_refit: bool | None = PrivateAttr(None)
    _debug_payload_metrics: bool | None = PrivateAttr(None)

    @property
    def runs_vllm(self) -> bool:
        """Whether vLLM itself generates, and no engine of ours stands in for it."""
        return self.backend == "vllm" and (self.vllm_cfg.python is not None or self.vllm_cfg.server_url is not None)

    def effective_max_model_len(self, max_total_sequence_length: int) -> int:
        """Longest sequence that generation may make: the smaller of vllm_cfg.max_model_len and the trainer's limit."""
        return min(self.vllm_cfg.max_model_len or max_total_sequence_length, max_total_sequence_length)


class EvalVllmConfig(VllmConfig):
    """Settings of vLLM. With the native engine only max_model_len and precision are read."""

    precision: Literal["bfloat16", "float32"] | None = key(None, "of weights and products; null: bfloat16")


class EvalGenerationConfig(GenerationConfig):
    """Generation in an evaluation: with the model, and the number of prompts at a time."""

    model_name: str = key(..., "folder, checkpoint of a run (step_N), packaged model or name on the hub")
    vllm_cfg: EvalVllmConfig = section(
        EvalVllmConfig, "settings of vLLM; only max_model_len, enforce_eager and precision are read"
    )
    num_prompts_per_step: Int = key(-1, "prompts generated at a time; -1: all", ge=-1)
    temperature: Temperature = key(0.0, "sampling temperature; 0: greedy")
