"""Where prompts begin and responses end: the rule by itself. tests/parity/test_beginnings_and_ends.py compares it with transformers."""

import json
from pathlib import Path

import pytest
import torch
from nemo_rl_cpp.data.boundaries import end_token_ids, named_ends, prompt_ids, save_generation_config
from nemo_rl_cpp.data.chat_template import PASSTHROUGH
from nemo_rl_cpp.data.interfaces import TaskDataSpec
from nemo_rl_cpp.data.processors import (
    math_data_processor,
    math_hf_data_processor,
    multichoice_qa_processor,
    raw_completion_data_processor,
)
from nemo_rl_cpp.data.tokenizer import Tokenizer, get_tokenizer
from tokenizers import processors

BOS, EOS = 1, 2
WRITES_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}={% endfor %}"


def with_post_processor(tokenizer, single):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return tokenizer


@pytest.fixture
def begins(tiny):
    """The tiny tokenizer (digit d is d + 4, `=` 15) with a BOS token before every text."""
    return with_post_processor(tiny, "<bos> $A")


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("template", "text", "messages", "expected"), [
    (None, "12=", None, [BOS, 5, 6, 15]),
    (None, "", None, [BOS]),
    (None, "<bos>12", None, [BOS, 5, 6]),  # written by the user: no second one
    (PASSTHROUGH, "12", [{"role": "user", "content": "12"}], [BOS, 5, 6]),  # nothing but contents is plain text
    (PASSTHROUGH, "12", [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}], [BOS, 5, 6]),
    (WRITES_BOS, "<bos>12=", [{"role": "user", "content": "12"}], [BOS, 5, 6, 15]),
    ("{{ messages[0].content }}=", "12=", [{"role": "user", "content": "12"}], [5, 6, 15]),  # the template's business
])  # fmt: skip
def test_bos_token_is_added_to_plain_text_but_not_to_chat_template_output(begins, template, text, messages, expected):
    if messages is not None:
        assert begins.apply_chat_template(messages, chat_template=template, tokenize=False) == text
    assert prompt_ids(begins, text, messages) == expected


def test_tokenizer_that_appends_an_end_token_to_prompts_gives_a_warning(tiny):
    ends = with_post_processor(tiny, "<bos> $A <eos>")
    with pytest.warns(UserWarning, match="puts its end token '<eos>' behind every text"):
        assert prompt_ids(ends, "1") == [BOS, 5, EOS]  # as in transformers


QA = {"messages": [{"role": "user", "content": "12="}, {"role": "assistant", "content": "21"}]}


@pytest.mark.parametrize("template", [None, "default"])
def test_data_processors_begin_each_prompt_with_exactly_one_bos_token(begins, tmp_path, template):
    begins.chat_template = WRITES_BOS
    begins.save_pretrained(tmp_path)
    tokenizer = get_tokenizer({"name": str(tmp_path), "chat_template": template})
    chat = [BOS, 5, 6, 15, *([15] if template else [])]  # null: the text; default: the template adds `=`

    def ids(process, row):
        log = process(row, TaskDataSpec(), tokenizer, 100, 0)["message_log"]
        return [message["token_ids"].tolist() for message in log]

    assert ids(raw_completion_data_processor, QA) == [[BOS, 5, 6, 15]]
    assert ids(math_hf_data_processor, QA) == [chat]
    assert ids(math_data_processor, {"problem": "12=", "expected_answer": "3"}) == [chat]
    assert ids(multichoice_qa_processor, {"question": "12=", "options": {}, "answer": "3"}) == [chat]


def test_plain_text_system_prompt_gets_one_bos_token(begins, tmp_path):
    (tmp_path / "system.txt").write_text("34")
    spec = TaskDataSpec("t", None, tmp_path / "system.txt")
    datum = math_data_processor({"problem": "12", "expected_answer": "3"}, spec, begins, 100, 0)
    assert torch.cat([message["token_ids"] for message in datum["message_log"]]).tolist() == [BOS, 7, 8, 5, 6]


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, [5, 6]),
    ({"eos_token_id": 5}, {"eos_token_id": 7}, [5]),
    ({"eos_token_id": [5, 5, 6]}, {}, [5, 6]),
    ({"temperature": 0.6}, {"eos_token_id": [7, 8]}, [7, 8]),
    ({"eos_token_id": None}, {"eos_token_id": 0}, [0]),
    (None, {"eos_token_id": [7]}, [7]),
    (None, {"eos_token_id": -1}, []),
    (None, {}, []),
])  # fmt: skip
def test_end_tokens_are_read_from_generation_config_or_model_config(tmp_path, tiny, generation, config, expected):
    if generation is not None:
        write(tmp_path, generation_config=generation)
    assert named_ends(tmp_path, config) == expected
    write(tmp_path, config=config)
    tiny.save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).eos_token_ids == (expected or [EOS])


