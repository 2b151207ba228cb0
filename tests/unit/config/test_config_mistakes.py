import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from nemo_rl_cpp.config import ConfigError, load_eval_config, load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.loader import load_distillation_config, load_sft_config

GRPO = """\
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
loss_fn:
  reference_policy_kl_penalty: 0.01
policy:
  model_name: tiny-random
data:
  train: {dataset_name: arithmetic}
  default: {env_name: arithmetic}
env:
  arithmetic: {}
"""

# (section lines put in place of the same section above, wrong key, line, words that the message must hold)
BAD_FILES = {
    "unknown key": ("grpo:\n  num_promts_per_step: 8", "grpo.num_promts_per_step", 2, ["unknown", "did you mean num_prompts_per_step"]),
    "unknown section": ("los_fn:\n  ratio_clip_min: 0.1", "los_fn", 1, ["unknown", "did you mean loss_fn"]),
    "key in the wrong section": ("grpo:\n  precision: float32", "grpo.precision", 2, ["unknown here", "policy.precision"]),
    "text for an integer": ("grpo:\n  num_prompts_per_step: many", "grpo.num_prompts_per_step", 2, ["must be an integer", "'many'"]),
    "fraction for an integer": ("grpo:\n  seed: 1.5", "grpo.seed", 2, ["must be an integer", "1.5"]),
    "boolean for an integer": ("grpo:\n  seed: yes", "grpo.seed", 2, ["must be a number", "true"]),
    "number for a boolean": ("grpo:\n  overlong_filtering: 2", "grpo.overlong_filtering", 2, ["must be true or false", "2"]),
    "number for a text": ("policy:\n  model_name: 5", "policy.model_name", 2, ["must be a text", "in quotes"]),
    "scalar for a section": ("grpo:\n  reward_shaping: 5", "grpo.reward_shaping", 2, ["must be a section"]),
    "not positive": ("grpo:\n  num_prompts_per_step: 0", "grpo.num_prompts_per_step", 2, ["must be at least 1"]),
    "stop without validations": ("grpo:\n  val_period: 0\n  stop_at_validation_metric: accuracy\n  stop_at_validation_threshold: 0.5",
     "grpo.stop_at_validation_metric", 3, ["needs validations at intervals", "grpo.val_period"]),
    "empty model": ("policy:\n  model_name: ''", "policy.model_name", 2, ["must be a text that is not empty"]),
    "one loader": ("data:\n  num_prompts_per_dataloader: 4\n  train: {dataset_name: arithmetic}",
     "data.num_prompts_per_dataloader", 2, ["has no effect with data.use_multiple_dataloader=false"]),
    "infinite": ("policy:\n  model_name: m\n  max_grad_norm: .inf", "policy.max_grad_norm", 3, ["finite number"]),
    "no model": ("policy:\n  precision: float32", "policy.model_name", 1, ["is missing"]),
    "mandatory": ("policy:\n  model_name: ???", "policy.model_name", 2, ["must be given"]),
    "float16": ("policy:\n  model_name: m\n  precision: float16", "policy.precision", 3, ["one of float32, bfloat16, not 'float16'"]),
    "unknown precision": ("policy:\n  model_name: m\n  precision: bfloat", "policy.precision", 3, ["must be one of", "did you mean bfloat16"]),
    "dual clip too small": ("loss_fn:\n  ratio_clip_c: 1", "loss_fn.ratio_clip_c", 2, ["greater than 1", "usually 3"]),
    "error in the loss": ("loss_fn:\n  seq_logprob_error_in_loss: true", "loss_fn.seq_logprob_error_in_loss", 2, ["force_on_policy_ratio: true"]),
    "activation checkpointing": (
        "policy:\n  model_name: m\n  activation_checkpointing_enabled: true", "policy.activation_checkpointing_enabled", 3,
        ["activation_checkpointing of dtensor_cfg"]),
    "truncation without correction": (
        "loss_fn:\n  truncated_importance_sampling_type: tis\n  truncated_importance_sampling_ratio: 2",
        "loss_fn.use_importance_sampling_correction", 2, ["must be true"]),
    "truncation without a bound": (
        "loss_fn:\n  use_importance_sampling_correction: true\n  truncated_importance_sampling_type: tis",
        "loss_fn.truncated_importance_sampling_ratio", 3, ["is missing", "upper bound"]),
    "icepop without a lower bound": (
        "loss_fn:\n  use_importance_sampling_correction: true\n  truncated_importance_sampling_type: icepop\n  truncated_importance_sampling_ratio: 2",
        "loss_fn.truncated_importance_sampling_ratio_min", 3, ["is missing", "lower bound"]),
    "bounds the wrong way round": (
        "loss_fn:\n  use_importance_sampling_correction: true\n  truncated_importance_sampling_type: tis\n"
        "  truncated_importance_sampling_ratio: 2\n  truncated_importance_sampling_ratio_min: 3",
        "loss_fn.truncated_importance_sampling_ratio_min", 5, ["3 is above", "2"]),
    "bound without a type": ("loss_fn:\n  truncated_importance_sampling_ratio: 2", "loss_fn.truncated_importance_sampling_ratio", 2, ["set truncated_importance_sampling_type"]),
    "bound of 0": (
        "loss_fn:\n  use_importance_sampling_correction: true\n  truncated_importance_sampling_type: tis\n  truncated_importance_sampling_ratio: 0",
        "loss_fn.truncated_importance_sampling_ratio", 4, ["greater than 0"]),
    "sequence ratios with token loss": ("loss_fn:\n  sequence_level_importance_ratios: true", "loss_fn.sequence_level_importance_ratios", 2, ["token_level_loss: false"]),
    "cispo and dual clip": ("loss_fn:\n  use_cispo: true\n  ratio_clip_c: 3", "loss_fn.ratio_clip_c", 3, ["must be null", "use_cispo"]),
    "cispo and plain policy gradient": ("loss_fn:\n  use_cispo: true\n  disable_ppo_ratio: true", "loss_fn.disable_ppo_ratio", 3, ["use_cispo"]),
    "cispo on policy": ("loss_fn:\n  use_cispo: true\n  force_on_policy_ratio: true", "loss_fn.force_on_policy_ratio", 3, ["use_cispo"]),
    "mask of sequences without a lower bound": (
        "loss_fn:\n  use_importance_sampling_correction: true\n  truncated_importance_sampling_type: seq-mask-tis\n  truncated_importance_sampling_ratio: 2",
        "loss_fn.truncated_importance_sampling_ratio_min", 3, ["is missing", "lower bound"]),
    "mask of sequences with their ratios": (
        "loss_fn:\n  use_importance_sampling_correction: true\n  truncated_importance_sampling_type: seq-mask-tis\n  truncated_importance_sampling_ratio: 2\n"
        "  truncated_importance_sampling_ratio_min: 0.9\n  token_level_loss: false\n  sequence_level_importance_ratios: true",
        "loss_fn.truncated_importance_sampling_type", 3, ["needs token-level ratios"]),
    "cispo and sequence loss": ("loss_fn:\n  use_cispo: true\n  token_level_loss: false", "loss_fn.token_level_loss", 3, ["must be true"]),
    "KL without a reference": ("grpo:\n  skip_reference_policy_logprobs_calculation: true", "grpo.skip_reference_policy_logprobs_calculation", 2, ["set the penalty to 0"]),
    "KL in reward with the wrong estimator": ("loss_fn:\n  use_kl_in_reward: true", "loss_fn.use_kl_in_reward", 2, ["reinforce_plus_plus"]),
    "on-policy ratio with small batches": ("policy:\n  model_name: m\n  train_global_batch_size: 256\nloss_fn:\n  force_on_policy_ratio: true", "loss_fn.force_on_policy_ratio", 5, ["train_global_batch_size to 512"]),
    "batch does not divide": ("policy:\n  model_name: m\n  train_global_batch_size: 500", "policy.train_global_batch_size", 3, ["500", "512 samples", "256 or 512"]),
    "packing and dynamic batching": ("policy:\n  model_name: m\n  dynamic_batching: {enabled: true}", "policy.dynamic_batching.enabled", 3, ["both true", "set one of them to false"]),
    "budget below a sequence": ("policy:\n  model_name: m\n  sequence_packing: {train_mb_tokens: 100}", "policy.sequence_packing.train_mb_tokens", 3, ["too small", "512", "raise it"]),
    "both backends": ("policy:\n  model_name: m\n  dtensor_cfg: {enabled: true}\n  megatron_cfg: {enabled: true}", "policy.megatron_cfg.enabled", 4, ["both true", "set one of them to false"]),
    "tensor parallel": (
        "policy:\n  model_name: m\n  dtensor_cfg: {tensor_parallel_size: 2}\ncluster: {strict_sizes: true}",
        "policy.dtensor_cfg.tensor_parallel_size", 3, ["is 2", "set it to 1", "cluster.strict_sizes"]),
    "offloading": ("policy:\n  model_name: m\n  dtensor_cfg: {cpu_offload: true}\ncluster: {device: cuda}", "policy.dtensor_cfg.cpu_offload", 3, ["set it to false"]),
    "lora with dropout": ("policy:\n  model_name: m\n  dtensor_cfg:\n    lora_cfg: {enabled: true, dropout: 0.1}", "policy.dtensor_cfg.lora_cfg.dropout", 4, ["must compute the same bits", "set it to 0"]),
    "lora's matrices twice": ("policy:\n  model_name: m\n  dtensor_cfg:\n    lora_cfg:\n      enabled: true\n      target_modules: [q_proj]", "policy.dtensor_cfg.lora_cfg.target_modules", 6, ["match_all_linear is true", "match_all_linear=false"]),
    "lora's misspelt matrix": ("policy:\n  model_name: m\n  dtensor_cfg:\n    lora_cfg:\n      enabled: true\n      match_all_linear: false\n      target_modules: [q_porj]", "policy.dtensor_cfg.lora_cfg.target_modules", 7, ["q_porj", "did you mean q_proj?"]),
    "lora's head": ("policy:\n  model_name: m\n  dtensor_cfg:\n    lora_cfg:\n      enabled: true\n      match_all_linear: false\n      target_modules: [q_proj, lm_head]", "policy.dtensor_cfg.lora_cfg.target_modules", 7, ["lm_head", "stay frozen"]),
    "lora without a matrix": ("policy:\n  model_name: m\n  dtensor_cfg:\n    lora_cfg:\n      enabled: true\n      match_all_linear: false\n      exclude_modules: ['*']", "policy.dtensor_cfg.lora_cfg.exclude_modules", 7, ["leaves no matrix"]),
    "lora's targets and exclusions": ("policy:\n  model_name: m\n  dtensor_cfg:\n    lora_cfg:\n      enabled: true\n      match_all_linear: false\n      exclude_modules: [q_proj]\n      target_modules: [k_proj]", "policy.dtensor_cfg.lora_cfg.exclude_modules", 7, ["both given"]),
    "lora on transformers": ("policy:\n  model_name: m\n  backend: hf\n  dtensor_cfg:\n    lora_cfg: {enabled: true}", "policy.dtensor_cfg.lora_cfg.enabled", 5, ["native core alone", "policy.backend=native"]),
    "lora's rank alone": ("policy:\n  model_name: m\n  dtensor_cfg:\n    lora_cfg: {dim: 16}", "policy.dtensor_cfg.lora_cfg.dim", 4, ["is 16", "all weights are trained", "policy.dtensor_cfg.lora_cfg.enabled=true, or leave"]),
    "lora's matrices alone": ("policy:\n  model_name: m\n  dtensor_cfg:\n    lora_cfg: {target_modules: [q_proj]}", "policy.dtensor_cfg.lora_cfg.target_modules", 4, ["all weights are trained", "enabled=true and policy.dtensor_cfg.lora_cfg.match_all_linear=false"]),
    "a quantised model trained whole": ("policy:\n  model_name: m\n  quantization: q4_0", "policy.quantization", 3, ["quantised weights are frozen", "policy.dtensor_cfg.lora_cfg.enabled=true"]),
    "a quantised model of transformers": ("policy:\n  model_name: m\n  backend: hf\n  quantization: q8_0", "policy.quantization", 4, ["native core alone", "policy.backend=native"]),
    "megatron's lora": ("policy:\n  model_name: m\n  megatron_cfg:\n    enabled: true\n    peft: {enabled: true, target_modules: [q_proj]}", "policy.megatron_cfg.peft.target_modules", 5, ["there are linear_qkv, linear_proj, linear_fc1"]),
    "Megatron's warm-up from above": (
        "policy:\n  model_name: m\n  megatron_cfg: {enabled: true, optimizer: {lr: 1e-6}, scheduler: {lr_warmup_init: 1e-5}}",
        "policy.megatron_cfg.scheduler.lr_warmup_init", 3, ["1e-05 is above lr 1e-06"]),
    "Megatron's decay before the end of the warm-up": (
        "policy:\n  model_name: m\n  megatron_cfg: {enabled: true, scheduler: {lr_decay_style: cosine, lr_decay_iters: 10}}",
        "policy.megatron_cfg.scheduler.lr_warmup_iters", 3, ["13 must be below lr_decay_iters 10"]),
    "two weight decays without a ramp": (
        "policy:\n  model_name: m\n  megatron_cfg: {enabled: true, scheduler: {start_weight_decay: 0.0, end_weight_decay: 0.1}}",
        "policy.megatron_cfg.scheduler.start_weight_decay", 3, ["is 0, but end_weight_decay 0.1", "linear or cosine"]),
    "fp8": ("policy:\n  model_name: m\n  megatron_cfg:\n    enabled: true\n    fp8_cfg: {enabled: true}", "policy.megatron_cfg.fp8_cfg.enabled", 5, ["FP8 is not supported"]),
    "hf backend": (
        "policy:\n  model_name: m\n  backend: hf\n  generation: {backend: native}", "policy.generation.backend", 4,
        ["is native", "cannot read the weights of policy.backend hf", "set it to null"]),
    "hf reuse": (
        "policy:\n  model_name: m\n  backend: hf\n  reuse_generation_logprobs: always", "policy.reuse_generation_logprobs", 4,
        ["cannot be always", "set it to auto"]),
    "hf blocks": (
        "policy:\n  model_name: m\n  backend: hf\n  gradient_blocks: 2", "policy.gradient_blocks", 4, ["is 2", "set it to null"]),
    "hf engines": (
        "policy:\n  model_name: m\n  backend: hf\n  generation: {colocated: {enabled: false, resources: {gpus_per_node: 1}}}\n"
        "cluster: {executor: processes, gpus_per_node: 2}", "policy.generation.colocated.enabled", 4, ["read the trainer's", "set it to true"]),
    "quantised generation": (
        "policy:\n  model_name: m\n  generation: {quant_cfg: NVFP4_DEFAULT_CFG}", "policy.generation.quant_cfg", 3, ["NVFP4"]),
    "fp8 generation": (
        "policy:\n  model_name: m\n  generation: {vllm_cfg: {precision: fp8}}", "policy.generation.vllm_cfg.precision", 3,
        ["is fp8", "changes results"]),
    "quantised vllm": (
        "policy:\n  model_name: m\n  generation: {vllm_kwargs: {quantization: awq}}", "policy.generation.vllm_kwargs.quantization", 3,
        ["is awq", "changes results"]),
    "quantised TensorRT-LLM": (
        "policy:\n  model_name: m\n  generation: {trtllm_cfg: {kv_cache_config: {dtype: nvfp4}}}",
        "policy.generation.trtllm_cfg.kv_cache_config.dtype", 3, ["is nvfp4"]),
    "another model for generation": (
        "policy:\n  model_name: m\n  generation: {vllm_kwargs: {hf_overrides: {rope_theta: 5}}}",
        "policy.generation.vllm_kwargs.hf_overrides.rope_theta", 3, ["policy.hf_config_overrides"]),
    "dead key": (
        "grpo:\n  zero_variance_prompt_filtering: true", "grpo.zero_variance_prompt_filtering", 2, ["read by nothing", "grpo.use_dynamic_sampling"]),
    "advantage of tool calls without an agent": (
        "grpo:\n  invalid_tool_call_advantage: -5", "grpo.invalid_tool_call_advantage", 2, ["only responses to an agent", "set it to null"]),
    "heads that would change the policy": (
        "policy:\n  model_name: m\n  megatron_cfg: {enabled: true, mtp_num_layers: 2}", "policy.megatron_cfg.mtp_num_layers", 3,
        ["would change the policy", "mtp_detach_heads to true"]),
    "Megatron's LoRA without Megatron": (
        "policy:\n  model_name: m\n  megatron_cfg: {peft: {enabled: true}}", "policy.megatron_cfg.peft.enabled", 3,
        ["needs policy.megatron_cfg.enabled=true and policy.dtensor_cfg.enabled=false"]),
    "router replay": (
        "policy:\n  model_name: m\n  backend: hf\n  router_replay: {enabled: true}", "policy.router_replay.enabled", 4, ["native"]),
    "weights without gdpo": (
        "grpo:\n  adv_estimator: {reward_weights: [1, 2]}", "grpo.adv_estimator.reward_weights", 2, ["gdpo only"]),
    "gdpo and shaping": (
        "grpo:\n  adv_estimator: {name: gdpo}\n  reward_shaping: {enabled: true, stop_properly_penalty_coef: 0.5}",
        "grpo.reward_shaping.enabled", 3, ["parts of the reward"]),
    "length penalty": (
        "grpo:\n  length_penalty: {default: {total_bonuss: 0.1}}", "grpo.length_penalty.default.total_bonuss", 2, ["did you mean total_bonus"]),
    "penalised tokens": ("reward_penalties: {penalize_unwanted_tokens: true}", "reward_penalties", 1, ["needs token_ids.unwanted"]),
    "band": (
        "grpo:\n  length_penalty: {profile_band: {enabled: true, defaults: {total: {a: 5, b: 5, f: 0.5}}}}",
        "grpo.length_penalty.profile_band.defaults.total", 2, ["needs b above a"]),
    "greedy training": ("policy:\n  model_name: m\n  generation: {temperature: 0}", "policy.generation.temperature", 3, ["greedy", "above 0"]),
    "no optimizer": ("policy:\n  model_name: m\n  optimizer: null", "policy.optimizer", 3, ["is null", "give an optimizer"]),
    "scheduler name": ("policy:\n  model_name: m\n  scheduler: [{name: StepLR}]", "policy.scheduler.0", 3, ["LinearLR", "'StepLR'"]),
    "cosine without steps": ("policy:\n  model_name: m\n  scheduler: [{name: CosineAnnealingLR, kwargs: {T_max: 0}}]", "policy.scheduler.0", 3, ["T_max must be greater than 0"]),
    "factor of a schedule": ("policy:\n  model_name: m\n  scheduler: [{name: LinearLR, kwargs: {start_factor: 2}}]", "policy.scheduler.0", 3, ["kwargs.start_factor must be greater than 0 and at most 1, not 2"]),
    "steps of a schedule": ("policy:\n  model_name: m\n  scheduler: [{name: ConstantLR, kwargs: {total_iters: -5}}]", "policy.scheduler.0", 3, ["kwargs.total_iters must be at least 0, not -5"]),
    "milestones": ("policy:\n  model_name: m\n  scheduler: [{name: LinearLR}, {name: ConstantLR}]", "policy.scheduler", 3, ["need 1 milestones"]),
    "multiplier without dynamic sampling": ("grpo:\n  batch_multiplier: 3", "grpo.batch_multiplier", 2, ["use_dynamic_sampling to true"]),
    "keep surplus without dynamic sampling": ("grpo:\n  dynamic_sampling_keep_surplus: true", "grpo.dynamic_sampling_keep_surplus", 2, ["use_dynamic_sampling: true"]),
    "groups of one": ("grpo:\n  use_dynamic_sampling: true\n  num_generations_per_prompt: 1", "grpo.num_generations_per_prompt", 3, ["set at least 2"]),
    "two names, two values": ("grpo:\n  use_dynamic_sampling: true\n  batch_multiplier: 2\n  dapo_batch_multiplier: 3", "grpo.dapo_batch_multiplier", 4, ["another name of grpo.batch_multiplier", "keep one"]),
    "half an early stop": ("grpo:\n  stop_at_validation_metric: accuracy", "grpo.stop_at_validation_threshold", 2, ["both or neither"]),
    "pass_k of one": ("grpo:\n  stop_at_validation_metric: pass_k\n  stop_at_validation_threshold: 0.5", "grpo.stop_at_validation_metric", 2, ["val_num_generations_per_prompt"]),
    "scaling from nothing": ("grpo:\n  reward_scaling: {enabled: true, source_min: 1.0}", "grpo.reward_scaling.source_min", 2, ["must be below source_max"]),
    "shaping without numbers": ("grpo:\n  reward_shaping: {enabled: true}", "grpo.reward_shaping.overlong_buffer_length", 2, ["is missing", "max_response_length"]),
    "overlong buffer without tokens": (
        "grpo:\n  reward_shaping: {enabled: true, overlong_buffer_length: 0, overlong_buffer_penalty: 1, max_response_length: 8}",
        "grpo.reward_shaping.overlong_buffer_length", 2, ["between 1 and max_response_length 8, not 0"]),
    "overlong buffer longer than a response": (
        "grpo:\n  reward_shaping: {enabled: true, overlong_buffer_length: 9, overlong_buffer_penalty: 1, max_response_length: 8}",
        "grpo.reward_shaping.overlong_buffer_length", 2, ["between 1 and max_response_length 8, not 9"]),
    "clip the wrong way round": ("grpo:\n  advantage_clip_low: 1\n  advantage_clip_high: -1", "grpo.advantage_clip_low", 2, ["swap them"]),
    "async": ("grpo:\n  async_grpo: {enabled: true}", "grpo.async_grpo.enabled", 2, ["colocated.enabled=false"]),
    "baseline of another estimator": ("grpo:\n  adv_estimator: {minus_baseline: false}", "grpo.adv_estimator.minus_baseline", 2, ["no effect with adv_estimator.name grpo"]),
    "k of another estimator": ("grpo:\n  adv_estimator: {pass_k: 2}", "grpo.adv_estimator.pass_k", 2, ["no effect with adv_estimator.name grpo"]),
    "divisor of another mean": (
        "loss_fn:\n  loss_agg_mode: seq-mean-token-sum\n  loss_scale_factor: 100", "loss_fn.loss_scale_factor", 3,
        ["no effect with another loss_agg_mode than seq-mean-token-sum-norm"]),
    "data set": ("data:\n  train: {dataset_name: arithmetics}", "data.train.dataset_name", 2, ["unknown", "did you mean arithmetic"]),
    "data set key": ("data:\n  train: {dataset_name: arithmetic, max_nmber: 5}", "data.train.max_nmber", 2, ["did you mean max_number"]),
    "data set without a file": ("data:\n  train: {dataset_name: ResponseDataset}", "data.train.data_path", 2, ["is missing"]),
    "no data set": ("data:\n  shuffle: true", "data.train", 1, ["is missing"]),
    "an unread key": (
        "grpo:\n  dynamic_sampling_oversample_ratio: 2", "grpo.dynamic_sampling_oversample_ratio", 2, ["read by nothing", "grpo.batch_multiplier"]),
    "NeMo Gym": ("env:\n  should_use_nemo_gym: true\n  arithmetic: {}", "env.should_use_nemo_gym", 2, ["no data set has the env_name nemo_gym"]),
    "NeMo Gym's levels of effort": (
        "env:\n  nemo_gym: {effort_levels: {low_weight: 0.1}}\n  arithmetic: {}", "env.nemo_gym.effort_levels", 2, ["grpo.length_penalty"]),
    "reward model": ("env:\n  reward_model: {enabled: true}\n  arithmetic: {}", "env.reward_model.enabled", 2, ["not supported", "register_env"]),
    "environment": ("data:\n  train: {dataset_name: arithmetic, env_name: arithmetik}", "data.train.env_name", 2, ["did you mean arithmetic"]),
    "environment of one's own": ("data:\n  train: {dataset_name: arithmetic, env_name: my_parts.Share}", "data.train.env_name", 2, ["no section env.my_parts.Share", "my_parts.Share: {} under env"]),
    "environment key": ("env:\n  math: {math_verify_imp: x}\n  arithmetic: {}", "env.math.math_verify_imp", 2, ["did you mean math_verify_impl"]),
    "turns of a game": (
        "env:\n  guess_number: {max_guesses: 5}\ndata:\n  train: {dataset_name: guess_number, env_name: guess_number}",
        "grpo.max_rollout_turns", 2, ["is 1", "up to 5", "raise it"]),
    "prompt longer than the context": ("data:\n  train: {dataset_name: arithmetic}\n  max_input_seq_length: 600", "data.max_input_seq_length", 3, ["512", "lower it"]),
    "metric name": ("checkpointing:\n  metric_name: accuracy", "checkpointing.metric_name", 2, ["val:accuracy"]),
    "deadline": ("checkpointing:\n  checkpoint_must_save_by: '3:00'", "checkpointing.checkpoint_must_save_by", 2, ["DD:HH:MM:SS"]),
    "tracker": ("logger:\n  swanlab_enabled: true", "logger.swanlab_enabled", 2, ["not installed", "set it to false"]),
    "devices": ("cluster:\n  strict_sizes: true\n  gpus_per_node: 8", "cluster.gpus_per_node", 3, ["set it to 1"]),
    "a key that no data set takes": (
        "data:\n  train: {dataset_name: arithmetic}\n  default: {env_name: arithmetic, input_key: q}", "data.default.input_key", 3,
        ["taken by none"]),
    "data set with a dot": ("data:\n  train: {dataset_name: NuminaMath-1.5}", "data.train.dataset_name", 2, ["unknown", "ResponseDataset"]),
    "no name of a data set": ("data:\n  train: {max_number: 5}", "data.train.dataset_name", 2, ["is missing", "data.default"]),
    "interpolation": ("grpo:\n  seed: ${grpo.sed}", "grpo.seed", 2, ["there is no key grpo.sed"]),
    "override marker among free keys": ("policy:\n  model_name: m\n  hf_config_overrides: {_override_: true}", "policy.hf_config_overrides._override_", 3, ["at the top of the file"]),
    "deep override marker": ("policy:\n  model_name: m\n  optimizer: {_override_: true}", "policy.optimizer._override_", 3, ["at the top of the file"]),
}  # fmt: skip


