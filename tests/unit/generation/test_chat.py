import sys
import warnings

import pytest
from nemo_rl_cpp.cli import main
from nemo_rl_cpp.config.policy import PolicyConfig, TokenizerConfig
from nemo_rl_cpp.data.chat_template import PASSTHROUGH
from nemo_rl_cpp.data.checkpoint_template import differences_from_run
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.files.yaml_text import dump_yaml
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.models.policy.lm_policy import Policy

OWN = "{% for m in messages %}{{ m.content }}={% endfor %}"


def checkpoint(folder, own, run=None):
    """`step_1` of a run on a model whose template is `own`; `run`: its section policy.tokenizer."""
    config = PolicyConfig(
        model_name="tiny-random", precision="float32", max_total_sequence_length=64, generation={"max_new_tokens": 4}
    )
    config.fill_defaults()
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = own
    step = folder / "step_1"
    Policy(None, config, tokenizer, init_reference_model=False).save_checkpoint(step / "policy" / "weights")
    if run is not None:
        policy = {"model_name": "m", "tokenizer": {"name": "m", **run}}
        (step / "config.yaml").write_text(dump_yaml({"policy": policy}))
    return step


def _on_stderr(message, category, filename, lineno, file=None, line=None):
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def chat(folder, capsys, text="12"):
    with warnings.catch_warnings():
        warnings.showwarning = _on_stderr  # as outside pytest, which would record them
        options = ["--chat", "--greedy", "--max-new-tokens", "4", "--precision", "float32"]
        assert main(["generate", "--model", str(folder), *options, text]) == 0
    return capsys.readouterr()


def continued(folder, text):
    return TextGenerator(folder, precision="float32").generate(text, greedy=True, max_new_tokens=4).text


@pytest.mark.parametrize(("run", "said"), [
    *((run, None) for run in (None, {}, {"chat_template": "default"}, {"chat_template": OWN}, {"chat_template_kwargs": None})),
    ({"chat_template": None}, "the model's own chat template is used; the run trained without a template (policy.tokenizer"),
    ({"chat_template": "{{ messages[0].content }}+"},
     "the model's own chat template is used; the run trained with another one"),
    ({"chat_template": "gone.jinja"}, "the model's own chat template is used; the run trained with another one"),
    ({"chat_template_kwargs": {"enable_thinking": False}},
     "the run gave its chat template the values {'enable_thinking': False}"),
])  # fmt: skip
def test_chat_template_of_the_model_is_used_with_a_warning_only_if_training_used_another(tmp_path, capsys, run, said):
    folder = checkpoint(tmp_path, OWN, run)
    out = chat(folder, capsys)
    assert out.out.strip() == continued(folder, "12=")
    assert out.err.count("warning: ") == (said is not None) and (said or "") in out.err


def test_chat_template_of_the_training_run_is_used_if_the_model_has_none(tmp_path, capsys):
    folder = checkpoint(tmp_path, None, {"chat_template": OWN})
    out = chat(folder, capsys)
    assert out.out.strip() == continued(folder, "12=")
    assert "the model has no chat template of its own: the run's is used" in out.err


@pytest.mark.parametrize("run", [None, {"chat_template": None}, {"chat_template": "gone.jinja"}])
def test_missing_chat_template_is_a_one_line_error(tmp_path, capsys, run):
    assert main(["generate", "--model", str(checkpoint(tmp_path, None, run)), "--chat", "12"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "has no chat template" in error and error.count("\n") == 1


def test_chat_template_that_returns_messages_unchanged_gives_a_warning(tmp_path, capsys):
    folder = checkpoint(tmp_path, PASSTHROUGH, {"chat_template": None})
    out = chat(folder, capsys)
    assert out.out.strip() == continued(folder, "12") and out.err.count("warning: ") == 1
    assert "passes text through: the model does not see message borders" in out.err
    with pytest.warns(UserWarning, match="passes text through"):
        TextGenerator(folder).generate([{"role": "user", "content": "12"}], max_new_tokens=2)


@pytest.mark.parametrize(("run", "section", "said"), [
    (None, {"chat_template": None}, None),
    ({"chat_template": None}, {"chat_template": None}, None),
    ({}, {"chat_template": "default"}, None),
    ({"chat_template_kwargs": {}}, {"chat_template_kwargs": None}, None),
    ({"chat_template": None}, {},
     "tokenizer.chat_template is 'default', and the run of this checkpoint had policy.tokenizer.chat_template=null"),
    ({}, {"chat_template": None},
     "tokenizer.chat_template is null, and the run of this checkpoint had policy.tokenizer.chat_template='default'"),
    ({"chat_template_kwargs": {"a": 1}}, {},
     "chat_template_kwargs is null, and the run of this checkpoint had policy.tokenizer.chat_template_kwargs={'a': 1}"),
])  # fmt: skip
def test_evaluation_reports_prompt_settings_that_differ_from_the_training_run(tmp_path, run, section, said):
    folder = checkpoint(tmp_path, OWN, run) / "policy" / "weights"
    remarks = differences_from_run(folder, TokenizerConfig(name=str(folder), **section))
    assert (remarks == []) if said is None else (len(remarks) == 1 and said in remarks[0])


@pytest.mark.parametrize(("messages", "said"), [
    ([{"role": "system", "content": "Add."}, {"role": "user", "content": "12"}], "leaves out message 0 (system, 'Add.')"),
    ([{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}], "ends with a message of the assistant"),
    ([{"role": "User", "content": "12"}], "messages[0].role is 'User'"),
    ([{"role": "user", "content": [{"type": "image"}]}], "only text is supported"),
])  # fmt: skip
def test_chat_template_that_drops_the_content_of_a_chat_message_is_an_error(tmp_path, messages, said):
    folder = checkpoint(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}={% endfor %}")
    with pytest.raises(ValueError, match="^the ") as refused:
        TextGenerator(folder, precision="float32").generate(messages, max_new_tokens=2)
    assert said in str(refused.value) and "policy." not in str(refused.value) and "\n" not in str(refused.value)


def test_messages_with_content_parts_and_sharegpt_messages_give_the_prompt_of_plain_messages(tmp_path):
    generator = TextGenerator(checkpoint(tmp_path, OWN), precision="float32")
    texts = {
        generator.generate(messages, greedy=True, max_new_tokens=4).text
        for messages in (
            [{"role": "user", "content": "12"}],
            [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}],
            [{"from": "human", "value": "12"}],
        )
    }
    assert len(texts) == 1
