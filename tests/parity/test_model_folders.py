import copy
import json
import shutil

import pytest
import torch
from model_folders import FAULTY, LINEAR, WHOLE, YARN, Folder, make_bases, without
from models import recur_in_float64
from nemo_rl_cpp._native import C
from nemo_rl_cpp.checks import model as preflight_of_model
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.hub.sources import SourceError
from nemo_rl_cpp.models.hf_config import canonical_config, max_positions, native_config
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes
from nemo_rl_cpp.models.weights import save_weights

IDS = torch.randint(3, 90, (60,), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    torch.set_num_threads(1)
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def a_run():
    return load_grpo_config("grpo_tiny.yaml")


def built(base, change, bases, tmp_path):
    folder = Folder(bases[base], tmp_path / "model")
    change(folder)
    return folder.path


def load(path, overrides=None, length=None, dtype=torch.float32):
    folder = open_model_folder(str(path), overrides, max_length=length)
    model = C.DecoderModel(native_config(folder.config), dtype, True)
    folder.fill(model)
    return folder, model


def of_transformers(path):
    from transformers import AutoModelForCausalLM

    eager = dict(attn_implementation="eager", experts_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **eager).eval()


def greedy(hf, prompt, count=6):
    with torch.no_grad():
        out = hf.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=2)
    return out[0, len(prompt) :].tolist()


def findings(a_run, path, overrides=None, length=60):
    a_run.policy.__dict__.update(model_name=str(path), hf_config_overrides=overrides, max_total_sequence_length=length)
    a_run.policy.tokenizer.__dict__.update(name=str(path))
    return list(preflight_of_model.check(a_run))


