"""Keys that the guides call by two names: both are accepted, in files and overrides; different values are an error."""

ALIASES: list[tuple[str, str]] = [
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
    ("generation.max_model_len", "generation.vllm_cfg.max_model_len"),
]
