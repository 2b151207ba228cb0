"""Keys that NeMo RL calls by two names: both are accepted, in files and overrides; different values are an error."""

from .backends import DTensorConfig

SPELLINGS: list[tuple[str, str]] = [
    (f"{section}.{spelling}", f"{section}.{canonical}")
    for section in ("grpo", "ppo")
    for spelling, canonical in (
        ("dapo_batch_multiplier", "batch_multiplier"),
        ("max_num_gen_batches", "dynamic_sampling_max_gen_batches"),
        ("reward_scaling.correct", "reward_scaling.target_max"),
        ("reward_scaling.incorrect", "reward_scaling.target_min"),
    )
] + [
    ("policy.generation.max_model_len", "policy.generation.vllm_cfg.max_model_len"),
    ("policy.generation.vllm_cfg.expose_http_server", "policy.generation.expose_http_server"),
    ("generation.vllm_cfg.expose_http_server", "generation.expose_http_server"),
    ("generation.max_model_len", "generation.vllm_cfg.max_model_len"),
    ("policy.automodel_cfg", "policy.dtensor_cfg"),
    ("value.automodel_cfg", "value.dtensor_cfg"),
]
"""(another name, the key), of keys and of whole sections."""

ALIASES: list[tuple[str, str]] = SPELLINGS + [
    (f"{model}.automodel_cfg.{info.alias or name}", f"{model}.dtensor_cfg.{info.alias or name}")
    for model in ("policy", "value")
    for name, info in DTensorConfig.model_fields.items()
]
"""The same with each key of a section, as overrides and interpolations name them."""
