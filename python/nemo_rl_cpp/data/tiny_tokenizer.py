"""A character-level tokenizer with 16 tokens, for tiny models that are trained from random weights in seconds."""

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nemo_rl_cpp.data.chat_template import PASSTHROUGH
from nemo_rl_cpp.data.tokenizer import Tokenizer

TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", "+", "=")
"""The tokens; a token's index is its id. Any other character becomes <unk>."""


def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer of digits, `+`, `=` and four special tokens. Its chat template joins the contents."""
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS[:4]])
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), TOKENS))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": 1024, "chat_template": PASSTHROUGH, **names}
    return Tokenizer(backend, config, name_or_path="tiny-random")
