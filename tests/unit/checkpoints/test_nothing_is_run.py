"""A checkpoint, a model folder and a tokenizer are data: nothing in them is run, whatever its name and its seal."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.files.durable import seal_folder
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.models.model_folder import open_model_folder

RUN = (
    *tiny.SMALL, "checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.metric_name=null",
    "logger.tensorboard_enabled=false",
)  # fmt: skip


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    tiny.train(root, *RUN, "grpo.max_num_steps=1")
    return root


@pytest.fixture
def root(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def every_file(root):
    step = root / "checkpoints" / "step_1"
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


def resume(root):
    run = tiny.make(root, *RUN, "grpo.max_num_steps=2")
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize("with_torch", [False, True], ids=["pickle", "torch.save"])
def test_loading_a_checkpoint_never_executes_pickled_code(trained, root, tmp_path, with_torch):
    """Sealed anew, so that only its content can give it away."""
    names = [name for name in every_file(root) if not name.endswith("manifest.json")]
    assert any("optimizer" in name for name in names) and any("tokenizer" in name for name in names)
    for number, name in enumerate(names):
        copy = shutil.copytree(trained, tmp_path / str(number))
        step = copy / "checkpoints" / "step_1"
        file = step / name
        if with_torch:
            torch.save({"state": Evil(tmp_path / "ran")}, file)
        else:
            file.write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
        seal_folder(step)
        try:
            resume(copy)
        except (ValueError, RuntimeError, OSError) as error:
            assert "\n" not in str(error)  # one sentence
        assert not (tmp_path / "ran").exists(), name


CODE = "from pathlib import Path\nPath({!r}).touch()\n\n\nclass Evil:\n    pass\n"


@pytest.fixture
def weights(root, tmp_path):
    """The weights of a checkpoint with code beside them, which its JSON files name."""
    folder = root / "checkpoints" / "step_1" / "policy" / "weights"
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(CODE.format(str(tmp_path / "ran")))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_loading_a_model_folder_never_executes_code_named_in_its_json_files(root, weights, tmp_path):
    Tokenizer.from_pretrained(weights)
    open_model_folder(
        str(weights), {}, seed=0, value_head=False, max_length=16, length_key="x", key="y"
    ).check_weights()
    TextGenerator(weights, precision="float32").generate("1", max_new_tokens=2)
    seal_folder(root / "checkpoints" / "step_1")
    resume(root)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("template", [
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch ' ~ messages[0].content) }}",
    "{{ ''.format.__globals__ }}",
    "{% for m in messages %}{{ m.content.__reduce_ex__(2) }}{% endfor %}",
    "{{ lipsum.__globals__['os'].popen('true').read() }}",
])  # fmt: skip
def test_chat_template_cannot_access_python_objects_outside_its_sandbox(weights, template):
    tokenizer = Tokenizer.from_pretrained(weights)
    try:
        tokenizer.chat_template = template
        text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except ValueError as error:
        text = ""
        assert "\n" not in str(error)
    assert text == ""
