import sys

import pytest
from nemo_rl_cpp.config import ConfigError, load_eval_config, load_grpo_config
from nemo_rl_cpp.config.fold import exactness_of, exactness_text, fold_text

VLLM = ["policy.generation.backend=vllm", f"policy.generation.vllm_cfg.python={sys.executable}"]
SERVER = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.server_url=http://127.0.0.1:8000"]


def mistakes(*overrides):
    with pytest.raises(ConfigError) as error:
        load_grpo_config("grpo_tiny.yaml", list(overrides))
    return str(error.value)


def test_vllm_is_used_only_if_its_python_interpreter_or_server_url_is_configured():
    for given in (VLLM, SERVER):
        config = load_grpo_config("grpo_tiny.yaml", given)
        assert config.policy.generation.runs_vllm and fold_text(config) is None
        assert config.loss_fn.use_importance_sampling_correction is True and not exactness_of(config.policy).equal
    folded = load_grpo_config("grpo_tiny.yaml", VLLM[:1])
    assert not folded.policy.generation.runs_vllm and "the engine vllm" in fold_text(folded)


def test_unsupported_parallel_sizes_of_vllm_are_reduced_and_vllm_is_still_used():
    text = fold_text(load_grpo_config("grpo_tiny.yaml", [*VLLM, "policy.generation.vllm_cfg.tensor_parallel_size=4"]))
    assert "with vLLM; same mathematics" in text and "the engine vllm" not in text


@pytest.mark.parametrize("trainer", ["native", "hf"])
def test_vllm_enables_the_importance_sampling_correction_unless_configured_otherwise(trainer):
    config = load_grpo_config("grpo_tiny.yaml", [*VLLM, f"policy.backend={trainer}"])
    assert not exactness_of(config.policy).equal
    assert config.loss_fn.use_importance_sampling_correction is True
    text = exactness_text(config)
    assert f"generation (vllm) and training ({trainer}) are equal up to rounding" in text
    assert "use_importance_sampling_correction was left open and is true because of that" in text
    given = load_grpo_config("grpo_tiny.yaml", [*VLLM, "loss_fn.use_importance_sampling_correction=false"])
    assert given.loss_fn.use_importance_sampling_correction is False and "left open" not in exactness_text(given)


OF_PYTHON = [
    (["policy.generation.vllm_cfg.server_url=http://localhost:8000"], "is given beside policy.generation.vllm_cfg.python: set one of them to null"),
    (["policy.generation.vllm_cfg.python=/nowhere/python"], "is /nowhere/python, which is no program"),
    (["policy.generation.backend=native"], "names an interpreter with vLLM, but policy.generation.backend is native"),
    (["cluster.executor=processes", "cluster.gpus_per_node=2"], "vLLM gets its weights from one training process: set it to auto"),
    (["policy.reuse_generation_logprobs=always"], "cannot be always with vLLM"),
    (["policy.generation.temperature=0.009"], "policy.generation.temperature is 0.009, which vLLM would raise to 0.01: set it to 0.01 or more"),
    (["policy.generation.val_temperature=1e-6"], "val_temperature is 1e-06, which vLLM would raise to 0.01: set it to 0.01 or more, or to 0"),
    (["policy.kept_activations_gb=1"], "vLLM keeps no activations for training"),
    (["++policy.generation.vllm_kwargs.dtype=float32"], "vllm_kwargs.dtype is given by the run itself: leave it out, and set policy.generation.vllm_cfg.precision"),
    (["++policy.generation.vllm_kwargs.worker_cls=x"], "vllm_kwargs.worker_cls is given by the run itself: leave it out"),
    (["policy.generation.expose_http_server=true"], "vLLM generates, not the native engine"),
    (["policy.generation.vllm_cfg.timeout_s=0"], "timeout_s"),
]  # fmt: skip
OF_SERVER = [
    (["policy.generation.backend=native"], "names a vLLM server, but policy.generation.backend is native: set it to vllm, or server_url to null"),
    (["policy.generation.vllm_cfg.server_url=localhost:8000"], "is localhost:8000: expected http://HOST:PORT of a vLLM server"),
    (["policy.generation.vllm_cfg.server_url=http://"], "expected http://HOST:PORT of a vLLM server"),
    (["policy.generation.vllm_cfg.server_url=http://a:99999"], "expected http://HOST:PORT of a vLLM server"),
    (["++policy.generation.vllm_kwargs.max_num_seqs=4"], "vllm_kwargs is said where the server is started: leave it out here, and give it to the server"),
    (["++policy.generation.vllm_cfg.env_vars.A=1"], "vllm_cfg.env_vars is said where the server is started"),
    (["policy.generation.kv_cache_gb=1"], "kv_cache_gb is said where the server is started"),
    (["policy.generation.vllm_cfg.enable_prefix_caching=false"], "enable_prefix_caching is said where the server is started"),
    (["cluster.executor=processes", "cluster.gpus_per_node=2"], "set it to auto, or set policy.generation.vllm_cfg.server_url to null"),
]  # fmt: skip


@pytest.mark.parametrize(
    "vllm, overrides, text", [(VLLM, *case) for case in OF_PYTHON] + [(SERVER, *case) for case in OF_SERVER]
)
def test_settings_incompatible_with_vllm_are_errors(vllm, overrides, text):
    assert text in mistakes(*vllm, *overrides)


@pytest.mark.parametrize("key", [f"python={sys.executable}", "server_url=http://127.0.0.1:8000"])
def test_vllm_keys_in_an_evaluation_are_errors(key):
    with pytest.raises(ConfigError, match="is for training: an evaluation generates with native or hf"):
        load_eval_config("evals/eval.yaml", [f"++generation.vllm_cfg.{key}"])


def test_lowest_accepted_temperature_is_0_01_for_vllm_and_0_001_for_the_native_engine():
    low = ["policy.generation.temperature=0.01", "policy.generation.val_temperature=0"]
    assert load_grpo_config("grpo_tiny.yaml", [*VLLM, *low]).policy.generation.val_temperature == 0
    native = load_grpo_config("grpo_tiny.yaml", ["policy.generation.temperature=0.001"])
    assert native.policy.generation.temperature == 0.001
