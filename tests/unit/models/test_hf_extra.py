"""Without the extra `hf`: nothing of transformers is imported, and what needs it says how to install it."""

import importlib.util
import subprocess
import sys

import pytest
from nemo_rl_cpp.config import ConfigError, load_grpo_config
from nemo_rl_cpp.config.fold import exactness_text
from nemo_rl_cpp.models.hf import outputs


@pytest.fixture
def no_transformers(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else found(name, *more)
    )
    outputs.transformers.cache_clear()
    yield
    outputs.transformers.cache_clear()


def test_error_for_missing_transformers_names_the_install_command(no_transformers):
    with pytest.raises(
        ConfigError, match=r"policy.backend is hf, but transformers is not installed: pip install 'nemo_rl_cpp\[hf\]'"
    ):
        load_grpo_config("grpo_tiny.yaml", ["policy.backend=hf"])
    with pytest.raises(ValueError, match=r"pip install 'nemo_rl_cpp\[hf\]'"):
        outputs.transformers()
    assert load_grpo_config("grpo_tiny.yaml").policy.backend == "native"


def test_generation_backend_is_the_training_backend_unless_it_is_set():
    native, hf = load_grpo_config("grpo_tiny.yaml"), load_grpo_config("grpo_tiny.yaml", ["policy.backend=hf"])
    assert (native.policy.generation.backend, hf.policy.generation.backend) == ("native", "hf")
    assert native.loss_fn.use_importance_sampling_correction is False and "equal to the bit" in exactness_text(native)
    assert hf.loss_fn.use_importance_sampling_correction is True and "was left open and is true" in exactness_text(hf)
    off = load_grpo_config("grpo_tiny.yaml", ["policy.backend=hf", "loss_fn.use_importance_sampling_correction=false"])
    assert off.loss_fn.use_importance_sampling_correction is False and "left open" not in exactness_text(off)


@pytest.mark.slow
def test_modules_of_the_transformers_backend_import_without_loading_transformers():
    modules = "models.hf.trained", "models.generation.hf", "algorithms.build"
    code = "; ".join(
        ["import sys", *(f"import nemo_rl_cpp.{name}" for name in modules), "assert 'transformers' not in sys.modules"]
    )
    subprocess.run([sys.executable, "-c", code], check=True)
