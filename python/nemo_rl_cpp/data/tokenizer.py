"""A tokenizer for Hugging Face tokenizer folders, like `AutoTokenizer`: it encodes, decodes, and applies chat
templates. It needs only `tokenizers` and jinja2. Functions that take this tokenizer also take one of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenizers import Tokenizer as Backend

from nemo_rl_cpp.data import tokenizer_settings
from nemo_rl_cpp.data.boundaries import named_ends
from nemo_rl_cpp.hub.sources import TOKENIZER_FILES, resolve_model

if TYPE_CHECKING:
    import torch

    from nemo_rl_cpp.config.policy import TokenizerConfig


TokenIds: TypeAlias = "list[int] | list[list[int]] | torch.Tensor"
"""Token ids: of one text, of several texts, or as a tensor [B, S] of B texts with S tokens each."""
Templates = str | dict[str, str] | None  # a chat template, name -> template, or None


class Encoding(dict[str, TokenIds]):
    """The result of a tokenizer call: `input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> TokenIds:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _as_ids(ids: int | Iterable[int] | torch.Tensor) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    return [ids] if isinstance(ids, int) else [int(i) for i in ids]


class Tokenizer(tokenizer_settings.SpecialTokens):
    """A tokenizer, which converts text to token ids and back. `from_pretrained` loads one.

    Args:
        config: the keys of tokenizer_config.json.
        eos_token_ids: the end tokens that the model in the tokenizer's folder lists, if any (see `data.boundaries`)."""

    section = "policy.tokenizer"  # the configuration section that error messages name; "" without a configuration

    def __init__(
        self, tokenizer: Backend, config: Mapping[str, Any] | None = None, *, name_or_path: str = "", eos_token_ids: Iterable[int] = ()
    ):  # fmt: skip
        super().__init__(tokenizer, config or {}, eos_token_ids)
        self.name_or_path = name_or_path
        self.init_kwargs = dict(config or {})
        given = self.init_kwargs.pop("chat_template", None)
        several = isinstance(given, list)
        self._model_template: Templates = {t["name"]: t["template"] for t in given} if several else given
        self._run_template: tuple[Templates] | None = None
        self.model_max_length = int(self.init_kwargs.get("model_max_length") or 10**30)
        # padding and truncation in a tokenizer.json are left over from a training script
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer_settings.obey_settings(tokenizer, self.init_kwargs)
        self.chat_template_kwargs: dict[str, object] = {}

    # -- folders -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *, section: str = "policy.tokenizer") -> Tokenizer:
        """Load a tokenizer from a folder or by model name. Raise ValueError, with the key of `section` to change, if
        there is no tokenizer.json."""
        key = "tokenizer.name" if section == "tokenizer" else "policy.model_name"
        folder = resolve_model(name_or_path, key=key, files=TOKENIZER_FILES)
        file = folder / "tokenizer.json"
        if not file.is_file():
            write = f"AutoTokenizer.from_pretrained({str(name_or_path)!r}).save_pretrained(folder)"
            then = f", and set {section}.name to that folder" if section else ""
            raise ValueError(f"{folder} holds no tokenizer.json: write one with transformers, {write}{then}")
        backend = Backend.from_file(str(file))
        settings = tokenizer_settings.read_settings(folder, backend.get_added_tokens_decoder().keys())
        config = tokenizer_settings.read_json(folder / "config.json")
        if "add_prefix_space" in settings and (name := tokenizer_settings.class_name(settings, config)):
            settings["tokenizer_class"] = name  # so that a saved copy has the same ids without config.json
        tokenizer = cls(backend, settings, name_or_path=str(name_or_path), eos_token_ids=named_ends(folder, config))
        tokenizer.section = section
        return tokenizer

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json (with the model's chat template) and special_tokens_map.json."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(target / "tokenizer.json"))
        named = {name: text for name, text in self._named.items() if text is not None}
        config = {**self.init_kwargs, **named}
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        template = self._model_template
        if template is not None:
            several = isinstance(template, Mapping)
            config["chat_template"] = [{"name": k, "template": v} for k, v in template.items()] if several else template
        tokenizer_settings.write_settings(target, config, named, self._additional)

    # -- chat template -------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> Templates:
        """The chat template in use, or {name: template}: the one set by `use_chat_template`, otherwise the model's."""
        return self._model_template if self._run_template is None else self._run_template[0]

    @chat_template.setter
    def chat_template(self, template: Templates) -> None:
        self._model_template, self._run_template = template, None

    def use_chat_template(self, template: Templates) -> None:
        """Use `template`, a run's chat template, instead of the model's. `save_pretrained` still writes the model's."""
        self._run_template = (template,)

    # -- vocabulary --------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary without added tokens; `len()` includes them."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, {len(self)} tokens, eos {self.eos_token!r})"

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str | None] | None:
        """Return the tokens with these ids as the vocabulary spells them, which may write a space as another
        character."""
        spelling = self.backend_tokenizer.id_to_token
        return spelling(ids) if isinstance(ids, int) else [spelling(i) for i in _as_ids(ids)]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | None | list[int | None]:
        found = map(self.backend_tokenizer.token_to_id, [tokens] if isinstance(tokens, str) else tokens)
        ids = [self.unk_token_id if i is None else i for i in found]
        return ids[0] if isinstance(tokens, str) else ids

    # -- text to ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> TokenIds:
        """Return the token ids of one text: a list, or an int64 tensor [1, S] with `return_tensors="pt"`."""
        return self(text, add_special_tokens=add_special_tokens, return_tensors=return_tensors)["input_ids"]

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> Encoding:
        """Return the ids of one or several texts as lists, or with `return_tensors="pt"` as int64 [B, S]. Raise
        ValueError if a tensor is requested for texts of different lengths, because texts are not padded."""
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors must be None or 'pt', got {return_tensors!r}")
        texts = [text] if isinstance(text, str) else list(text)
        if wrong := sorted({type(t).__name__ for t in texts if not isinstance(t, str)}):
            raise ValueError(f"a tokenizer takes a text or a list of texts, got {', '.join(wrong)}")
        rows = [e.ids for e in self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)]
        if return_tensors == "pt":
            import torch

            ids = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(rows[0]) if rows else 0)
            return Encoding(input_ids=ids, attention_mask=torch.ones_like(ids))
        masks = [[1] * len(row) for row in rows]
        one = isinstance(text, str)
        return Encoding(input_ids=rows[0] if one else rows, attention_mask=masks[0] if one else masks)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None, *, add_generation_prompt: bool = False, tokenize: bool = True,
        return_tensors: str | None = None, return_dict: bool = False, add_special_tokens: bool = False, **kwargs: object,
    ) -> Any:  # fmt: skip
        """Return a conversation as the model's prompt, with `add_generation_prompt` up to the start of an assistant
        message. With `tokenize=False` it is text; otherwise ids as a list, a tensor [1, S] with `return_tensors="pt"`,
        or an Encoding with `return_dict`. Special tokens are added only with `add_special_tokens`, because the template
        writes them. `kwargs` are variables of the template (`enable_thinking=False`). Raise ValueError if there is no
        template or it rejects the messages."""
        from nemo_rl_cpp.data.chat_template import render_chat_template  # jinja2 takes a fifth of a second to load

        text = render_chat_template(
            self._select_template(chat_template, tools), conversation, add_generation_prompt=add_generation_prompt, tools=tools,
            variables={**self.special_tokens_map, **self.chat_template_kwargs, **kwargs},
        )  # fmt: skip
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=add_special_tokens, return_tensors=return_tensors)
        return encoded if return_dict else encoded["input_ids"]

    def _select_template(self, given: str | None, tools: object) -> str:
        templates = self.chat_template
        if isinstance(templates, Mapping):
            if given in templates:
                return templates[given]
            if given is None:
                name = "tool_use" if tools is not None and "tool_use" in templates else "default"
                if name in templates:
                    return templates[name]
                raise ValueError(f"the tokenizer has the chat templates {sorted(templates)}: name one of them")
        template = given if given is not None else templates
        if template is None:
            remedy = "give a text, which needs none, instead of messages"
            if self.section:
                key = f"{self.section}.chat_template"
                remedy = (
                    f"set {key} to null (contents as they are) or a .jinja file, or use raw_completion_data_processor"
                )
            raise ValueError(f"the tokenizer {self.name_or_path or ''!r} has no chat template: {remedy}")
        return template

    # -- ids to text -------------------------------------------------------------------------------------------------

    def decode(
        self, token_ids: int | Iterable[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:  # fmt: skip
        """Return the text of a list or 1-D tensor of ids. Bytes that form no character become U+FFFD. Spaces are never
        cleaned up, whatever `clean_up_tokenization_spaces` or the folder say, as in transformers for BPE."""
        return self.backend_tokenizer.decode(_as_ids(token_ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in sequences]


def get_tokenizer(
    tokenizer_config: TokenizerConfig | Mapping[str, object], *, section: str = "policy.tokenizer"
) -> Tokenizer:
    """Return the tokenizer that the section `policy.tokenizer` describes, with its `chat_template` (by default the
    folder's, see `choose_template`) and `chat_template_kwargs`. Raise ValueError, with `section`, without a name."""
    # `nemo-rl-cpp generate` has no configuration: it starts without pydantic
    from nemo_rl_cpp.config.base import as_model
    from nemo_rl_cpp.config.policy import TokenizerConfig

    config = as_model(tokenizer_config, TokenizerConfig, section)
    if config.name is None:
        raise ValueError(f"{section} lacks the key 'name'")
    tokenizer = Tokenizer.from_pretrained(config.name, section=section)
    if "chat_template" in config.model_fields_set:
        from nemo_rl_cpp.data.chat_template import choose_template  # jinja2 takes a fifth of a second to load

        key = f"{section}.chat_template"
        tokenizer.use_chat_template(choose_template(config.chat_template, tokenizer.chat_template, key))
    if config.chat_template_kwargs:
        tokenizer.chat_template_kwargs = dict(config.chat_template_kwargs)
    return tokenizer
