"""The files beside tokenizer.json that say which tokens a tokenizer has: read with transformers' precedence, and written."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. ValueError names a file that holds something else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def token_text(token: str | Mapping[str, Any] | None) -> str | None:
    """A special token is written as a text or as a dictionary with its flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def read_settings(folder: Path, own_ids: Collection[int]) -> dict[str, Any]:
    """The keys of tokenizer_config.json, with what the older files beside it add.

    Where tokenizer_config.json has `added_tokens_decoder`, it alone counts. Else special_tokens_map.json wins over it, and
    the tokens of added_tokens.json become `added_tokens_decoder`, those excepted whose id is one of `own_ids` (the added
    tokens of tokenizer.json). A chat_template.jinja wins over the key `chat_template`.
    """
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        _take_special_tokens_map(settings, read_json(folder / "special_tokens_map.json"))
        special = {token_text(settings.get(name)) for name in NAMED_TOKENS} | set(extra_special_tokens(settings))
        added = {
            str(index): {"content": text, "normalized": text not in special, "special": text in special}
            for text, index in read_json(folder / "added_tokens.json").items()
            if index not in own_ids
        }
        if added:
            settings["added_tokens_decoder"] = added
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return settings


def write_settings(
    folder: Path, settings: Mapping[str, object], named: Mapping[str, str], additional: list[str]
) -> None:
    """Writes tokenizer_config.json (`settings`, the chat template among them) and special_tokens_map.json (the special tokens by
    role, and those without one) into an existing folder."""
    special: dict[str, str | list[str]] = dict(named)
    if additional:
        special["additional_special_tokens"] = additional
    for name, data in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    # A template file of an earlier save would win over the one just written.
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def _take_special_tokens_map(settings: dict[str, Any], special: Mapping[str, Any]) -> None:
    key = "extra_special_tokens"
    if isinstance(special.get(key), list) and isinstance(settings.get(key), list):
        special = {**special, key: [*settings[key], *(t for t in special[key] if t not in settings[key])]}
    settings.update(special)


def extra_special_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Texts of the special tokens without a role: under keys of their own (`image_token`), and under the common new or old key."""
    own = [token_text(token) for key, token in settings.items() if key.endswith("_token") and key not in NAMED_TOKENS]
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    common = [token_text(token) for token in (extra.values() if isinstance(extra, Mapping) else extra)]
    return list(dict.fromkeys(text for text in [*own, *common] if isinstance(text, str)))
