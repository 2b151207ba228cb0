"""An engine on a model of this process: what an engine beside a trainer and one with weights of its own share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner

if TYPE_CHECKING:
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.config.generation import EvalGenerationConfig
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.models.model_folder import ModelFolder


def engine_options(policy: PolicyConfig, config: EvalGenerationConfig, options: dict[str, object]) -> dict[str, object]:
    """`options` with the longest sequence of an engine on a policy's weights: the policy's, or a shorter one of `config`."""
    longest = policy.generation.effective_max_model_len(policy.max_total_sequence_length)
    engine = getattr(config, "vllm_cfg", None)  # an evaluation's may be shorter
    return {"max_model_len": min(getattr(engine, "max_model_len", None) or longest, longest), **options}


def generation_on(
    model: C.DecoderModel, folder: ModelFolder, policy: PolicyConfig, tokenizer: TokenizerType | None, digest: Callable[[], str],
    config: EvalGenerationConfig | None = None, **options: object,
) -> NativeGeneration:  # fmt: skip
    """An engine that reads the weights of `model` in place.

    Args:
        folder: of the model; its files say where responses end.
        config: the engine's section; None: `policy.generation`.
        options: for `NativeGeneration`.
    """
    config = config or policy.generation
    options = engine_options(policy, config, options)
    options.setdefault("end_token_ids", end_token_ids(folder.path, folder.config, tokenizer))
    return NativeGeneration(native_runner(model, config), config, tokenizer, digest=digest, **options)
