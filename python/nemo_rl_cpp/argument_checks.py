"""What callers give to the Python entries: models, folders and prompts, each as it must be or a ValueError of one sentence. No torch."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def in_a_line(value: Any, longest: int = 60) -> str:
    """A value as messages show it: its repr, in one line and cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - of an object of the caller's, which may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= longest else text[: longest - 3] + "..."


SMALLEST, LARGEST = 1e-38, 1e38
"""Of a temperature that is not 0: the engine holds it and its reciprocal as float32."""


def whole_number(name: str, value: Any, low: int, high: int = 2**63 - 1) -> int:
    """`value` as an int within the bounds; numpy's integers and 3.0 are whole numbers, True is none."""
    found = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
        bounds = f"of at least {low}" if high == 2**63 - 1 else f"from {low} to {high}"
        raise ValueError(f"{name} = {in_a_line(value)}: expected a whole number {bounds}")
    return found


def number(name: str, value: Any, low: float, high: float, zero_is: str = "") -> float:
    """`value` as a float within the bounds, or 0 where that has a meaning of its own; True is no number, nor is a text."""
    found = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if (
        isinstance(found, bool)
        or not isinstance(found, (int, float))
        or not (low <= found <= high or zero_is and found == 0)
    ):
        raise ValueError(
            f"{name} = {in_a_line(value)}: expected a number from {low:g} to {high:g}{f', or 0 {zero_is}' if zero_is else ''}"
        )
    return float(found)


def true_or_false(name: str, value: Any) -> bool:
    """`value`, which must be a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {in_a_line(value)}: expected True or False")
    return value


def stop_texts(value: Any) -> list[str]:
    """Stop strings; one text is a list of one, None is none."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stop_strings = {in_a_line(value)}: expected a text or a list of texts")
    fault = stop_text_fault(texts)
    if fault:
        raise ValueError(f"stop_strings {fault}")
    return [str(text) for text in texts]


def stop_text_fault(texts: Iterable[str]) -> str:
    """What is wrong with stop strings, or nothing."""
    for text in texts:
        if not text:
            return "holds an empty string, at which every response would end"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"holds {in_a_line(text)}, which has half a character (a lone surrogate)"
    return ""


def model_name(model: Any) -> str:
    """The name or folder of a model as text."""
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if not isinstance(model, str) or not model or "\0" in model:
        shown = repr(model) if isinstance(model, (str, int, float, type(None))) else f"a {type(model).__name__}"
        raise ValueError(f"model is {shown}; it must be a folder, a packaged model, or a name on the hub")
    return model


def folder_path(value: Any, name: str) -> Path:
    """The argument `name` as a path; it need not exist."""
    if (
        isinstance(value, (str, os.PathLike))
        and isinstance(os.fspath(value), str)
        and os.fspath(value)
        and "\0" not in os.fspath(value)
    ):
        return Path(value)
    raise ValueError(f"{name} is {in_a_line(value)}; it must be the path of a folder")


def check_prompt(prompt: Any, where: str, may_be_empty: bool = False) -> None:
    """ValueError unless it is a text that is not empty, or a conversation that the model can answer."""
    if isinstance(prompt, str):
        if not prompt and not may_be_empty:
            raise ValueError(f"{where} is an empty text: a prompt needs at least one character")
        _check_text(prompt, where)
        return
    if not isinstance(prompt, (list, tuple)) or not all(isinstance(message, Mapping) for message in prompt):
        raise ValueError(
            f"{where}: the prompt is {described(prompt)}; it must be a text or a list of messages with role and content"
        )
    if not prompt:
        raise ValueError(f"{where} is an empty conversation: it needs a message of the user")
    for i, message in enumerate(prompt):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"{where}: message {i} has the keys {names_of(message)}; it needs 'role', a text, and 'content'"
            )
        content = message["content"]
        if isinstance(content, str):
            _check_text(content, f"{where}: message {i}")
        elif content is not None and not isinstance(content, list):
            raise ValueError(f"{where}: the content of message {i} is {described(content)}; it must be a text")
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{where} ends with a message of the assistant: leave out the answer, which the model is to write"
        )


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds half a character at position {error.start} (a lone surrogate): decode its source as UTF-8"
        ) from None


def is_iterable(value: Any) -> bool:
    """Whether `value` has items; a scalar of numpy or torch has none, though its class could."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def is_conversation(items: Any) -> bool:
    """Whether it is a list of messages."""
    return (
        isinstance(items, (list, tuple))
        and len(items) > 0
        and all(isinstance(item, Mapping) and "role" in item and "prompt" not in item for item in items)
    )


def names_of(keys: Iterable[Any]) -> list[str]:
    """Keys for a message."""
    return sorted(
        key if isinstance(key, str) and key.isprintable() and len(key) <= 60 else in_a_line(key) for key in keys
    )[:20]


def described(value: Any) -> str:
    """The value's type, and itself where it is short: "the number 3", "a function"."""
    kind = type(value).__name__
    if isinstance(value, (bool, int, float, str)):
        return f"{in_a_line(value)}"
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def texts_or_conversations(prompts: Any) -> Sequence[Any]:
    """One or several prompts to answer; a text or a conversation is one. ValueError for all else."""
    if isinstance(prompts, str) or is_conversation(prompts):
        several: list[Any] = [prompts]
    elif isinstance(prompts, (bytes, Mapping)) or not is_iterable(prompts):
        raise ValueError(f"prompts is {described(prompts)}; give a text, a conversation, or a list of these")
    else:
        several = list(prompts)
    for i, prompt in enumerate(several):
        check_prompt(prompt, f"prompt {i}")
    return several
