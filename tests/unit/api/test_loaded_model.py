import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import nemo_rl_cpp
import pytest
import torch

ROWS = [{"prompt": f"{a}{b}=", "answer": f"{a}" * 3} for a in range(10) for b in range(2)]
EIGHT = ["12="] * 8


def share_right(completions, answer):
    return [sum(c == a for c, a in zip(text, right)) / 3 for text, right in zip(completions, answer)]


def starts_with(completions, answer):
    return [float(text[:1] == right[0]) for text, right in zip(completions, answer)]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    return nemo_rl_cpp.train_grpo(
        "tiny-random", ROWS, share_right, 2, num_prompts_per_step=4, num_generations=4, max_new_tokens=3, max_length=16,
        log_dir=folder / "logs", checkpoint_dir=folder / "checkpoints",
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(result):
    return nemo_rl_cpp.load(result.config.checkpointing.checkpoint_dir)


def test_model_loaded_from_a_checkpoint_generates_the_same_texts_as_the_training_result(result, model):
    assert model.generate(EIGHT[:1] + ["3="], max_new_tokens=3) == result.generate(EIGHT[:1] + ["3="])
    assert model.precision == "float32" and repr(model).endswith("', float32, up to 512 tokens)")
    assert model.chat("12=", max_new_tokens=3) == result.chat("12=") == result.generate("12=")[0]
    assert model._repr_html_().startswith("<p>LoadedModel(")


def test_generation_options_have_equal_effects_on_training_results_and_loaded_models(result, model):
    drawn = result.generate(["12=", "3="], n=6, temperature=1.0)
    assert [len(texts) for texts in drawn] == [6, 6] and len(set(drawn[0])) > 1
    assert result.generate(["12=", "3="], n=6, temperature=1.0) == drawn
    assert result.generate(["12=", "3="], n=6, temperature=1.0, seed=3) != drawn
    assert (
        model.generate(["12=", "3="], n=6, temperature=1.0, max_new_tokens=3) == drawn
    )  # draws go by prompt and sample
    assert len(set(model.generate(EIGHT, n=8, top_k=1, max_new_tokens=3)[0])) == 1
    assert model.generate("12=", max_new_tokens=3, stop_strings=list("0123456789+-*/=. ")) == [
        model.generate("12=", max_new_tokens=1)[0]
    ]
    assert result.config.policy.generation.max_new_tokens == 3 and model.generate(
        "12=", max_new_tokens=2
    ) == model.generate("12=", max_new_tokens=2)


def test_threads_that_share_a_loaded_model_get_the_texts_of_their_own_settings(model):
    def texts(seed):
        return model.generate(EIGHT, n=8, temperature=1.0, max_new_tokens=64 + seed, seed=seed)

    alone = [texts(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(texts, range(8))) == alone


@pytest.mark.parametrize("options", [{"n": 6}, {"greedy": False}, {"top_k": 3}, {"top_p": 0.9}])
def test_loaded_model_samples_at_temperature_1_if_asked_to_sample_without_a_temperature(model, options):
    sampled = model.generate(EIGHT, max_new_tokens=3, **options)
    assert sampled == model.generate(EIGHT, max_new_tokens=3, **{"temperature": 1.0} | options)
    assert sampled != [[text] * 6 if "n" in options else text for text in model.generate(EIGHT, max_new_tokens=3)]


@pytest.mark.parametrize(("options", "words"), [
    ({"n": 2}, "n=2"),
    ({"n": 2, "greedy": True}, "n=2 greedy answers would be equal: give a temperature above 0"),
    ({"n": 0}, "n = 0: expected a whole number from 1 to 4096"),
    ({"n": 4, "greedy": False, "temperature": 0}, "greedy=False samples, but temperature 0"),
    ({"temprature": 1.0}, "temprature is unknown; did you mean temperature"),
    ({"top_p": 2.0}, "top_p must be at most 1, not 2"),
    ({"seed": -1}, "seed = -1: expected a whole number"),
    ({"stop_strings": [""]}, "stop_strings holds an empty string"),
    ({"temperature": 1e-40}, "temperature must lie between 1e-38 and 1e\\+38, or be 0 for greedy decoding"),
    ({"greedy": True, "temperature": 0.5}, "greedy=True takes no temperature"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
])  # fmt: skip
def test_invalid_generation_options_are_errors(model, options, words):
    if words == "n=2":  # sampled, since n asks for it
        assert len(model.generate("12=", max_new_tokens=1, **options)[0]) == 2
        return
    with pytest.raises(ValueError, match=words):
        model.generate("12=", **options)


def test_chat_raises_if_several_responses_are_requested(model):
    with pytest.raises(ValueError, match="^chat gives one answer and takes no n: use generate"):
        model.chat("12=", n=2)
    with pytest.raises(ValueError, match="message is .*: give a text, or call generate with the conversation"):
        model.chat([{"role": "user", "content": "12="}])


def test_evaluate_ends_responses_at_the_stop_strings_used_in_training(result, monkeypatch):
    monkeypatch.setattr(result.config.policy.generation, "stop_strings", list("0123456789+-*/=. "))
    found = nemo_rl_cpp.evaluate(result, ROWS[:2], share_right, max_new_tokens=2)
    assert all(len(sample["response"]) <= 1 for sample in found.samples)


def test_evaluate_returns_the_scores_of_the_reward_functions(result, model):
    texts = model.generate([row["prompt"] for row in ROWS], max_new_tokens=3)
    parts = share_right(texts, [row["answer"] for row in ROWS]), starts_with(texts, [row["answer"] for row in ROWS])
    for given, options in ((model, {"max_new_tokens": 3}), (result, {})):
        found = nemo_rl_cpp.evaluate(given, ROWS, [share_right, starts_with], reward_weights=[1.0, 0.5], **options)
        rewards = [share + 0.5 * start for share, start in zip(*parts)]
        assert [sample["response"] for sample in found.samples] == texts
        assert (
            found.mean_reward == pytest.approx(sum(rewards) / 20) and found.score == sum(r == 1 for r in rewards) / 20
        )
        assert found.metrics["rewards/starts_with"] == pytest.approx(sum(parts[1]) / 20)
    assert repr(found).startswith("Evaluation(pass@1 ") and "\n" not in repr(found)
    assert found._repr_html_().count("<tr>") == 21
    assert result.generate("12=") == model.generate("12=", max_new_tokens=3)  # nothing of it is left


def test_evaluate_with_several_responses_per_prompt_returns_pass_at_k(model):
    found = nemo_rl_cpp.evaluate(model, ROWS, starts_with, n=8, k=4, temperature=1.0, max_new_tokens=1, seed=1)
    alone = nemo_rl_cpp.evaluate(model, ROWS, starts_with, n=8, k=1, temperature=1.0, max_new_tokens=1, seed=1)
    assert len(found.samples) == 160 and found.metric == "pass@4"
    assert found.score > alone.score == pytest.approx(alone.mean_reward)


def test_model_without_end_and_pad_tokens_and_chat_template_continues_texts(model, tmp_path):
    folder = shutil.copytree(model.folder, tmp_path / "plain")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {name: value for name, value in settings.items() if name not in ("eos_token", "pad_token", "chat_template")}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    for name in ("special_tokens_map.json", "generation_config.json"):
        (folder / name).unlink()
    plain = nemo_rl_cpp.load(folder)
    assert plain.tokenizer.pad_token_id is None
    assert [len(text) > 0 for text in plain.generate(["12=", "3="], max_new_tokens=3)] == [True, True]
    with pytest.raises(ValueError, match="has no chat template: give a text, which needs none, instead of messages"):
        plain.chat("12=")


@pytest.mark.parametrize(("call", "words"), [
    (lambda m: nemo_rl_cpp.load("tiny-random"), "'tiny-random', random weights that a run makes:"),
    (lambda m: nemo_rl_cpp.load(3), "model is 3; it must be a folder"),
    (lambda m: nemo_rl_cpp.load(m.folder, precision="int4"), "precision is 'int4': expected float32 or bfloat16"),
    (lambda m: nemo_rl_cpp.load(m.folder, max_length=10**5), "max_length is 100000, but .* has positions for 512 tokens .*: lower max_length"),
    (lambda m: nemo_rl_cpp.evaluate(m, ROWS, share_right, n=4), "n=4 greedy answers to a prompt would be equal: give temperature=1.0"),
    (lambda m: nemo_rl_cpp.evaluate(m, ROWS, share_right, k=2), "argument k: eval.k_value is 2, but each prompt gets 1 responses"),
    (lambda m: nemo_rl_cpp.evaluate(m, ROWS, share_right, num_test=2), "num_test is unknown; evaluate takes n, k, seed"),
    (lambda m: nemo_rl_cpp.evaluate(m, ROWS, share_right, precision="float32"), "the model is loaded"),
    (lambda m: nemo_rl_cpp.evaluate(m, ROWS), "reward_funcs is missing"),
    (lambda m: nemo_rl_cpp.evaluate(None, ROWS, share_right), "model is None: give a folder, a model's name, what nemo_rl_cpp.load"),
    (lambda m: nemo_rl_cpp.evaluate(m, [{"prompt": "1" * 600, "answer": "1"}], share_right), "prompt 0 has 600 tokens: no room"),
])  # fmt: skip
def test_invalid_calls_of_load_generate_and_evaluate_raise_a_one_line_error(model, call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call(model)
    assert "\n" not in str(caught.value)