@pytest.mark.filterwarnings("ignore:the model's end tokens are")
def test_end_token_of_the_tokenizer_ends_responses_if_the_model_config_names_none(tiny):
    assert end_token_ids(None, {}, tiny) == [EOS]
    assert end_token_ids(None, {}, None) == []
    assert end_token_ids(None, {"eos_token_id": [9, EOS]}, tiny) == [9, EOS]
    assert end_token_ids(None, {"eos_token_id": 9}, tiny) == [9]


@pytest.mark.parametrize(("text", "words"), [
    *((f'{{"eos_token_id": {value}}}', " of .*eos_token_id is .*expected a token id or a list of them")
      for value in ('"</s>"', "2.0", '[2, "x"]', "true", '{"id": 2}')),
    *((text, "") for text in ("{", "[2]", "version https://git-lfs")),
])  # fmt: skip
def test_error_for_a_damaged_generation_config_or_an_invalid_eos_token_id_names_the_file(tmp_path, text, words):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"generation_config.json{words}"):
        named_ends(tmp_path, {})


@pytest.mark.parametrize(("base", "config", "saved"), [
    ({"eos_token_id": [5, 6], "temperature": 0.6}, {"eos_token_id": 5}, {"eos_token_id": [5, 6], "temperature": 0.6}),
    ({"temperature": 0.6}, {"eos_token_id": 5}, {"eos_token_id": 5, "temperature": 0.6}),
    (None, {"eos_token_id": [5, 6], "bos_token_id": 1, "pad_token_id": None, "hidden_size": 8}, {"bos_token_id": 1, "eos_token_id": [5, 6]}),
    (None, {}, {"eos_token_id": EOS}),
])  # fmt: skip
def test_saved_generation_config_contains_the_end_tokens(tmp_path, tiny, base, config, saved):
    (tmp_path / "out").mkdir()
    if base is not None:
        write(tmp_path, generation_config=base)
    save_generation_config(tmp_path, config, tiny, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == saved


@pytest.mark.slow
def test_added_tokens_decoder_takes_precedence_over_added_tokens_and_special_tokens_map_files(tiny, tmp_path):
    from transformers import AutoTokenizer

    tiny.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<end>",
                 "added_tokens_decoder": {"17": {"content": "<b>", "special": False}, "16": {"content": "<end>", "lstrip": True, "special": True}},
                 "image_token": "<image>", "extra_special_tokens": ["<more>"]}  # fmt: skip
    write(tmp_path, tokenizer_config=settings, added_tokens={"<old>": 18}, special_tokens_map={"eos_token": "<old>"})
    ours, theirs = Tokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (len(ours), ours.eos_token_id) == (len(theirs), theirs.eos_token_id) == (20, 16)
    for text in ("1 <end>2", "<b><old>", "<more>1<image>"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode("1 <end>2") == [5, 16, 6]


@pytest.mark.slow
def test_added_token_with_an_impossible_id_gives_a_warning(tiny, tmp_path):
    from transformers import AutoTokenizer

    tiny.save_pretrained(write(tmp_path, added_tokens={"<late>": 99}))
    with pytest.warns(UserWarning, match=r"'<late>' has the id 16 in tokenizer.json and 99 in"):
        ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.encode("<late>") == AutoTokenizer.from_pretrained(tmp_path).encode("<late>") == [16]


def test_saved_tokenizer_keeps_the_chat_template_of_the_model(tiny, tmp_path):
    tiny.chat_template = "own:{{ messages[0].content }}"
    tiny.save_pretrained(tmp_path / "base")
    run = get_tokenizer({"name": str(tmp_path / "base"), "chat_template": None})
    assert run.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False) == "1"
    run.save_pretrained(tmp_path / "saved")
    assert Tokenizer.from_pretrained(tmp_path / "saved").chat_template == tiny.chat_template
    run.chat_template = "given:{{ messages[0].content }}"  # by the user, for this tokenizer
    run.save_pretrained(tmp_path / "saved")
    assert Tokenizer.from_pretrained(tmp_path / "saved").chat_template == run.chat_template


def test_tokenizer_without_a_chat_template_is_saved_without_a_chat_template(tiny, tmp_path):
    tiny.chat_template = None
    tiny.save_pretrained(tmp_path / "base")
    get_tokenizer({"name": str(tmp_path / "base"), "chat_template": None}).save_pretrained(tmp_path / "saved")
    assert Tokenizer.from_pretrained(tmp_path / "saved").chat_template is None
    assert "chat_template" not in json.loads(Path(tmp_path / "saved" / "tokenizer_config.json").read_text())
