import subprocess
import sys

import pytest
from nemo_rl_cpp.config import load_eval_config, load_grpo_config
from nemo_rl_cpp.data.datasets.response_datasets.agent_tasks import VerifiersDataset
from nemo_rl_cpp.distributed.ray_workers import ray_module
from nemo_rl_cpp.errors import one_sentence
from nemo_rl_cpp.models.generation.vllm.server import TESTED_VERSION, check_interpreter
from nemo_rl_cpp.models.hf import outputs
from nemo_rl_cpp.serving import check_installed

EXTRAS = {
    "hf": ("transformers", "datasets"), "serve": ("starlette", "uvicorn"), "agents": ("verifiers", "starlette", "transformers"), "ray": ("ray",),
    "vllm": ("vllm",),
}  # fmt: skip
EVERYTHING = tuple(dict.fromkeys(name for names in EXTRAS.values() for name in (*names, "openai")))


class Without:
    """In the place of all finders: some packages are not there. It remembers which of them were asked for."""

    def __init__(self, names, finders):
        self.names, self.finders, self.asked = names, finders, []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            self.asked.append(name)
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders if hasattr(finder, "find_spec"))
        return next((spec for spec in found if spec is not None), None)


@pytest.fixture
def without(monkeypatch):
    def remove(*names):
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Without(names, list(sys.meta_path))])
        outputs.transformers.cache_clear()

    yield remove
    outputs.transformers.cache_clear()


def tiny(*overrides):
    return load_grpo_config("grpo_tiny.yaml", list(overrides))


NEEDS = {
    "trainer": ("hf", lambda: tiny("policy.backend=hf"), "policy.backend is hf, but transformers is not installed: pip install 'nemo_rl_cpp[hf]'"),
    "library": ("hf", outputs.transformers, "pip install 'nemo_rl_cpp[hf]'"),
    "evaluation": ("hf", lambda: load_eval_config("evals/reverse_digits.yaml", ["generation.backend=hf"]), "pip install 'nemo_rl_cpp[hf]'"),
    "server of a run": ("serve", lambda: tiny("policy.generation.expose_http_server=true"), "pip install 'nemo-rl-cpp[serve]'"),
    "command serve": ("serve", lambda: check_installed("serve"), "pip install 'nemo-rl-cpp[serve]'"),
    "task set": ("agents", lambda: VerifiersDataset("gsm8k"), "pip install 'nemo_rl_cpp[agents]'"),
    "executor": ("ray", lambda: tiny("cluster.executor=ray"), "pip install 'nemo_rl_cpp[ray]'"),
    "ray itself": ("ray", ray_module, "pip install 'nemo_rl_cpp[ray]'"),
    "interpreter": ("vllm", lambda: check_interpreter(sys.executable), f"install vLLM {TESTED_VERSION} there; docs/vllm.md says how"),
}  # fmt: skip


@pytest.mark.parametrize("what", NEEDS)
def test_error_for_a_missing_optional_package_names_the_install_command(what, without):
    extra, ask, command = NEEDS[what]
    without(*EXTRAS[extra])
    with pytest.raises((ValueError, ImportError)) as raised:
        ask()
    said = one_sentence(raised.value)
    assert command in said and "\n" not in said.strip().partition("\n  ")[0]
    assert any(name in said.lower() for name in (*EXTRAS[extra], "vllm"))


NATIVE_RUN = """
import sys
sys.path.insert(0, {tests!r})
from unit.packaging.test_missing_extras import Without
hidden = Without({names!r}, list(sys.meta_path))
sys.meta_path[:] = [hidden]
from pathlib import Path
import tiny
run = tiny.train(Path({folder!r}), *tiny.SMALL, "grpo.max_num_steps=1", "checkpointing.enabled=true", "checkpointing.metric_name=null")
assert len(run.history) == 1, run.history
print(sorted(set(hidden.asked)))
"""


@pytest.mark.slow
def test_training_with_the_native_core_imports_no_optional_package(tmp_path, pytestconfig):
    tests = str(pytestconfig.rootpath / "tests")
    code = NATIVE_RUN.format(tests=tests, names=EVERYTHING, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