def compose(change: str) -> str:
    """GRPO with the sections of `change` in front, in place of its own."""
    names = {line.partition(":")[0] for line in change.splitlines() if not line.startswith(" ")}
    rest, keep = [], True
    for line in GRPO.splitlines():
        if not line.startswith(" "):
            keep = line.partition(":")[0] not in names
        if keep:
            rest.append(line)
    return change + "\n" + "\n".join(rest) + "\n"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", BAD_FILES)
def test_invalid_value_in_a_configuration_file_is_reported_with_key_and_line(case):
    change, key, line, words = BAD_FILES[case]
    Path("bad.yaml").write_text(compose(change))
    with pytest.raises(ConfigError) as caught:
        load_grpo_config("bad.yaml")
    [problem] = caught.value.problems
    assert problem.key == key
    assert problem.where == f"bad.yaml:{line}"
    for word in words:
        assert word in str(caught.value)


def test_all_errors_of_a_configuration_file_are_reported_together_in_line_order():
    Path("bad.yaml").write_text(
        textwrap.dedent("""\
        grpo:
          num_promts_per_step: 8
          seed: many
        loss_fn:
          ratio_clip_c: 0.5
          reference_policy_kl_type: k9
        policy:
          model_name: m
          train_global_batch_size: 500
          dtensor_cfg: {lora_cfg: {enabled: true, dropout: 0.1}}
        """)
    )
    with pytest.raises(ConfigError) as caught:
        load_grpo_config("bad.yaml", ["policy.precision=float16", "policy.nope=1", "a b"])
    assert [(p.where, p.key) for p in caught.value.problems] == [
        ("override 'a b'", ""), ("override 'policy.nope=1'", "policy.nope"),
        ("override 'policy.precision=float16'", "policy.precision"), ("bad.yaml:1", "data.train"),
        ("bad.yaml:2", "grpo.num_promts_per_step"), ("bad.yaml:3", "grpo.seed"), ("bad.yaml:5", "loss_fn.ratio_clip_c"),
        ("bad.yaml:6", "loss_fn.reference_policy_kl_type"), ("bad.yaml:9", "policy.train_global_batch_size"),
        ("bad.yaml:10", "policy.dtensor_cfg.lora_cfg.dropout"),
    ]  # fmt: skip


