"""Turns further keywords of `train_grpo` into keys of the configuration, and suggests a key for an unknown keyword."""

import difflib
import inspect

from nemo_rl_cpp.config.grpo import GRPOConfig
from nemo_rl_cpp.config.python_values import aliases_of

# arguments of trl.GRPOTrainer and GRPOConfig -> ours; a value that is no name is a sentence
_OF_TRL = {
    "train_dataset": "prompts",
    "eval_dataset": "validation",
    "max_completion_length": "max_new_tokens",
    "max_prompt_length": "max_length (prompt and response together)",
    "max_steps": "num_steps",
    "num_train_epochs": "max_num_epochs",
    "per_device_train_batch_size": "num_prompts_per_step",
    "generation_batch_size": "num_prompts_per_step",
    "gradient_accumulation_steps": "policy__train_micro_batch_size",
    "beta": "loss_fn__reference_policy_kl_penalty",
    "epsilon": "loss_fn__ratio_clip_min and loss_fn__ratio_clip_max",
    "epsilon_high": "loss_fn__ratio_clip_max",
    "delta": "loss_fn__ratio_clip_c",
    "scale_rewards": "normalize_rewards",
    "mask_truncated_completions": "overlong_filtering",
    "importance_sampling_level": "loss_fn__sequence_level_importance_ratios",
    "output_dir": "checkpoint_dir",
    "logging_dir": "log_dir",
    "save_steps": "checkpointing__save_period",
    "eval_steps": "val_period",
    "top_p": "policy__generation__top_p",
    "top_k": "policy__generation__top_k",
    "stop": "stop_strings",
    "max_grad_norm": "policy__max_grad_norm",
    "weight_decay": "policy__optimizer__kwargs__weight_decay",
    "adam_beta1": "policy__optimizer__kwargs__betas",
    "adam_beta2": "policy__optimizer__kwargs__betas",
    "adam_epsilon": "policy__optimizer__kwargs__eps",
    "lr": "learning_rate",
    "lr_scheduler_type": "policy__scheduler",
    "warmup_steps": "policy__scheduler",
    "warmup_ratio": "policy__scheduler",
    "bf16": 'precision="bfloat16"',
    "torch_dtype": "precision",
    "dtype": "precision",
    "tokenizer": "policy__tokenizer__name",
    "processing_class": "policy__tokenizer__name",
    "report_to": "logger__wandb_enabled",
    "gradient_checkpointing": "policy__dtensor_cfg__activation_checkpointing",
    "reward_processing_classes": None,
    "peft_config": None,
    "callbacks": None,
    "optimizers": None,
    "push_to_hub": None,
    "args": None,
    "num_iterations": None,
    "use_vllm": None,
    "deepspeed": None,
}


def dotted_key(name: str) -> str:
    """`section__key` as `section.key`, a key of `grpo` as `grpo.key`. ValueError for another name, with what was meant."""
    if "__" in name:
        return name.replace("__", ".")
    keys = {*GRPOConfig.model_fields, *(spelling for spelling, _ in aliases_of(GRPOConfig) if "." not in spelling)}
    if name in keys:
        return f"grpo.{name}"
    if name in _OF_TRL:
        meant = _OF_TRL[name]
        raise ValueError(
            f"{name} is unknown; "
            + ("what it asks for is not supported: leave it out" if meant is None else f"here it is {meant}")
        )
    from nemo_rl_cpp.quick import train_grpo

    arguments = [argument for argument in inspect.signature(train_grpo).parameters if argument != "overrides"]
    near = difflib.get_close_matches(name, arguments, 1, 0.7) or difflib.get_close_matches(
        name, [*arguments, *keys, *_OF_TRL], 1, 0.6
    )
    if near:
        meant = near[0] if near[0] not in _OF_TRL else _OF_TRL[near[0]]
        if meant is not None:
            raise ValueError(f"{name} is unknown; did you mean {meant}?")
    raise ValueError(
        f"{name} is unknown; train_grpo takes {', '.join(arguments)}, keys of the section grpo, and keys of others as section__key"
    )
