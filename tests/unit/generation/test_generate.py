import subprocess
import sys
from functools import partial

import pytest
import served
import torch
from nemo_rl_cpp.cli import main
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.weights import save_weights

PROMPT, EOS = "12+3=", 2


def make_policy(precision="float32", **generation):
    config = PolicyConfig(model_name="tiny-random", precision=precision, max_total_sequence_length=64, hf_config_overrides={"max_position_embeddings": 64},
                          generation={"max_new_tokens": 12, "stop_token_ids": [EOS], **generation})  # fmt: skip
    config.fill_defaults()
    return Policy(None, config, tiny_tokenizer(), seed=42, init_reference_model=False)


def save(policy, folder):
    save_weights(policy.model, folder, policy.saved_config())
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_policy(), tmp_path_factory.mktemp("model"))


def engines_ids(policy, greedy=False, **generation):
    """How the engine of training continues PROMPT, with the draws that `generate` makes."""
    ids = tiny_tokenizer().encode(PROMPT)
    data = {"input_ids": torch.tensor([ids]), "input_lengths": torch.tensor([len(ids)]), "draw_ids": torch.tensor([0]), "sample_index": torch.tensor([0]),
            "stream": "eval"}  # fmt: skip
    out = policy.create_generation().generate(data, greedy=greedy)
    return out["output_ids"][0, len(ids) : out["unpadded_sequence_lengths"][0]].tolist()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
def test_text_generator_gives_the_same_tokens_as_generation_in_a_training_run(precision, rule, tmp_path):
    policy = make_policy(precision, **rule)
    generate = partial(TextGenerator(save(policy, tmp_path), precision=precision).generate, PROMPT, max_new_tokens=12)
    assert generate(seed=policy.create_generation().seed, **rule).token_ids == engines_ids(policy)
    assert generate(greedy=True).token_ids == engines_ids(policy, greedy=True)


def test_text_generator_and_policy_round_weights_to_bfloat16_identically(folder):
    text = TextGenerator(folder, precision="bfloat16").generate(PROMPT, max_new_tokens=12, greedy=True)
    assert text.token_ids == engines_ids(make_policy("bfloat16"), greedy=True)


def test_finish_reason_is_length_at_the_token_limit_and_stop_at_a_stop_string_or_token(folder):
    generator = TextGenerator(folder)
    texts = [generator.generate(PROMPT, max_new_tokens=20, seed=seed) for seed in range(40)]
    ids = [text.token_ids for text in texts]
    seed = next(i for i in range(40) if EOS not in ids[i] and min(ids[i][:5]) > 3)  # a stop string of no special token
    whole = texts[seed]
    assert whole.finish_reason == "length" and len(whole.token_ids) == 20
    stop = whole.text[3:5]
    stopped = generator.generate(PROMPT, max_new_tokens=20, seed=seed, stop_strings=[stop])
    assert stopped.finish_reason == "stop" and stopped.text == whole.text[: whole.text.index(stop) + 2]
    ended = next(text for text in texts if EOS in text.token_ids)
    assert ended.finish_reason == "stop" and ended.token_ids[-1] == EOS and "<eos>" not in ended.text


def test_generated_text_ends_after_the_stop_string_also_in_the_middle_of_a_token(tmp_path):
    generator, pieces = TextGenerator(served.make_folder(tmp_path), precision="float32"), []
    tokens = [generator.tokenizer.decode([i]) for i in generator.generate("hello", seed=1, max_new_tokens=40).token_ids]
    index = next(
        i
        for i, text in enumerate(tokens)
        if len(text.strip()) > 1 and text.isascii() and text[0] not in "".join(tokens[:i])
    )
    stop = tokens[index][0]
    done = generator.generate("hello", seed=1, max_new_tokens=40, stop_strings=["never", stop], on_text=pieces.append)
    assert done.text == "".join(pieces) and done.text.index(stop) == len(done.text) - 1
    assert done.finish_reason == "stop" and len(done.token_ids) == index + 1


def test_text_generation_stops_at_the_position_limit_of_the_model(folder):
    generator = TextGenerator(folder)
    seed = next(s for s in range(50) if EOS not in generator.generate(PROMPT, max_new_tokens=500, seed=s).token_ids)
    assert len(generator.generate(PROMPT, max_new_tokens=500, seed=seed).token_ids) == 64 - len(PROMPT)
    with pytest.raises(ValueError, match="the prompt has 64 tokens, but the model 64 positions"):
        generator.generate("1" * 64)


def test_text_generator_applies_the_chat_template_to_messages(folder):
    generate = partial(TextGenerator(folder).generate, max_new_tokens=6, greedy=True)
    assert generate([{"role": "user", "content": PROMPT}]) == generate(PROMPT)


