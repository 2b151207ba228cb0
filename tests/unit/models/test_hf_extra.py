import subprocess
import sys

import pytest
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.config.fold import exactness_text


def test_generation_backend_defaults_to_the_training_backend():
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
