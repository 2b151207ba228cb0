import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from nemo_rl_cpp import dotted_names, run_grpo_math
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes
from safetensors.torch import save_file

# what a user writes: module -> text
MODULES = {
    "my_rewards": """
        import os
        LIMIT = 3
        def right(completions, ground_truth):
            return [float(truth in text) for text, truth in zip(completions, ground_truth)]
        def any_column(completions, **columns):
            return [float(a in text) for text, a in zip(completions, columns["answer"])]
        def leaves(completions, **_):
            raise SystemExit(0)
        def reads(completions, **_):
            return open("truths.txt").read()
        """,
    "wants_package": "import a_package_that_nobody_has\n",
    "not_python": "def right(completions:\n",
    "leaves_at_once": "import sys\nsys.exit(0)\n",
    "my_envs": """
        from nemo_rl_cpp.environments.single_turn import SingleTurnEnvironment
        class NoBase:
            def __init__(self, cfg): pass
            def step(self, message_log_batch, metadata): return None
        class NoStep(SingleTurnEnvironment):
            def __init__(self, cfg): pass
        class NoSettings(SingleTurnEnvironment):
            def step(self, message_log_batch, metadata): return None
        class Base(SingleTurnEnvironment):
            def __init__(self, cfg): pass
        class Takes(Base):
            def step(self, message_log_batch): return None
        class Constructor(Base):
            def __init__(self, cfg): self.size = cfg["size"]
            def step(self, message_log_batch, metadata): return None
        class Nothing(Base):
            def step(self, message_log_batch, metadata): return None
        class One(Base):
            def step(self, message_log_batch, metadata): return self._finish([1.0], metadata[:1])
        class Raises(Base):
            def step(self, message_log_batch, metadata): return message_log_batch[0][0]["text"]
        class Leaves(Base):
            def step(self, message_log_batch, metadata): exit(0)
        """,
    "my_data": """
        from nemo_rl_cpp.data.datasets import RawDataset
        class NoBase:
            def __init__(self, **config): pass
        class Fails(RawDataset):
            def __init__(self, **config): raise KeyError("rows")
        """,
}


def rewards(*names):
    functions = f"+env={{reward_functions: {{functions: [{', '.join(names)}]}}}}"
    return ["data.default.env_name=reward_functions", functions]


def environment(name):
    return [f"data.default.env_name={name}", f"+env={{{name}: {{}}}}"]


def rows(text, name="data.jsonl", **keys):
    Path(name).write_text(text)
    section = {"dataset_name": "ResponseDataset", "data_path": name, "input_key": "q", "output_key": "a"} | keys
    return data_of(", ".join(f"{key}: {value}" for key, value in section.items()))


def data_of(keys):
    return [f"data.train={{{keys}}}", "~data.train.num_digits", "data.validation=null"]


def model():
    folder = Path("model")
    folder.mkdir()
    config = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 16) | {"num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "model_type": "llama", "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = parameter_shapes(native_config(config))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return ["policy.model_name=model", "policy.hf_config_overrides=null"]


def find_spec(monkeypatch, name, found):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: found if asked.endswith(name) else find(asked))


def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def no_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "nemo_rl_cpp._cuda", None)
    find_spec(monkeypatch, "._cuda", None)


def no_key(monkeypatch):
    def init(**options):
        raise RuntimeError("api_key not configured (no-tty). call wandb.login(key=[your_api_key])")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    find_spec(monkeypatch, "wandb", object())


