import json
import pickle
import random

import pytest
import torch
from nemo_rl_cpp.config.policy import TokenizerConfig
from nemo_rl_cpp.data.chat_template import PASSTHROUGH
from nemo_rl_cpp.data.texts import TokenBytes, token_bytes_table
from nemo_rl_cpp.data.tiny_tokenizer import TOKENS, tiny_tokenizer
from nemo_rl_cpp.data.tokenizer import Tokenizer, get_tokenizer
from tokenizer_folders import byte_fallback, byte_level

TEXTS = [
    "", " ", "\n", "\n\n\n", "3 + 4 = 7\n42 + 17 = ", " 42", "x = 3.14159, y=2e-5;", "Hello, world!", "don't  stop",
    "\u00e9\u00e0\u00fc \u00df", "\u65e5\u672c\u8a9e\u306e\u6587", "\U0001f642 \U0001f469\u200d\U0001f4bb",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "<|im_end|>", "a<|im_start|>b <|endoftext|>", "<|im_en",
    "def f(x):\n\treturn x ** 2  # \u00b2\r\n", "\x00\x01\x7f", "\\boxed{\\frac{1}{2}}", "a" * 300, "1234567890" * 20,
]  # fmt: skip


def random_texts(count, seed=0):
    draw = random.Random(seed)
    alphabet = "abc XYZ 0123456789 \n\t.,;:!?+-*/=(){}<|>_'\"\u00e4\u00f6\u4e2d\U0001f600\u0301"
    return ["".join(draw.choice(alphabet) for _ in range(draw.randint(0, 60))) for _ in range(count)]


CORPUS = TEXTS + random_texts(300)


def test_token_ids_and_decoded_text_equal_transformers(smollm2, hf_smollm2):
    for text in CORPUS:
        ids = smollm2(text)["input_ids"]
        assert ids == hf_smollm2(text)["input_ids"], repr(text)
        assert smollm2.encode(text, add_special_tokens=False) == hf_smollm2.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert smollm2.decode(ids, skip_special_tokens=skip) == hf_smollm2.decode(ids, skip_special_tokens=skip)
        assert smollm2.convert_ids_to_tokens(ids) == hf_smollm2.convert_ids_to_tokens(ids)


def test_special_tokens_and_vocabulary_sizes_match_transformers(smollm2, hf_smollm2):
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(smollm2, name) == getattr(hf_smollm2, name)
        assert getattr(smollm2, name + "_id") == getattr(hf_smollm2, name + "_id")
    assert (smollm2.vocab_size, len(smollm2)) == (hf_smollm2.vocab_size, len(hf_smollm2)) == (49152, 49152)
    assert smollm2.get_vocab() == hf_smollm2.get_vocab()
    assert smollm2.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [2, smollm2.unk_token_id]
    assert (smollm2.eos_token_id, smollm2.eos_token_ids, smollm2.model_max_length) == (2, [2], 8192)


def test_tokenizer_call_result_has_input_ids_as_item_and_as_attribute(smollm2):
    ours = smollm2("one text", return_tensors="pt")
    assert ours.input_ids is ours["input_ids"] and ours.input_ids.dtype == torch.int64 and ours.input_ids.shape[0] == 1
    empty = smollm2("", return_tensors="pt")["input_ids"]
    assert empty.shape == (1, 0) and empty.dtype == torch.int64
    with pytest.raises(ValueError, match="NoneType"):
        smollm2([None])
    with pytest.raises(ValueError, match="return_tensors"):
        smollm2("1", return_tensors="tf")
    with pytest.raises(AttributeError):
        ours.token_type_ids


@pytest.mark.parametrize("messages", [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <|im_end|>"},
        {"role": "user", "content": ""},
    ],
])  # fmt: skip
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chat_template_gives_the_text_and_ids_of_transformers(smollm2, hf_smollm2, messages, add_generation_prompt):
    options = {"add_generation_prompt": add_generation_prompt}
    text = smollm2.apply_chat_template(messages, tokenize=False, add_special_tokens=False, **options)
    assert text == hf_smollm2.apply_chat_template(messages, tokenize=False, **options)
    ids = hf_smollm2.apply_chat_template(messages, return_dict=False, **options)
    assert smollm2.apply_chat_template(messages, **options) == ids
    assert smollm2.apply_chat_template(messages, return_tensors="pt", **options).tolist() == [ids]
    assert smollm2.apply_chat_template(messages, return_dict=True, **options).input_ids == ids


