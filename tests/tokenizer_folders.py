"""Eight kinds of model folders, which differ in how the tokenizer begins a text and which tokens end a response.

Each has a tokenizer trained on a few lines, and a random Llama or Qwen2. After a few tokens, the model's greedy
response to `TEXT` reaches the EOS token that is easiest to overlook."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "Hello there, what is 12 plus 30?"
LINES = [
    TEXT,
    "The answer is 42.",
    "Hello! It is a fine day, is it not?",
    "user assistant system",
    "plus minus there here where",
] * 20

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
LLAMA2 = "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"


@dataclass
class Kind:
    """The contents of a folder. Token ids are given as the tokens' texts."""

    tokenizer: Callable[[], Tokenizer]
    settings: dict[str, Any]  # tokenizer_config.json
    end: str  # the token that ends the model's greedy response
    ends: list[str]  # all tokens that end a response
    generation: str | list[str] | None = None  # eos_token_id of generation_config.json; None: there is no such file
    config: str | list[str] | None = None  # eos_token_id of config.json
    architecture: str = "LlamaForCausalLM"
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # other files of the tokenizer


def byte_level(special: list[str], bos: str | None = None, qwen: bool = False) -> Tokenizer:
    """Return a byte-level BPE tokenizer like GPT-2's and Llama 3's, or like Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if qwen:  # transformers uses this pre-tokenizer for every Qwen2 folder
        split = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return _begins_with(tokenizer, bos)


def byte_fallback() -> Tokenizer:
    """Return a BPE tokenizer like Llama 2's, with a space symbol before the text and byte fallback."""
    letters = sorted(set("".join(LINES)) - {" "})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581", *letters]
    merges = [("\u2581", "t"), ("t", "h"), ("h", "e"), ("e", "r"), ("\u2581t", "he")]
    vocab = {token: i for i, token in enumerate([*names, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    return _begins_with(tokenizer, "<s>")


def unigram() -> Tokenizer:
    """Return a Unigram tokenizer like SentencePiece's, with BOS."""
    special = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    words = sorted(set(" ".join(LINES).split()))
    pieces = [*sorted(set("".join(LINES)) - {" "}), "\u2581", *(f"\u2581{word}" for word in words)]
    scores = [(piece, 0.0) for piece in special] + [(piece, -2.0 - i / 64) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return _begins_with(tokenizer, "<s>")


def words(bos: str | None) -> Tokenizer:
    """Return a word-level tokenizer."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<bos>", "<eos>", "<halt>"]
    tokenizer.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    return _begins_with(tokenizer, bos)


def _begins_with(tokenizer: Tokenizer, bos: str | None) -> Tokenizer:
    if bos is not None:
        special = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=special
        )
    return tokenizer


KINDS = {
    "gpt2": Kind(lambda: byte_level(["<|endoftext|>"]), {"eos_token": "<|endoftext|>"}, "<|endoftext|>", ["<|endoftext|>"], config="<|endoftext|>"),
    "qwen": Kind(
        lambda: byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], qwen=True), {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML},
        "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"], generation=["<|im_end|>", "<|endoftext|>"], config="<|im_end|>", architecture="Qwen2ForCausalLM",
    ),
    "llama3": Kind(
        lambda: byte_level(["<|begin|>", "<|end|>", "<|start|>", "<|stop|>", "<|eom|>", "<|eot|>"], bos="<|begin|>"),
        {"bos_token": "<|begin|>", "eos_token": "<|eot|>", "chat_template": LLAMA3}, "<|eom|>", ["<|end|>", "<|eom|>", "<|eot|>"],
        generation=["<|end|>", "<|eom|>", "<|eot|>"], config=["<|end|>", "<|eom|>", "<|eot|>"],
    ),
    "llama2": Kind(
        byte_fallback, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2}, "</s>", ["</s>"], generation="</s>", config="</s>",
    ),
    "unigram": Kind(
        unigram, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, "<end_of_turn>", ["</s>", "<end_of_turn>"], config=["</s>", "<end_of_turn>"],
    ),
    "added_tokens_json": Kind(
        lambda: byte_level([]), {"chat_template": CHATML}, "<|im_end|>", ["<|im_end|>"], generation="<|im_end|>", config="<|im_end|>",
        files={"added_tokens.json": {"<|im_start|>": 300, "<|im_end|>": 301, "<tool>": 302}, "special_tokens_map.json": {"eos_token": "<|im_end|>"}},
    ),
    "added_tokens_decoder": Kind(
        lambda: byte_level(["<|endoftext|>"], bos="<|endoftext|>"),
        {
            "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHATML, "additional_special_tokens": ["<|im_start|>"],
            "added_tokens_decoder": {
                "300": {"content": "<|endoftext|>", "special": True}, "301": {"content": "<|im_start|>", "special": True},
                "302": {"content": "<|im_end|>", "special": True, "rstrip": True}, "303": {"content": "<tool>", "special": False, "normalized": False},
            },
        },
        "<|im_end|>", ["<|endoftext|>", "<|im_end|>"], config=["<|endoftext|>", "<|im_end|>"],
    ),
    "other_end": Kind(
        lambda: words("<bos>"), {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}, "<halt>", ["<halt>"],
        generation="<halt>", config="<eos>",
    ),
}  # fmt: skip


def write(kind: Kind, folder: Path) -> Path:
    """Write the model folder of a kind. Return the folder."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    kind.tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **kind.settings}
    for name, content in {"tokenizer_config.json": settings, **kind.files}.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _write_model(kind, folder, tokenizer)
    return folder


def _write_model(kind: Kind, folder: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    def ids(tokens: str | list[str] | None) -> Any:
        return tokenizer.convert_tokens_to_ids(tokens)

    sizes = dict(
        vocab_size=len(tokenizer) + 5, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        (LlamaConfig if kind.architecture.startswith("Llama") else Qwen2Config)(**sizes), dtype=torch.float32
    ).eval()
    prompt, met = tokenizer(TEXT, return_tensors="pt")["input_ids"], False
    while not met:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
        met = _meet_the_end(model, prompt, ids(kind.end))
    model.save_pretrained(folder)
    file = folder / "generation_config.json"
    file.unlink()
    if kind.generation is not None:
        file.write_text(json.dumps({"eos_token_id": ids(kind.generation), "temperature": 0.7, "do_sample": True}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ids(kind.config)}))


def _meet_the_end(model: Any, prompt: torch.Tensor, end: int) -> bool:
    """Exchange two rows of the LM head, so that the greedy response stays the same until `end` becomes its fifth token
    or a later one.

    Return False if the model only repeats tokens from the fifth on."""
    free = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :].tolist()
    met = next(
        (token for i, token in enumerate(free) if i >= 4 and token not in free[:i] and end not in free[: i + 1]), None
    )
    if met is None:
        return False
    with torch.no_grad():
        head = model.lm_head.weight
        head[[met, end]] = head[[end, met]]
    return True
