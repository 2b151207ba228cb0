import subprocess
import sys

import pytest


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()


def test_importing_the_package_loads_no_heavy_dependency():
    loaded = run("import sys, nemo_rl_cpp; print(*{name.split('.')[0] for name in sys.modules})")
    heavy = {
        "torch", "numpy", "ray", "vllm", "transformers", "datasets", "wandb", "mlflow", "swanlab", "trackio",
        "matplotlib",
    }  # fmt: skip
    assert heavy & set(loaded) == set()


@pytest.mark.slow
def test_no_public_module_imports_an_optional_package():
    code = (
        "import importlib, pkgutil, sys, nemo_rl_cpp\n"
        "for module in pkgutil.walk_packages(nemo_rl_cpp.__path__, 'nemo_rl_cpp.'):\n"
        "    name = module.name.rpartition('.')[2]\n"
        "    if not name.startswith(('_', 'lib')) and name != 'verifiers_chat':  # native modules, the core's library; verifiers loads the last\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
        "print(*('loaded:' + name for name in sys.modules if '.' not in name))"
    )
    printed = run(code)
    loaded = {name.removeprefix("loaded:") for name in printed if name.startswith("loaded:")}
    imported = [name for name in printed if name.startswith("nemo_rl_cpp.")]
    assert len(imported) > 100 and "nemo_rl_cpp.algorithms.loop" in imported
    optional = {
        "ray", "vllm", "transformers", "datasets", "wandb", "mlflow", "swanlab", "trackio", "reasoning_gym",
        "omegaconf",
    }  # fmt: skip
    assert optional & loaded == set()