def test_config_errors_name_the_parent_file_or_override_that_set_the_invalid_value():
    Path("parent.yaml").write_text(compose("grpo:\n  seed: 1.5"))
    Path("child.yaml").write_text("defaults: parent.yaml\nloss_fn:\n  ratio_clip_c: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_grpo_config("child.yaml", ["grpo.val_period=often"])
    places = {"parent.yaml:2", "child.yaml:3", "override 'grpo.val_period=often'"}
    assert {p.where for p in caught.value.problems} == places


def test_consequential_config_errors_of_an_invalid_value_are_not_reported():
    Path("bad.yaml").write_text(compose("policy:\n  model_name: m\n  max_total_sequence_length: long"))
    with pytest.raises(ConfigError) as caught:
        load_grpo_config("bad.yaml")
    assert [p.key for p in caught.value.problems] == ["policy.max_total_sequence_length"]


EVAL_CASES = {
    "k": ("eval.k_value=2", "eval.k_value", ["eval.num_tests_per_prompt"]),
    "greedy": ("eval.num_tests_per_prompt=4", "generation.temperature", ["above 0"]),
    "data set": ("data.dataset_name=AIME", "data.dataset_name", ["did you mean AIME20"]),
}
PPO_CASES = {
    "value batch": ("value.train_global_batch_size=500", "value.train_global_batch_size", ["256 or 512"]),
    "value length": ("value.max_total_sequence_length=512", "value.max_total_sequence_length", ["policy makes sequences"]),
    "value backend": ("value.dtensor_cfg.enabled=true", "value.megatron_cfg.enabled", ["both true"]),
    "one moment of 8 bits": ("+value.megatron_cfg.optimizer.exp_avg_dtype=uint8", "value.megatron_cfg.optimizer.exp_avg_sq_dtype", ["is float32", "set both to uint8"]),
    "unknown value loss key": ("+value_loss_fn.clip=0.2", "value_loss_fn.clip", ["did you mean cliprange"]),
    "KL without a reference": ("loss_fn.reference_policy_kl_penalty=0.1", "ppo.skip_reference_policy_logprobs_calculation", ["set the penalty to 0"]),
    "GAE without it": (["ppo.adv_estimator.name=raw_reward", "ppo.adv_estimator.gae_lambda=0.5"], "ppo.adv_estimator.gae_lambda", ["no effect with adv_estimator.name raw_reward"]),
    "epochs of no critic": (["ppo.adv_estimator.name=raw_reward", "+ppo.critic_ppo_epochs=2"], "ppo.critic_ppo_epochs", ["no effect", "no critic"]),
    "two lambdas": (["ppo.adv_estimator.length_adaptive_alpha=0.05", "ppo.adv_estimator.gae_lambda_policy=0.9"], "ppo.adv_estimator.gae_lambda_policy", ["no effect with length_adaptive_alpha 0.05"]),
    "torch's learning rate": ("policy.optimizer.kwargs.lr=1e-3", "policy.optimizer.kwargs.lr", ["no effect", "the key of policy.megatron_cfg.optimizer"]),
    "the old place of the data set": ("data.dataset_name=gsm8k", "data.dataset_name", ["set data.train.dataset_name"]),
    "GRPO's section": ("+grpo.seed=1", "grpo", ["did you mean ppo"]),
    "on-policy ratio with several epochs": ("loss_fn.force_on_policy_ratio=true", "loss_fn.force_on_policy_ratio", ["ppo.ppo_epochs to 1, not 4"]),
}  # fmt: skip


TEACHER_SERVER = "++teacher.base_url=http://localhost:8000/v1"
DISTILLATION_CASES = {
    "divergence of top k": (["loss_fn.kl_type=jensen", "distillation.topk_logits_k=64"], "distillation.topk_logits_k", ["not jensen"]),
    "top-p of top k": (["policy.generation.top_p=0.9", "distillation.topk_logits_k=64"], "distillation.topk_logits_k", ["compares whole distributions"]),
    "entropy bonus of top k": (["distillation.topk_logits_k=64", "loss_fn.entropy_coef=0.1"], "loss_fn.entropy_coef", ["is for the sampled token"]),
    "temperature of a teacher server": ([TEACHER_SERVER, "policy.generation.temperature=0.7"], "policy.generation.temperature", ["at temperature 1"]),
    "top k of a teacher server": ([TEACHER_SERVER, "distillation.topk_logits_k=8"], "distillation.topk_logits_k", ["needs a teacher of the native core"]),
    "back end of a teacher server": ([TEACHER_SERVER, "++teacher.backend=hf"], "teacher.backend", ["leave it out with teacher.base_url"]),
    "estimator without a teacher": ("distillation.adv_estimator.name=grpo", "distillation.adv_estimator.name", ["must be opd, which reads the teacher's scores"]),
}  # fmt: skip
SFT_CASES = {
    "loss of rollouts": ("loss_fn.name=sapo", "loss_fn.name", ["must be nll, or a loss of yours"]),
    "engines": (
        ["cluster.executor=processes", "cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"],
        "policy.generation", ["nothing is generated"]),
    "weights of rollouts": ("loss_fn.use_importance_sampling_correction=true", "loss_fn", ["does not go with the loss nll"]),
}  # fmt: skip
CASES = {
    load_ppo_config: PPO_CASES, load_eval_config: EVAL_CASES, load_distillation_config: DISTILLATION_CASES, load_sft_config: SFT_CASES,
}  # fmt: skip


@pytest.mark.parametrize("load, name", [(load, name) for load, cases in CASES.items() for name in cases])
def test_invalid_command_line_override_of_every_kind_of_run_is_reported_with_its_key(load, name):
    overrides, key, words = CASES[load][name]
    overrides = [overrides] if isinstance(overrides, str) else overrides
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides)
    [problem] = caught.value.problems
    assert (problem.key, problem.where) == (key, f"override '{overrides[-1]}'")
    for word in words:
        assert word in problem.message


