import pytest
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.config.cluster import engines_of, trainers_of
from nemo_rl_cpp.config.errors import ConfigError
from nemo_rl_cpp.models.memory import forecast, forecast_text

APART = "policy.generation.colocated.enabled=false"
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "++policy.dtensor_cfg.lora_cfg.merge=false")
ASYNC = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
RESOURCES = "policy.generation.colocated.resources"


def load(*overrides):
    return load_grpo_config("grpo_tiny.yaml", list(overrides))


def workers(nodes, each):
    return ("cluster.executor=processes", f"cluster.num_nodes={nodes}", f"cluster.gpus_per_node={each}")


@pytest.mark.parametrize("overrides, trainers, engines", [
    ((*workers(1, 3), APART, f"{RESOURCES}.gpus_per_node=1"), 2, 1),
    ((*workers(1, 3), APART, f"{RESOURCES}.gpus_per_node=2", f"{RESOURCES}.num_nodes=1"), 1, 2),
    ((*workers(3, 2), APART, f"{RESOURCES}.num_nodes=1"), 4, 2),
    ((*workers(3, 2), APART, f"{RESOURCES}.num_nodes=2", f"{RESOURCES}.gpus_per_node=2"), 2, 4),
    ((*workers(1, 3), f"{RESOURCES}.gpus_per_node=1"), 3, 0),  # colocated: not read
    ((APART, f"{RESOURCES}.gpus_per_node=1"), 1, 0),  # auto: folded
])  # fmt: skip
def test_workers_without_a_separate_generation_engine_are_used_for_training(overrides, trainers, engines):
    config = load(*overrides)
    assert (trainers_of(config), engines_of(config)) == (trainers, engines)


@pytest.mark.parametrize("overrides, said", [
    (("cluster.executor=in_process",), "cluster.executor is in_process: set it to processes or ray"),
    (workers(1, 2), "resources.gpus_per_node is missing: of the 2 workers"),
    (workers(2, 1), "resources.num_nodes is missing: of the 2 nodes"),
    ((*workers(1, 2), f"{RESOURCES}.gpus_per_node=2"), "takes 2 of the 2 workers.*none for training"),
    ((*workers(2, 2), f"{RESOURCES}.num_nodes=2"), "takes 4 of the 4 workers"),
    ((*workers(1, 3), f"{RESOURCES}.gpus_per_node=1", f"{RESOURCES}.num_nodes=2"), "the cluster has one node"),
    ((*workers(2, 2), f"{RESOURCES}.num_nodes=1", f"{RESOURCES}.gpus_per_node=1"), "takes whole nodes"),
    ((*workers(1, 2), f"{RESOURCES}.gpus_per_node=1", "policy.kept_activations_gb=1"), "keep no activations"),
    ((*workers(1, 2), f"{RESOURCES}.gpus_per_node=1", *LORA), r"lora_cfg.merge.* is false, but separate engines .* merged weights"),
    ((*ASYNC, *LORA), r"lora_cfg.merge.* is false, but separate engines .* merged weights"),
    ((*workers(1, 4), f"{RESOURCES}.gpus_per_node=1", "policy.gradient_blocks=4"), "which 3 processes cannot share"),
    ((*workers(1, 2), f"{RESOURCES}.gpus_per_node=0"), "gpus_per_node"),
    ((*workers(1, 2), f"{RESOURCES}.gpus_per_node=1", "policy.refit_buffer_size_gb=0"), "refit_buffer_size_gb"),
])  # fmt: skip
def test_generation_engine_sizes_that_do_not_fit_the_cluster_are_errors(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load(APART, *overrides)


@pytest.mark.parametrize("overrides, said", [
    (("policy.dtensor_cfg.tensor_parallel_size=2",), "tensor_parallel_size is 2, but models are sliced on the CPU only"),
    (("policy.data_parallel_sharding_strategy=optim_grads",), "shares out gradients, which works on the CPU only"),
])  # fmt: skip
def test_settings_that_several_processes_support_on_the_cpu_only_are_errors_on_gpus(overrides, said):
    load(*workers(1, 2), "cluster.device=cuda")
    load(*workers(1, 2), *overrides)
    with pytest.raises(ConfigError, match=said):
        load(*workers(1, 2), "cluster.device=cuda", *overrides)


def test_memory_estimate_includes_generation_engines_in_separate_processes():
    def parts(*overrides):
        return {name: size for phase in forecast(load(*overrides)) for name, size in phase.parts}

    kind = ("policy.precision=bfloat16", "policy.generation.packed_weights=on")
    one = (*workers(1, 1), *kind)
    two = (*workers(1, 3), APART, f"{RESOURCES}.gpus_per_node=2", *kind)
    alone, apart = parts(*one), parts(*two)
    weights = alone["policy weights"]
    assert apart["policy weights"] == weights and apart["policy master weights"] == 2 * weights
    assert apart["engines' weights"] == apart["engines' next weights"] == 2 * weights
    assert apart["engines' packed weights"] == 2 * alone["packed weights"] and "packed weights" not in apart
    assert "kept beside it" in forecast_text(load(*one)) and "kept beside it" not in forecast_text(load(*two))