def bytes_of(tokenizer):
    return TokenBytes(tokenizer.backend_tokenizer)


def test_bytes_of_byte_level_tokens_concatenate_to_the_utf8_text(smollm2):
    token_bytes = bytes_of(smollm2)
    for text in CORPUS:
        if any(token in text for token in smollm2.all_special_tokens):
            continue
        assert b"".join(map(token_bytes, smollm2.encode(text))) == text.encode("utf-8"), repr(text)
    table = token_bytes_table(smollm2, size=49200)
    assert len(table) == 49200 and table[49152:] == [b""] * 48
    assert table[2] == b"<|im_end|>"


def test_token_bytes_of_transformers_tokenizers_equal_those_of_this_packages_tokenizer(smollm2, hf_smollm2):
    assert token_bytes_table(hf_smollm2) == token_bytes_table(smollm2)


def assert_like_transformers(folder):
    """Compare ids and texts of a folder's tokenizer with transformers' and with those of a saved copy. Return the ids."""
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = [ours(text)["input_ids"] for text in PIECES]
    assert ids == [theirs(text)["input_ids"] for text in PIECES]
    for row in ids:
        assert ours.decode(row, True) == theirs.decode(row, True, clean_up_tokenization_spaces=False)
    ours.save_pretrained(folder / "saved")
    again = Tokenizer.from_pretrained(folder / "saved")
    assert ids == [again(text)["input_ids"] for text in PIECES]


PIECES = ["Hello there", " Hello", "the <s> x</s> y", "x<s>", "  two"]


@pytest.mark.parametrize(
    "name",
    [None, "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast"],
)
@pytest.mark.parametrize("key", ["split_special_tokens", "add_prefix_space", "legacy", "clean_up_tokenization_spaces"])
@pytest.mark.parametrize("value", [True, False])
def test_tokenizer_config_keys_that_affect_token_ids_work_as_in_transformers(name, key, value, tmp_path):
    makers = {"byte level": lambda: byte_level(["<s>", "</s>"], qwen=name == "Qwen2TokenizerFast")}
    if name not in ("GPT2Tokenizer", "Qwen2TokenizerFast"):  # those make a byte-level tokenizer of any file
        makers["byte fallback"] = byte_fallback
    for kind, make in makers.items():
        folder = tmp_path / kind
        folder.mkdir()
        make().save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "</s>", key: value}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings | ({"tokenizer_class": name} if name else {}))
        )
        assert_like_transformers(folder)


@pytest.mark.parametrize("flags", [{}, {"normalized": True}, {"lstrip": True}])
@pytest.mark.parametrize("make", [byte_fallback, lambda: byte_level(["<s>", "</s>"])], ids=["fallback", "byte level"])
def test_eos_token_keeps_its_flags_from_added_tokens_decoder(make, flags, tmp_path):
    """`add_tokens` marks a token as ordinary and normalized; a later `eos_token` names it."""
    make().save(str(tmp_path / "tokenizer.json"))
    ordinary = {"special": False, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False} | flags
    listed = {str(make().token_to_id(text)): {"content": text, **ordinary} for text in ("<s>", "</s>")}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": listed}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_like_transformers(tmp_path)


@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "GPT2Tokenizer"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt2", "llama"])
@pytest.mark.parametrize("value", [True, False])
def test_add_prefix_space_depends_on_the_model_type_as_in_transformers(kind, name, value, tmp_path):
    byte_level(["<s>", "</s>"], qwen=True).save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_prefix_space": value}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | ({"tokenizer_class": name} if name else {})))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert_like_transformers(tmp_path)


def test_tokenizer_folder_saved_by_transformers_loads_in_this_package(hf_smollm2, tmp_path):
    hf_smollm2.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.chat_template == hf_smollm2.chat_template  # newer versions keep it in chat_template.jinja
    assert ours.eos_token_ids == [2, 0] and ours.eos_token == "<|im_end|>"


def test_saving_a_tokenizer_replaces_an_older_chat_template_file(tiny, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("old")
    tiny.save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).chat_template == PASSTHROUGH