def test_error_in_a_streaming_callback_is_raised_and_leaves_the_text_generator_usable(folder):
    def fail(piece):
        raise KeyError(piece)

    generator = TextGenerator(folder)
    with pytest.raises(KeyError):
        generator.generate(PROMPT, on_text=fail)
    assert len(generator.generate(PROMPT, max_new_tokens=3, greedy=True).token_ids) == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_generated_text_does_not_depend_on_the_number_of_threads(folder, threads):
    code = f"from nemo_rl_cpp.generate import TextGenerator; print(TextGenerator({str(folder)!r}, num_threads={threads}).generate('12+3=', seed=9).token_ids)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(TextGenerator(folder).generate(PROMPT, seed=9).token_ids)


def test_generate_command_imports_neither_torch_nor_pydantic(folder):
    code = (
        "import sys; from nemo_rl_cpp.cli import main;"
        f"status = main(['generate', '--model', {str(folder)!r}, '--max-new-tokens', '4', '12+3=']);"
        "print([m for m in ('torch', 'pydantic', 'jinja2', 'numpy', 'transformers') if m in sys.modules], status)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.endswith("\n[] 0\n") and "[4 tokens, ended by length, first text after" in out.stderr


def test_generate_command_finds_the_checkpoint_in_a_run_folder(folder, tmp_path, capsys):
    weights = tmp_path / "run" / "step_7" / "policy" / "weights"
    weights.parent.mkdir(parents=True)
    weights.symlink_to(folder)
    texts = []
    for model in (folder, tmp_path / "run", tmp_path / "run" / "step_7"):
        options = ["--greedy", "--max-new-tokens", "8", "--precision", "float32"]
        assert main(["generate", "--model", str(model), *options, PROMPT]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model", "{tmp}/nothing", "1+1="], "{tmp}/nothing"),
    (["--model", "{folder}", "--system", "x", "1+1="], "--system goes with --chat"),
    (["--model", "{folder}", "--top-p", "1.5", "1+1="], "top_p"),
    (["--model", "{folder}", "--max-new-tokens", "0", "1+1="], "max_new_tokens = 0"),
    (["--model", "{folder}", "--stop", "", "1+1="], "empty string"),
    (["--model", "{folder}", ""], "is empty"),
    (["--model", "{folder}", "--seed", "-1", "1+1="], "seed = -1: expected a whole number from 0 to 4294967295"),
    (["--model", "{folder}", "--temperature", "-1", "1+1="],
     "temperature = -1.0: expected a number from 1e-38 to 1e+38, or 0 for greedy"),
    (["--model", "{folder}", "--temperature", "1e-40", "1+1="],
     "temperature = 1e-40: expected a number from 1e-38"),
    (["--model", "{folder}", "--temperature", "nan", "1+1="], "temperature = nan"),
    (["--model", "{folder}", "--temperature", "1e39", "1+1="], "temperature = 1e+39"),
    (["--model", "{folder}", "--top-k", "-2", "1+1="], "top_k = -2: expected a whole number of at least -1"),
])  # fmt: skip
def test_generate_command_reports_user_errors_in_one_line(arguments, message, folder, tmp_path, capsys):
    given = [a.format(tmp=tmp_path, folder=folder) for a in arguments]
    assert main(["generate", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message.format(tmp=tmp_path) in error and error.count("\n") == 1
    assert "(details: " not in error


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-38, 1e-6])
def test_generate_command_with_temperature_zero_is_greedy(folder, temperature, capsys):
    generator = TextGenerator(folder, precision="float32")
    greedy = generator.generate(PROMPT, greedy=True, max_new_tokens=8)
    assert generator.generate(PROMPT, temperature=temperature, max_new_tokens=8) == greedy
    options = ["--precision", "float32", "--temperature", str(temperature), "--max-new-tokens", "8"]
    assert main(["generate", "--model", str(folder), *options, PROMPT]) == 0
    assert capsys.readouterr().out.strip() == greedy.text.strip()


def test_stop_string_given_as_a_single_string_is_not_split_into_characters(folder):
    generate = partial(TextGenerator(folder, precision="float32").generate, PROMPT, greedy=True, max_new_tokens=12)
    whole = generate().text
    stop = whole[2:4]
    stopped = generate(stop_strings=stop)
    assert stopped.text == whole[: whole.index(stop) + 2] and stopped == generate(stop_strings=[stop])
    assert generate(stop_strings=None).text == whole


def test_unquoted_prompt_of_the_generate_command_is_reported_as_unknown_arguments(folder, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--model", str(folder), "1", "+", "1"])
    assert "unknown arguments: + 1" in capsys.readouterr().err


def test_generate_command_reads_the_prompt_from_standard_input(folder, monkeypatch, capsys):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))  # as `echo PROMPT |` writes it
    assert main(["generate", "--model", str(folder), "--greedy", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip() == TextGenerator(folder).generate(PROMPT, greedy=True, max_new_tokens=5).text
