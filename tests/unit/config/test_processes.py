import pytest
from nemo_rl_cpp.config import ConfigError, load_eval_config, load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.cluster import engines_of, launched_ranks, trainers_of
from nemo_rl_cpp.config.fold import fold_text
from nemo_rl_cpp.models.memory import forecast

DDP = "policy.megatron_cfg.distributed_data_parallel_config"
MEGATRON = ("policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false")
FSDP = (*MEGATRON, f"{DDP}.use_custom_fsdp=true")
STRATEGY = "policy.data_parallel_sharding_strategy"
TWO = ("cluster.executor=processes", "cluster.gpus_per_node=2")


def grpo(*overrides):
    return load_grpo_config("grpo_tiny.yaml", list(overrides))


@pytest.mark.parametrize("overrides, sharded, beside", [
    ((), False, False),
    ((f"{DDP}.use_custom_fsdp=true",), False, False),  # Megatron is not enabled
    (MEGATRON, False, True),
    ((*MEGATRON, f"{DDP}.overlap_grad_reduce=false"), False, False),
    ((*MEGATRON, "policy.overlap_grad_reduce=false"), False, False),
    (FSDP, True, True),
    ((*FSDP, f"{DDP}.data_parallel_sharding_strategy=optim_grads"), True, True),
    ((*FSDP, f"{DDP}.data_parallel_sharding_strategy=optim"), False, True),
    ((*FSDP, f"{DDP}.data_parallel_sharding_strategy=no_shard"), False, True),
    ((*FSDP, f"{STRATEGY}=optim"), False, True),
    ((f"{STRATEGY}=optim_grads",), True, False),
    (("policy.overlap_grad_reduce=true",), False, True),
])  # fmt: skip
def test_data_parallel_sharding_strategy_enables_gradient_sharding_and_overlap(overrides, sharded, beside):
    policy = grpo(*overrides).policy
    assert (policy.shards_gradients, policy.overlaps_grad_reduce) == (sharded, beside)


def test_critic_inherits_the_sharding_strategy_of_the_policy_unless_configured_separately():
    config = load_ppo_config("ppo_tiny.yaml", [f"{STRATEGY}=optim_grads", "policy.overlap_grad_reduce=true"])
    assert config.value.shards_gradients and config.value.overlaps_grad_reduce
    own = "value.data_parallel_sharding_strategy=optim"
    config = load_ppo_config("ppo_tiny.yaml", [f"{STRATEGY}=optim_grads", own])
    assert config.policy.shards_gradients and not config.value.shards_gradients


def test_gradient_sharding_requires_overlap_grad_reduce():
    with pytest.raises(ConfigError, match="overlap_grad_reduce.* is false, but gradients that are shared out"):
        grpo(f"{STRATEGY}=optim_grads", "policy.overlap_grad_reduce=false")


@pytest.mark.parametrize(
    "sharing, advice",
    [(FSDP, f"{DDP}.use_custom_fsdp to false"), ((*MEGATRON, f"{STRATEGY}=optim_grads"), f"{STRATEGY} to optim")],
)
def test_gradient_sharding_is_an_error_if_megatrons_overlap_grad_reduce_is_false(sharing, advice):
    late = f"{DDP}.overlap_grad_reduce=false"
    with pytest.raises(ConfigError, match=f"{DDP}.overlap_grad_reduce is false.* set it to true, or {advice}"):
        grpo(*sharing, late)
    assert grpo(*sharing, late, "policy.overlap_grad_reduce=true").policy.overlaps_grad_reduce


def gradients(*overrides):
    phases = forecast(grpo(*TWO, "policy.hf_config_overrides.num_hidden_layers=32", *overrides))
    return next(size for phase in phases for name, size in phase.parts if name == "policy gradients")


def test_gradient_sharding_saves_more_memory_if_a_gradient_block_is_one_micro_batch():
    blocks = ("policy.gradient_blocks=8", "policy.train_global_batch_size=64")
    one = (*blocks, "policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=8")
    sharded = gradients(*one, f"{STRATEGY}=optim_grads")
    assert sharded < 0.6 * gradients(*one)
    assert sharded < gradients(*blocks, f"{STRATEGY}=optim_grads") < gradients(*blocks)


@pytest.mark.parametrize("environment, ranks", [
    ({}, 1), ({"RANK": "0", "WORLD_SIZE": "4"}, 4), ({"WORLD_SIZE": "4"}, 1), ({"RANK": "0", "WORLD_SIZE": "many"}, 1),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 1), ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"}, 3),
    ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "2"}, 2),
])  # fmt: skip
def test_rank_count_is_read_from_the_environment_variables_of_the_launcher(environment, ranks):
    assert launched_ranks(environment) == ranks


@pytest.fixture
def launcher(monkeypatch):
    """Of two ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_automatic_executor_without_a_launcher_trains_in_the_current_process():
    cluster = grpo("cluster.gpus_per_node=8").cluster
    assert (cluster.chosen_executor, cluster.processes) == ("in_process", 1)


def test_automatic_executor_under_a_launcher_trains_on_the_ranks_of_the_launcher(launcher):
    config = grpo("cluster.gpus_per_node=2")
    assert (config.cluster.chosen_executor, config.cluster.processes, trainers_of(config)) == ("processes", 2, 2)
    assert fold_text(config) is None
    assert grpo("cluster.executor=in_process").cluster.processes == 1
    config = grpo(
        "cluster.gpus_per_node=8", "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=4",
    )  # fmt: skip
    assert engines_of(config) == 0 and trainers_of(config) == 2
    said = fold_text(config)
    assert "written for 8 devices" in said and "generation on devices of its own: runs on 2 processes (cpu)" in said
    with pytest.raises(ConfigError, match="8"):
        grpo("cluster.gpus_per_node=8", "cluster.strict_sizes=true")


def test_single_process_features_are_errors_under_a_launcher_with_two_ranks(launcher):
    said = "auto under a launcher of 2 ranks is for training: an evaluation runs in one process; start one process"
    with pytest.raises(ConfigError, match=said):
        load_eval_config("evals/reverse_digits.yaml", [])
    server = "policy.generation.vllm_cfg.server_url"
    said = f"gets its weights from one training process: start one process, or set {server} to null"
    with pytest.raises(ConfigError, match=said):
        grpo("cluster.gpus_per_node=2", "policy.generation.backend=vllm", f"{server}=http://127.0.0.1:8000")
    with pytest.raises(ConfigError, match="an evaluation runs in one process; set it to auto"):
        load_eval_config("evals/reverse_digits.yaml", ["cluster.executor=processes"])
