"""Turns further keywords of `train_grpo` and `train_ppo` into keys of the configuration, and says what an unknown keyword is called here."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.foreign_names import FOREIGN
from nemo_rl_cpp.config.grpo import GRPOConfig
from nemo_rl_cpp.config.master import GRPOMasterConfig, PPOMasterConfig
from nemo_rl_cpp.config.messages import known_keys
from nemo_rl_cpp.config.ppo import PPOConfig
from nemo_rl_cpp.config.python_values import aliases_of

SECTIONS: dict[str, type[Section]] = {"grpo": GRPOConfig, "ppo": PPOConfig}
MODELS: dict[str, type[Section]] = {"grpo": GRPOMasterConfig, "ppo": PPOMasterConfig}

# arguments of trl's trainers and of transformers.TrainingArguments -> ours, several where each has a part of it
OF_TRL: dict[str, str] = {
    "train_dataset": "prompts",
    "eval_dataset": "validation",
    "max_completion_length": "max_new_tokens",
    "response_length": "max_new_tokens",
    "max_prompt_length": "max_length (prompt and response together)",
    "max_seq_length": "max_length",
    "max_steps": "num_steps",
    "total_episodes": "num_steps (times num_prompts_per_step times num_generations)",
    "num_train_epochs": "max_num_epochs",
    "per_device_train_batch_size": "num_prompts_per_step (prompts of a step, each answered num_generations times)",
    "per_device_eval_batch_size": "val_batch_size",
    "generation_batch_size": "num_prompts_per_step (prompts of a step, each answered num_generations times)",
    "num_sample_generations": "num_generations",
    "gradient_accumulation_steps": "policy__train_micro_batch_size",
    "steps_per_generation": "policy__train_global_batch_size",
    "num_mini_batches": "policy__train_global_batch_size",
    "num_iterations": "policy__train_global_batch_size (smaller than a step's samples: several updates a step)",
    "num_ppo_epochs": "ppo_epochs",
    "beta": "loss_fn__reference_policy_kl_penalty",
    "kl_coef": "loss_fn__reference_policy_kl_penalty",
    "init_kl_coef": "loss_fn__reference_policy_kl_penalty",
    "kl_estimator": "loss_fn__reference_policy_kl_type",
    "epsilon": "loss_fn__ratio_clip_min and loss_fn__ratio_clip_max",
    "cliprange": "loss_fn__ratio_clip_min and loss_fn__ratio_clip_max",
    "epsilon_high": "loss_fn__ratio_clip_max",
    "delta": "loss_fn__ratio_clip_c",
    "loss_type": "loss_fn__token_level_loss",
    "importance_sampling_level": "loss_fn__sequence_level_importance_ratios",
    "vllm_importance_sampling_correction": "loss_fn__use_importance_sampling_correction",
    "cliprange_value": "value_loss_fn__cliprange",
    "vf_coef": "value_loss_fn__scale",
    "gamma": "ppo__adv_estimator__gae_gamma",
    "lam": "ppo__adv_estimator__gae_lambda",
    "whiten_rewards": "ppo__adv_estimator__normalize_advantages",
    "scale_rewards": "normalize_rewards",
    "mask_truncated_completions": "overlong_filtering",
    "output_dir": "checkpoint_dir",
    "logging_dir": "log_dir",
    "resume_from_checkpoint": "resume",
    "save_steps": "checkpointing__save_period",
    "save_total_limit": "checkpointing__keep_top_k",
    "metric_for_best_model": "checkpointing__metric_name",
    "greater_is_better": "checkpointing__higher_is_better",
    "hub_model_id": "checkpointing__push_to_hub",
    "hub_private_repo": "checkpointing__hub_private",
    "eval_steps": "val_period",
    "eval_on_start": "val_at_start",
    "top_p": "policy__generation__top_p",
    "top_k": "policy__generation__top_k",
    "stop": "stop_strings",
    "stop_token": "stop_strings",
    "generation_kwargs": "policy__generation__top_p, policy__generation__top_k and temperature",
    "chat_template_kwargs": "policy__tokenizer__chat_template_kwargs",
    "max_grad_norm": "policy__max_grad_norm",
    "optim": "policy__optimizer__name",
    "weight_decay": "policy__optimizer__kwargs__weight_decay",
    "adam_beta1": "policy__optimizer__kwargs__betas",
    "adam_beta2": "policy__optimizer__kwargs__betas",
    "adam_epsilon": "policy__optimizer__kwargs__eps",
    "lr": "learning_rate",
    "lr_scheduler_type": "policy__scheduler",
    "lr_scheduler_kwargs": "policy__scheduler",
    "warmup_steps": "policy__scheduler",
    "warmup_ratio": "policy__scheduler",
    "bf16": 'precision="bfloat16"',
    "fp16": 'precision="bfloat16"',
    "torch_dtype": "precision",
    "dtype": "precision",
    "tokenizer": "policy__tokenizer__name",
    "processing_class": "policy__tokenizer__name",
    "value_model": "value__model_name",
    "shuffle_dataset": "data__shuffle",
    "report_to": "logger__wandb_enabled",
    "run_name": "logger__wandb__name",
    "peft_config": "lora (True, a rank, or a mapping of dim, alpha and target_modules)",
    "use_peft": "lora (True, a rank, or a mapping of dim, alpha and target_modules)",
    "lora_r": "lora (a rank)",
    "lora_rank": "lora (a rank)",
    "lora_alpha": "lora={'alpha': ...}",
    "lora_target_modules": "lora={'target_modules': [...]}",
    "gradient_checkpointing": "policy__dtensor_cfg__activation_checkpointing",
    "use_vllm": "policy__generation__backend",
    "use_cpu": "cluster__device",
    "max_tool_calling_iterations": "max_rollout_turns",
    "sft_model_path": "model",
    "model_name_or_path": "model",
}

# what TRL has and we have not, or do by ourselves -> why
NOT_HERE: dict[str, str] = {
    "args": "TRL keeps its settings in an object: give each as a keyword of its own, learning_rate=1e-5 for instance",
    "quantization_config": "quantised models are not trained: leave it out",
    "reward_model": "a reward is a function here: let reward_funcs call the reward model",
    "reward_processing_classes": "a reward is a function here: let reward_funcs call the reward model",
    "ref_model": "the reference is the model that training begins with: set loss_fn__reference_policy_kl_penalty above 0",
    "optimizers": "give learning_rate, policy__optimizer__kwargs__weight_decay and policy__scheduler",
    "push_to_hub": "set checkpointing__push_to_hub to the name of the repository, or call result.push_to_hub(name)",
    "num_workers": "rewards are computed in this process: leave it out",
    "sync_ref_model": "the reference model stays as it is: leave it out",
    "logging_steps": "every step is logged: leave it out",
    "log_completions": "samples of every step are in the log folder and in report.html: leave it out",
    "remove_unused_columns": "every column reaches the reward functions: leave it out",
    "deepspeed": "one process trains here: leave it out (docs/cluster.md has several)",
    "fsdp": "one process trains here: leave it out (docs/cluster.md has several)",
    "use_liger_loss": "the loss is fused already: leave it out",
    "torch_compile": "nothing is compiled while a run goes on: leave it out",
    "repetition_penalty": "responses are drawn from the policy's own distribution: leave it out",
    "min_p": "set policy__generation__top_p or policy__generation__top_k",
    "tools": "give a row of prompts a column 'tools'",
    "rollout_func": "several turns are an environment's: see docs/guides/environments.md",
    "environment_factory": "several turns are an environment's: see docs/guides/environments.md",
}

# ends of verl's dotted keys -> ours
OF_VERL: dict[str, str] = {
    "data.train_files": "prompts",
    "data.val_files": "validation",
    "data.train_batch_size": "num_prompts_per_step",
    "data.max_prompt_length": "max_length (prompt and response together)",
    "data.max_response_length": "max_new_tokens",
    "model.path": "model",
    "optim.lr": "learning_rate",
    "rollout.n": "num_generations",
    "rollout.temperature": "temperature",
    "rollout.top_p": "policy__generation__top_p",
    "rollout.top_k": "policy__generation__top_k",
    "actor.grad_clip": "policy__max_grad_norm",
    "actor.ppo_mini_batch_size": "policy__train_global_batch_size (counts responses)",
    "actor.ppo_epochs": "ppo_epochs",
    "actor.clip_ratio": "loss_fn__ratio_clip_min and loss_fn__ratio_clip_max",
    "actor.kl_loss_coef": "loss_fn__reference_policy_kl_penalty",
    "algorithm.adv_estimator": "the choice of the function, train_grpo or train_ppo, and its adv_estimator",
    "custom_reward_function.path": "reward_funcs",
    "custom_reward_function.name": "reward_funcs",
    "trainer.default_local_dir": "checkpoint_dir",
    "trainer.save_freq": "checkpointing__save_period",
    "trainer.test_freq": "val_period",
    "trainer.total_epochs": "max_num_epochs",
    "trainer.total_training_steps": "num_steps",
    "trainer.resume_mode": "resume",
}


@dataclass(frozen=True)
class Function:
    """A function whose keywords are looked at: its name, its own arguments, and the algorithm ("grpo" or "ppo") of its run."""

    name: str
    arguments: Collection[str]
    algorithm: str


def dotted_keys(overrides: Mapping[str, object], function: Function) -> dict[str, tuple[str, object]]:
    """key of the configuration -> (keyword, value). ValueError of one line that names every unknown keyword and what was meant."""
    found: dict[str, tuple[str, object]] = {}
    unknown: list[str] = []
    for name, value in overrides.items():
        try:
            found[dotted_key(name, function)] = (name, value)
        except ValueError as error:
            unknown.append(str(error))
    if unknown:
        raise ValueError("; ".join(unknown))
    return found


def dotted_key(name: str, function: Function) -> str:
    """`section__key` as `section.key`, a key of the algorithm's section as `grpo.key`. ValueError for another name, with what
    was meant."""
    if "." in name:
        raise ValueError(_of_dots(name, function))
    if "__" in name:
        return name.replace("__", ".")
    section = SECTIONS[function.algorithm]
    keys = {*section.model_fields, *(spelling for spelling, _ in aliases_of(section) if "." not in spelling)}
    if name in keys:
        return f"{function.algorithm}.{name}"
    other = next((other for other in SECTIONS if name in SECTIONS[other].model_fields and name not in keys), None)
    if other is not None:
        raise ValueError(f"{name} is unknown to {function.name}; it is a key of train_{other}")
    if name in NOT_HERE:
        raise ValueError(f"{name} is unknown: {NOT_HERE[name]}")
    if (meant := _of_another_trainer(name, function, keys)) is not None:
        raise ValueError(f"{name} is unknown; here it is {meant}")
    near = difflib.get_close_matches(name, function.arguments, 1, 0.7) or difflib.get_close_matches(
        name, [*function.arguments, *keys, *OF_TRL], 1, 0.6
    )
    if near:
        meant = _of_another_trainer(near[0], function, keys) if near[0] in OF_TRL else near[0]
        if meant is not None:
            raise ValueError(f"{name} is unknown; did you mean {meant}?")
    raise ValueError(
        f"{name} is unknown; {function.name} takes {', '.join(function.arguments)}, keys of the section {function.algorithm}, and keys of "
        "others as section__key"
    )


def _of_dots(name: str, function: Function) -> str:
    """What to say of a name with dots: a key of ours that is written as in a file, or one of verl's."""
    if name in known_keys(MODELS[function.algorithm]):
        first, _, rest = name.partition(".")
        keyword = rest if first == function.algorithm and "." not in rest else name.replace(".", "__")
        return f"{name} is unknown as a keyword; write {keyword}"
    meant = next((own for theirs, own in OF_VERL.items() if f".{name}".endswith(f".{theirs}")), None)
    if meant is None:
        return f"{name} is unknown; keywords are arguments of {function.name}, or section__key for a key of the configuration"
    return f"{name} is unknown; here it is {meant}"


def _of_another_trainer(name: str, function: Function, keys: Collection[str]) -> str | None:
    """What another trainer's keyword is called here; None for a name of nobody, and for what this function does not have."""
    meant = OF_TRL.get(name)
    if meant is None:
        key = FOREIGN.get(name)
        return None if key is None else key.removeprefix("grpo.").removeprefix("ppo.").replace(".", "__")
    if (
        meant.startswith(("value", "ppo__"))
        and function.algorithm != "ppo"
        or meant == "ppo_epochs"
        and meant not in keys
    ):
        return f"{meant} of train_ppo"
    if meant == "normalize_rewards" and meant not in keys:
        return "ppo__adv_estimator__normalize_advantages"
    return meant