CASES = {
    # reward functions
    "misspelt reward": (lambda: rewards("my_rewards.rigth"), 2, ["my_rewards.rigth", "did you mean right?"]),
    "misspelt module": (lambda: rewards("my_reward.right"), 2, ["no module my_reward ", "did you mean my_rewards?"]),
    "module that is not there": (lambda: rewards("elsewhere.right"), 2, ["no module elsewhere", "elsewhere.py", "working directory"]),
    "name without a module": (lambda: rewards("right"), 2, ["'right'", "my_module.my_name"]),
    "module of the package is not there": (lambda: rewards("os.nothing.right"), 2, ["os has no nothing"]),
    "import of a package": (lambda: rewards("wants_package.right"), 2, ["a_package_that_nobody_has", "wants_package.py:1", "pip install a_package_that_nobody_has"]),
    "no Python": (lambda: rewards("not_python.right"), 2, ["not_python.py:1", "SyntaxError"]),
    "import that leaves": (lambda: rewards("leaves_at_once.right"), 2, ["leaves_at_once.py:2", "sys.exit"]),
    "no function": (lambda: rewards("my_rewards.LIMIT"), 2, ["my_rewards.LIMIT", "cannot be called"]),
    "no functions": (lambda: rewards(), 2, ["list of dotted names"]),
    "column by key": (lambda: rewards("my_rewards.any_column"), 1, ["any_column", "my_rewards.py:6", "no column 'answer'", "completions, ground_truth, prompts"]),
    "leaves": (lambda: rewards("my_rewards.leaves"), 1, ["leaves", "my_rewards.py:8", "sys.exit"]),
    "file of the reward": (lambda: rewards("my_rewards.reads"), 1, ["truths.txt", "my_rewards.py:10"]),
    # environments
    "misspelt environment": (lambda: environment("my_envs.NoBas"), 2, ["my_envs.NoBas", "did you mean NoBase?"]),
    "no base class": (lambda: environment("my_envs.NoBase"), 2, ["my_envs.NoBase", "nemo_rl_cpp.environments.interfaces.EnvironmentInterface"]),
    "no step": (lambda: environment("my_envs.NoStep"), 2, ["my_envs.NoStep", "lacks step"]),
    "no settings": (lambda: environment("my_envs.NoSettings"), 1, ["NoSettings() takes no arguments"]),
    "step without metadata": (lambda: environment("my_envs.Takes"), 1, ["Takes.step() takes 2 positional arguments but 3 were given"]),
    "constructor": (lambda: environment("my_envs.Constructor"), 1, ["my_envs.Constructor", "KeyError 'size'", "my_envs.py:14"]),
    "step returns nothing": (lambda: environment("my_envs.Nothing"), 1, ["NoneType", "EnvironmentReturn"]),
    "step returns one": (lambda: environment("my_envs.One"), 1, ["1 rewards for 32 conversations"]),
    "step raises": (lambda: environment("my_envs.Raises"), 1, ["KeyError 'text'", "Raises.step", "my_envs.py:21"]),
    "step leaves": (lambda: environment("my_envs.Leaves"), 1, ["sys.exit", "Leaves.step"]),
    # data
    "no file": (lambda: rows("{}", "other.jsonl", data_path="nowhere.jsonl"), None, ["nowhere.jsonl"]),
    "data set without the base": (lambda: data_of("dataset_name: my_data.NoBase"), None, ["my_data.NoBase", "RawDataset"]),
    "data set that fails": (lambda: data_of("dataset_name: my_data.Fails"), None, ["my_data.py:5", "KeyError 'rows'"]),
    # model and devices
    "no tokenizer": (lambda: model(), None, ["tokenizer.json"]),
    "no such folder": (lambda: ["policy.model_name=./nowhere"], None, ["./nowhere", "policy.model_name"]),
    "no GPU": (lambda: ["cluster.device=cuda"], 1, ["cluster.device", "torch sees no GPU"], no_gpu),
    "no kernels": (lambda: ["cluster.device=cuda"], 1, ["cluster.device", "NEMO_RL_CUDA=on"], no_kernels),
    # folders and trackers
    "log folder is a file": (lambda: [f"logger.log_dir={__file__}"], None, [Path(__file__).name]),
    "tracker without a key": (lambda: ["logger.wandb_enabled=true"], 1, ["wandb", "WANDB_API_KEY", "WANDB_MODE=offline"], no_key),
}  # fmt: skip

SMALL = [
    "--config", "grpo_tiny.yaml", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=32", "grpo.max_num_steps=1",
    "grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.enabled=false", "logger.tensorboard_enabled=false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_the_user(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(dedent(text).lstrip())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(dotted_names, "searched", [])
    monkeypatch.setattr("nemo_rl_cpp.errors._folder", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in MODULES:
        sys.modules.pop(name, None)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def one_line(capsys):
    errors = capsys.readouterr().err
    lines = errors.splitlines()
    assert len(lines) == 1, errors
    assert "Traceback" not in errors
    return lines[0]


@pytest.mark.parametrize("case", CASES)
def test_user_mistakes_give_a_one_line_error_with_the_expected_exit_status(case, capsys, monkeypatch):
    overrides, status, words, *prepare = CASES[case]
    arguments = [*SMALL, "logger.log_dir=logs", *overrides()]
    for change in prepare:
        change(monkeypatch)
    ended = run_grpo_math.main(arguments)
    errors = one_line(capsys)
    assert ended == status if status is not None else ended in (1, 2)
    for word in words:
        assert word in errors
    if ended == 1:  # the traceback is in the file that the sentence names
        details = Path(re.search(r"\(details: (.*)\)$", errors)[1])
        assert "Traceback (most recent call last)" in details.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["misspelt module", "no file", "no such folder", "no tokenizer"])
def test_user_mistakes_are_reported_before_torch_is_imported(case):
    overrides, *_ = CASES[case]
    code = (
        "import sys\nfrom nemo_rl_cpp.run_grpo_math import main\n"
        "try: sys.exit(main(sys.argv[1:]))\nfinally: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *SMALL, "logger.log_dir=logs", *overrides()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout.endswith("False\n")