def test_named_chat_templates_and_special_tokens_stored_as_dictionaries_are_read(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    config["eos_token"] = {"content": "<eos>", "special": True}
    file.write_text(json.dumps(config))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 2
    message = [{"role": "user", "content": ""}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "D"
    assert tokenizer.apply_chat_template(message, tools=[{}], tokenize=False) == "T"
    assert tokenizer.apply_chat_template(message, chat_template="tool_use", tokenize=False) == "T"
    (tmp_path / "chat_template.jinja").write_text("E")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == {"default": "E", "rag": "R"}  # as in transformers, the files count
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


@pytest.mark.slow
def test_tokenizer_of_the_tiny_random_model_loads_in_transformers_with_the_same_16_ids(tmp_path):
    from transformers import AutoTokenizer

    tiny_tokenizer().save_pretrained(tmp_path)
    ours, theirs = Tokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(ours) == len(theirs) == len(TOKENS) == 16
    assert ours.encode("123=") == theirs.encode("123=") == [5, 6, 7, 15]
    assert (ours.pad_token_id, ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (0, 1, 2, 3)
    hostile = "1 a\n\u00e9<eos>2+"
    assert ours.encode(hostile) == theirs.encode(hostile) == [5, 3, 3, 3, 3, 2, 6, 14]
    assert {each.decode([5, 6, 2, 0], skip_special_tokens=True) for each in (ours, theirs)} == {"12"}
    assert [*map(bytes_of(ours), (4, 15, 2, 99))] == [b"0", b"=", b"<eos>", b""]


def test_pad_token_defaults_to_the_end_token(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<eos>", 2)
    tokenizer.pad_token = "<pad>"
    assert tokenizer.pad_token_id == 0


def test_setting_an_unknown_end_token_adds_the_token_to_the_vocabulary(tiny):
    tiny.eos_token = "<end>"
    assert tiny.eos_token_id == 16 and len(tiny) == 17 and tiny.vocab_size == 16
    assert tiny.decode(tiny.encode("1<end>"), skip_special_tokens=True) == "1"


def test_get_tokenizer_accepts_default_named_inline_and_file_based_chat_templates(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "own:{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "t")
    (tmp_path / "my.jinja").write_text("file:{{ messages[0].content }}{{ mark }}")
    monkeypatch.chdir(tmp_path)
    message = [{"role": "user", "content": "1"}]

    def text(**config):
        return get_tokenizer({"name": str(tmp_path / "t"), **config}).apply_chat_template(message, tokenize=False)

    assert text() == text(chat_template="default") == "own:1"
    assert text(chat_template=None) == "1"
    folder = str(tmp_path / "t")
    assert get_tokenizer(TokenizerConfig(name=folder)).chat_template.startswith("own")  # a default is not a wish
    assert get_tokenizer(TokenizerConfig(name=folder, chat_template=None)).chat_template == PASSTHROUGH
    assert text(chat_template="in line: {{ messages[0].content }}") == "in line: 1"
    assert text(chat_template="my.jinja", chat_template_kwargs={"mark": "!"}) == "file:1!"
    with pytest.raises(FileNotFoundError, match="chat_template"):
        text(chat_template="none.jinja")
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        text(chat_template_kwargs="mark")
    with pytest.raises(ValueError, match="'name'"):
        get_tokenizer({})


@pytest.mark.parametrize("section", ["policy.tokenizer", "tokenizer"])
def test_tokenizer_errors_name_the_configuration_section_of_the_tokenizer(tiny, tmp_path, section):
    tiny.chat_template = None
    tiny.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^{section}.chat_template is 'chatml'"):
        get_tokenizer({"name": str(tmp_path), "chat_template": "chatml"}, section=section)
    with pytest.raises(ValueError, match=f"^{section}.chat_template_kwargs must be"):
        get_tokenizer({"name": str(tmp_path), "chat_template_kwargs": [1]}, section=section)
    with pytest.raises(ValueError, match=f": set {section}.chat_template to null.*raw_completion_data_processor"):
        get_tokenizer({"name": str(tmp_path)}, section=section).apply_chat_template([{"role": "user", "content": "1"}])
    with pytest.raises(ValueError, match=f", and set {section}.name to that folder"):
        get_tokenizer({"name": str(tmp_path.parent)}, section=section)


def test_unpickled_tokenizer_has_equal_token_ids_and_chat_template(smollm2):
    again = pickle.loads(pickle.dumps(smollm2))
    assert again.encode("1 + 1 = ") == smollm2.encode("1 + 1 = ") and again.chat_template == smollm2.chat_template