SEVERAL = ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=8"]
SIX = ["data.use_multiple_dataloader=true", "grpo.num_prompts_per_step=6", "policy.train_global_batch_size=48"]
FOUR = [*SIX, "data.num_prompts_per_dataloader=4"]
# (loader, overrides that are accepted, and those that are not, what is said of them)
CONDITIONS = {
    "on-policy ratio with one update": (
        load_ppo_config, ["loss_fn.force_on_policy_ratio=true", "ppo.ppo_epochs=1", "policy.train_global_batch_size=512"]),
    "no critic": (load_ppo_config, ["ppo.adv_estimator.name=raw_reward", "value.train_global_batch_size=500"]),
    "epochs of several loaders": (
        load_grpo_config, [*SEVERAL, "grpo.max_num_epochs=3", "grpo.max_num_steps=9"], [*SEVERAL, "grpo.max_num_epochs=3"],
        "grpo.max_num_epochs ends no run.*set grpo.max_num_steps"),
    "prompts of a loader": (
        load_grpo_config, [*SIX, "data.num_prompts_per_dataloader=3"], FOUR,
        "num_prompts_per_dataloader is 4, which does not divide the 6 prompts"),
    "loaders of one's own": (load_grpo_config, [*FOUR, "data.custom_dataloader=my.loader"]),
    "prompts of a larger batch": (load_grpo_config, [*FOUR, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CONDITIONS)
def test_values_are_accepted_under_the_conditions_that_error_messages_name(case):
    load, accepted, *wrong = CONDITIONS[case]
    load(overrides=[f"++{override}" for override in accepted])
    if wrong:
        with pytest.raises(ConfigError, match=wrong[1]):
            load(overrides=[f"++{override}" for override in wrong[0]])


def test_keys_of_other_advantage_estimators_are_accepted_in_a_parent_file():
    load_ppo_config(overrides=["ppo.adv_estimator.name=raw_reward", "ppo.adv_estimator.gae_lambda=0.95"])
    Path("parent.yaml").write_text(
        compose("grpo:\n  adv_estimator: {name: reinforce_plus_plus, minus_baseline: false}")
    )
    Path("child.yaml").write_text("defaults: parent.yaml\ngrpo:\n  adv_estimator: {name: grpo}\n")
    assert load_grpo_config("child.yaml").grpo.adv_estimator.minus_baseline is False


def test_only_async_grpo_requires_the_importance_sampling_correction():
    apart = ["policy.generation.colocated.enabled=false", "loss_fn.use_importance_sampling_correction=false"]
    config = load_grpo_config(overrides=[*apart, "async_rl={sampler:{max_lookahead_versions:2}}"])
    assert config.loop.trajectory_age == 2 and not config.loss_fn.use_importance_sampling_correction
    with pytest.raises(ConfigError, match="async_grpo.enabled trains on responses of older weights"):
        load_grpo_config(overrides=[*apart, "grpo.async_grpo.enabled=true"])
    with pytest.raises(ConfigError, match="async_rl.sampler.name must be one of in_order, windowed"):
        load_grpo_config(overrides=[*apart, "+async_rl.sampler.name=by_time"])


def test_ppo_accepts_minus_one_as_unlimited_epochs_and_null_as_disabled_async_ppo():
    config = load_ppo_config(overrides=["ppo.max_num_epochs=-1", "ppo.async_ppo=null"])
    assert config.ppo.max_num_epochs == load_ppo_config().ppo.max_num_epochs == 100000
    assert not config.loop.beside_training.enabled
    with pytest.raises(ConfigError, match="ppo.max_num_epochs must be at least 1"):
        load_ppo_config(overrides=["ppo.max_num_epochs=0"])


BROKEN_FILES = {
    "missing parent": ("defaults: nope.yaml\n", ["bad.yaml:1", "nope.yaml does not exist"]),
    "missing parent of NeMo RL's": (
        "defaults: ../../grpo.yaml\n",
        ["bad.yaml:1", "../../grpo.yaml does not exist; did you mean grpo_math_1B.yaml?"],
    ),
    "circle": ("defaults: [bad.yaml]\n", ["bad.yaml:1", "its own parent"]),
    "twice": ("grpo:\n  seed: 1\n  seed: 2\n", ["bad.yaml:3", "'seed' is given twice (first in line 2)"]),
    "list": ("- a\n", ["bad.yaml:1", "must hold a mapping"]),
    "indentation": ("grpo:\n  seed: 1\n val_period: 2\n", ["bad.yaml:3", "indentation"]),
    "open quote": ("grpo:\n  seed: 'x\n", ["bad.yaml", "not closed"]),
    "no colon": ("grpo:\n  seed: 1\n  val_period 5\n", ["bad.yaml:3"]),
    "two documents": ("a: 1\n---\nb: 2\n", ["bad.yaml", "one document"]),
    "defaults of a mapping": ("defaults: {x: 1}\n", ["bad.yaml:1", "defaults takes a file name"]),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_file_that_is_not_a_configuration_is_an_error_that_states_the_reason(case):
    text, words = BROKEN_FILES[case]
    Path("bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_grpo_config("bad.yaml")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("load, overrides, keys", [
    (load_grpo_config, ["policy.max_total_sequence_length=0"], {"policy.max_total_sequence_length"}),
    (load_ppo_config, ["policy.train_global_batch_size=7"], {"policy.train_global_batch_size"}),
    (load_grpo_config, ["policy.generation.top_p=3"], {"policy.generation.top_p"}),  # val_top_p is ${.top_p}
    (load_grpo_config, ["grpo.seed=-1", "grpo.max_num_steps=${grpo.seed}"], {"grpo.seed"}),
    (load_grpo_config, ["grpo.seed=-1", "grpo.max_num_steps=0"], {"grpo.seed", "grpo.max_num_steps"}),
    (load_grpo_config, ["grpo.val_period=${grpo.max_num_steps}", "grpo.max_num_steps=${grpo.val_period}"], {"grpo.val_period", "grpo.max_num_steps"}),
])  # fmt: skip
def test_invalid_value_is_reported_once_even_if_other_keys_interpolate_the_value(load, overrides, keys):
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides)
    assert {problem.key for problem in caught.value.problems} == keys


def test_error_for_a_missing_config_file_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match=r"grpo_maths_1B.yaml does not exist.*did you mean grpo_math_1B.yaml"):
        load_grpo_config("configs/grpo_maths_1B.yaml")


@pytest.mark.slow
def test_config_errors_are_reported_without_importing_torch_or_other_slow_packages():
    Path("bad.yaml").write_text(compose("grpo:\n  num_promts_per_step: 8"))
    code = (
        "import sys\n"
        "from nemo_rl_cpp.run_grpo_math import main\n"
        "status = main(['--config', 'bad.yaml', 'policy.precision=float16'])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'ray', 'vllm', 'wandb', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(status)"
    )
    # compiled modules are kept, as any user's Python keeps them, but in a folder of the test's own
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": "", "PYTHONPYCACHEPREFIX": str(Path("compiled").resolve())}

    def run_and_time(code):
        """Returns how the second run ended, and its processor time: other programs may share this machine."""
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return run, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    run, seconds = run_and_time(code)
    assert run.returncode == 2, run.stderr
    assert "bad.yaml:2: grpo.num_promts_per_step is unknown; did you mean num_prompts_per_step?" in run.stderr
    assert "policy.precision must be one of float32, bfloat16, not 'float16'" in run.stderr
    _, of_the_library = run_and_time(
        "import asyncio, http.server, multiprocessing.pool, unittest.mock, xml.dom.minidom"
    )
    assert seconds <= 10 * of_the_library  # a second where Python's own modules take a tenth