def check_logits(hf, expected, model, path, overrides):
    """Check that the native logits are close to those of `hf`. Recurrent layers are compared in float64, because a
    recurrence accumulates float32's rounding errors, which differ between processors."""
    if "linear_attention" not in (getattr(hf.config, "layer_types", None) or ()):
        torch.testing.assert_close(C.Trainer(model).logits(IDS), expected, rtol=1e-4, atol=2e-4)
        return
    _, model = load(path, overrides, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        recur_in_float64(patch)
        expected = copy.deepcopy(hf).double()(IDS[None]).logits[0]
    torch.testing.assert_close(C.Trainer(model).logits(IDS), expected, rtol=1e-6, atol=1e-6)


def check_equal(hf, path, overrides, out):
    """Check that the native model and its saved folder equal `hf`; return the saved config.json."""
    folder, model = load(path, overrides)
    with torch.no_grad():
        expected = hf(IDS[None]).logits[0]
        check_logits(hf, expected, model, path, overrides)
        save_weights(model, out, folder.config)
        torch.testing.assert_close(of_transformers(out)(IDS[None]).logits[0], expected, rtol=1e-5, atol=2e-5)
    _, again = load(out)
    assert again.digest() == model.digest()
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("name", WHOLE)
def test_valid_model_folder_loads_as_the_same_model_as_in_transformers(name, bases, a_run, tmp_path):
    path = built(*WHOLE[name], bases, tmp_path)
    hf = of_transformers(path)
    saved = check_equal(hf, path, None, tmp_path / "out")
    if saved["model_type"] not in (
        "olmo3",
        "gemma3_text",
        "gemma4_text",
    ):  # whose kinds of layers have rotary embeddings of their own
        assert (
            "rope_parameters" not in saved and {"rope_theta", "rope_scaling"} <= saved.keys()
        )  # as transformers 4 reads
    prompt = IDS[:9].tolist()
    words = " ".join(f"w{i - 3}" for i in prompt)
    assert TextGenerator(path, precision="float32").generate(words, greedy=True, max_new_tokens=6).token_ids == greedy(
        hf, prompt
    )
    length = min(60, max_positions(canonical_config(saved)))
    assert not [f for f in findings(a_run, path, length=length) if f.level == "error"]


@pytest.mark.parametrize("name", FAULTY)
def test_invalid_model_folder_is_a_one_line_error_in_training_generation_and_checks(name, bases, a_run, tmp_path):
    base, change, sentence = FAULTY[name]
    path = built(base, change, bases, tmp_path)
    for read in (
        lambda path: load(path, length=60),
        lambda path: TextGenerator(path, precision="float32").generate("w1 w2", max_new_tokens=1, greedy=True),
    ):
        with pytest.raises(SourceError, match=sentence) as refusal:
            read(path)
        assert "\n" not in str(refusal.value) and str(tmp_path / "model") in str(refusal.value)
    errors = [str(f) for f in findings(a_run, path) if f.level == "error" and f.key == "policy.model_name"]
    assert len(errors) == 1 and errors[0].startswith("policy.model_name is ") and str(path) in errors[0]


OVERRIDES = {
    "rope_scaling over format 5": (lambda f: f.format_5({}), {"rope_scaling": YARN}, lambda f: f.format_4(YARN)),
    "rope_parameters over format 4": (lambda f: f.format_4(LINEAR), {"rope_parameters": YARN}, lambda f: f.format_4(YARN)),
    "rope_theta over format 5": (lambda f: f.format_5(YARN), {"rope_theta": 90.0}, lambda f: f.format_4(YARN, rope_theta=90.0)),
    "rope_theta over format 4": (lambda f: f.format_4(), {"rope_theta": 90.0}, lambda f: f.format_4(rope_theta=90.0)),
    "theta within": (lambda f: f.format_4(), {"rope_parameters": {"rope_theta": 90.0}}, lambda f: f.format_4(rope_theta=90.0)),
    "theta within and a type": (lambda f: f.format_5(YARN), {"rope_scaling": LINEAR | {"rope_theta": 90.0}}, lambda f: f.format_4(LINEAR, rope_theta=90.0)),
    "one key": (lambda f: f.format_5(YARN), {"rope_scaling": {"factor": 2.0}}, lambda f: f.format_4(YARN | {"factor": 2.0})),
    "the key that is missing": (lambda f: f.format_5(without(YARN, "factor")), {"rope_parameters": {"factor": 2.0}}, lambda f: f.format_4(YARN | {"factor": 2.0})),
    "no scaling": (lambda f: f.format_5(YARN), {"rope_scaling": None}, lambda f: f.format_4()),
    "positions before a scaling": (lambda f: f.format_4(), {"max_position_embeddings": 64, "rope_scaling": without(YARN, "original_max_position_embeddings")},
                                   lambda f: f.format_4(YARN | {"original_max_position_embeddings": 64}, max_position_embeddings=64)),
    "original positions beside": (lambda f: f.format_5(YARN), {"original_max_position_embeddings": 16}, lambda f: f.format_4(YARN | {"original_max_position_embeddings": 16})),
    "eps": (lambda f: f.format_5(YARN), {"rms_norm_eps": 0.1}, lambda f: f.format_5(YARN, rms_norm_eps=0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDES)
def test_hf_config_override_has_the_same_effect_on_configs_of_transformers_4_and_5(name, bases, a_run, tmp_path):
    before, overrides, after = OVERRIDES[name]
    path = built("llama", before, bases, tmp_path)
    meant = Folder(bases["llama"], tmp_path / "meant")
    after(meant)
    saved = check_equal(of_transformers(meant.path), path, overrides, tmp_path / "out")
    assert canonical_config(saved) == saved  # the form is its own
    assert not [f for f in findings(a_run, path, overrides) if f.level == "error"]


def test_disabled_sliding_window_stays_disabled_after_saving(bases, tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}
    path = built("qwen2", lambda f: f.config(**window), bases, tmp_path)
    check_equal(of_transformers(bases["qwen2"]), path, {"use_sliding_window": False}, tmp_path / "out")


@pytest.mark.parametrize("overrides, sentence", [
    ({"rope_scaling": {"factor": 4.0}}, "rope_scaling gives factor without rope_type.*add rope_type"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters is yarn but has no factor"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
])  # fmt: skip
def test_invalid_hf_config_override_is_an_error(overrides, sentence, bases, a_run, tmp_path):
    path = built("llama", lambda f: f.format_4(), bases, tmp_path)
    with pytest.raises(SourceError, match=r"config\.json with hf_config_overrides: .*" + sentence):
        open_model_folder(str(path), overrides)
    assert [f.level for f in findings(a_run, path, overrides)] == ["error"]


def test_lm_head_that_differs_from_the_tied_embedding_is_kept_with_a_warning(bases, a_run, tmp_path, capsys):
    path = built(*WHOLE["tied, another head in the file"], bases, tmp_path)
    saved = check_equal(of_transformers(path), path, None, tmp_path / "out")
    assert saved["tie_word_embeddings"] is False
    assert (
        "config.json says tie_word_embeddings, but the weights hold an lm_head.weight that is not the embedding"
        in capsys.readouterr().err
    )
    assert ["tie_word_embeddings" in f.message for f in findings(a_run, path)] == [True]
    for other in ("tied", "tied, equal head in the file"):
        shutil.rmtree(tmp_path / "model")
        assert not findings(a_run, built(*WHOLE[other], bases, tmp_path))


@pytest.mark.parametrize("base", ["llama", "qwen2", "qwen3", "tied", "wide"])
@pytest.mark.parametrize("value_head", [False, True])
def test_parameter_shapes_computed_by_the_preflight_check_equal_those_of_the_native_model(base, value_head, bases):
    config = open_model_folder(str(bases[base])).config | (
        {"attention_bias": True, "mlp_bias": True} if base != "qwen2" else {}
    )
    native = native_config(config, value_head=value_head)
    layout = C.DecoderModel(native, torch.float32, False).layout
    assert parameter_shapes(native) == {name: list(shape) for name, shape, _ in layout}
