"""Keys of other trainers (TRL, OpenRLHF, verl) and what they are called here."""

from __future__ import annotations

FOREIGN = {
    "actor_learning_rate": "policy.optimizer.kwargs.lr",
    "adam_beta1": "policy.optimizer.kwargs.betas",
    "adam_beta2": "policy.optimizer.kwargs.betas",
    "adam_epsilon": "policy.optimizer.kwargs.eps",
    "beta": "loss_fn.reference_policy_kl_penalty",
    "bf16": "policy.precision",
    "clip_ratio_c": "loss_fn.ratio_clip_c",
    "clip_ratio_high": "loss_fn.ratio_clip_max",
    "clip_ratio_low": "loss_fn.ratio_clip_min",
    "dataset": "data.train.dataset_name",
    "delta": "loss_fn.ratio_clip_c",
    "epsilon": "loss_fn.ratio_clip_min",
    "epsilon_high": "loss_fn.ratio_clip_max",
    "eval_on_start": "grpo.val_at_start",
    "eval_steps": "grpo.val_period",
    "filter_groups": "grpo.use_dynamic_sampling",
    "fp16": "policy.precision",
    "generate_max_len": "policy.generation.max_new_tokens",
    "generation_kwargs": "policy.generation",
    "gradient_accumulation_steps": "policy.train_global_batch_size",
    "gradient_checkpointing": "policy.dtensor_cfg.activation_checkpointing",
    "importance_sampling_level": "loss_fn.sequence_level_importance_ratios",
    "init_kl_coef": "loss_fn.reference_policy_kl_penalty",
    "kl_coef": "loss_fn.reference_policy_kl_penalty",
    "kl_loss_coef": "loss_fn.reference_policy_kl_penalty",
    "learning_rate": "policy.optimizer.kwargs.lr",
    "logging_dir": "logger.log_dir",
    "lora_alpha": "policy.dtensor_cfg.lora_cfg.alpha",
    "lora_r": "policy.dtensor_cfg.lora_cfg.dim",
    "lora_rank": "policy.dtensor_cfg.lora_cfg.dim",
    "lora_target_modules": "policy.dtensor_cfg.lora_cfg.target_modules",
    "lr_scheduler_type": "policy.scheduler",
    "mask_truncated_completions": "grpo.overlong_filtering",
    "max_completion_length": "policy.generation.max_new_tokens",
    "max_length": "policy.max_total_sequence_length",
    "max_model_len": "policy.max_total_sequence_length",
    "max_prompt_length": "data.max_input_seq_length",
    "max_response_length": "policy.generation.max_new_tokens",
    "max_seq_length": "policy.max_total_sequence_length",
    "max_steps": "grpo.max_num_steps",
    "min_lr_ratio": "policy.scheduler",
    "model": "policy.model_name",
    "model_name_or_path": "policy.model_name",
    "n_samples_per_prompt": "grpo.num_generations_per_prompt",
    "num_generations": "grpo.num_generations_per_prompt",
    "num_train_epochs": "grpo.max_num_epochs",
    "optim": "policy.optimizer.name",
    "output_dir": "checkpointing.checkpoint_dir",
    "per_device_train_batch_size": "policy.train_micro_batch_size",
    "pretrain": "policy.model_name",
    "prompt_data": "data.train.data_path",
    "prompt_max_len": "data.max_input_seq_length",
    "ppo_mini_batch_size": "policy.train_global_batch_size",
    "report_to": "logger.wandb_enabled",
    "reward_funcs": "env.reward_functions.functions",
    "reward_weights": "env.reward_functions.weights",
    "rollout_batch_size": "grpo.num_prompts_per_step",
    "run_name": "logger.wandb.name",
    "save_steps": "checkpointing.save_period",
    "save_total_limit": "checkpointing.keep_top_k",
    "scale_rewards": "grpo.normalize_rewards",
    "total_epochs": "grpo.max_num_epochs",
    "total_training_steps": "grpo.max_num_steps",
    "train_batch_size": "policy.train_global_batch_size",
    "train_files": "data.train.data_path",
    "use_vllm": "policy.generation.backend",
    "val_files": "data.validation.data_path",
    "warmup_ratio": "policy.scheduler",
    "warmup_steps": "policy.scheduler",
}
"""Last part of a key -> the key of this package. Only names that no key of ours has."""

BESIDES = {
    "lora_alpha": "enabled=true",
    "lora_r": "enabled=true",
    "lora_rank": "enabled=true",
    "lora_target_modules": "enabled=true and {section}.match_all_linear=false",
}
"""Name -> what of the key's section has to be set besides; without it the key would do nothing."""


def own_name(name: str, known: frozenset[str]) -> str | None:
    """The key of this package for another trainer's name, of those that a kind of configuration knows (a PPO run's section is
    `ppo`), and what it needs besides; None for a name of nobody."""
    key = FOREIGN.get(name)
    if key is None:
        return None
    of_kind = [
        key,
        key.replace("grpo.", "ppo.", 1),
        key.removeprefix("policy."),
        key.replace("data.train.", "data.", 1),
    ]
    own = next(
        (candidate for candidate in of_kind if candidate in known or candidate.startswith("env.reward_functions")), None
    )
    if own is None or name not in BESIDES:
        return own
    section = own.rpartition(".")[0]
    return f"{own} (with {section}.{BESIDES[name].format(section=section)})"
