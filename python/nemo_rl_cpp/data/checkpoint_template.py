"""Choose the chat template for a conversation with a checkpoint: the model's own, even if the run used another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp import _config
from nemo_rl_cpp.argument_checks import in_a_line
from nemo_rl_cpp.data.boundaries import passes_text_through
from nemo_rl_cpp.data.tokenizer import Templates, Tokenizer, get_tokenizer

if TYPE_CHECKING:
    from nemo_rl_cpp.config.policy import TokenizerConfig


def settle_chat_template(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Give `tokenizer` a chat template: that of the model in `folder`, or if it has none and `folder` is in a
    checkpoint (`step_N/policy/weights`), the template with which the run trained. Return notes for the user, one
    sentence each. Raise ValueError if there is no template."""
    run, own = run_section(folder), tokenizer.chat_template
    where = "" if run is None else f"policy.tokenizer.chat_template of {_run_config(folder)}"
    used = _template_of_run(run, folder, own)
    if own is None:
        if not used:
            raise ValueError(f"{folder} has no chat template: give the text as it is, without --chat")
        tokenizer.use_chat_template(used)
    through = passes_text_through(tokenizer)
    remarks = []
    if own is None:
        remarks.append(f"the model has no chat template of its own: the run's is used ({where})")
    elif used is None and not through:
        remarks.append(f"the model's own chat template is used; the run trained without a template ({where} is null)")
    elif used not in (None, own):
        remarks.append(f"the model's own chat template is used; the run trained with another one ({where})")
    if run and run.get("chat_template_kwargs"):
        values = f"the values {dict(run['chat_template_kwargs'])} (chat_template_kwargs)"
        remarks.append(f"the run gave its chat template {values}, which are not used here")
    if through:
        remarks.append(f"the chat template of {folder} passes text through: the model does not see message borders")
    return remarks


def differences_from_run(folder: Path, section: TokenizerConfig) -> list[str]:
    """Return a sentence for each key in which `section`, the `tokenizer` of an evaluation, differs from
    policy.tokenizer of the run that wrote the checkpoint `folder`."""
    run = run_section(folder) or {}
    remarks = []
    for key, default in (("chat_template", "default"), ("chat_template_kwargs", None)):
        before, here = run.get(key, default) if run else getattr(section, key), getattr(section, key)
        if (before or None) != (here or None):
            now, then = ("null" if value is None else in_a_line(value) for value in (here, before))
            text = f"tokenizer.{key} is {now}, and the run of this checkpoint had policy.tokenizer.{key}={then}"
            remarks.append(f"{text}: prompts begin otherwise than in its training and validation")
    return remarks


def _run_config(folder: Path) -> Path:
    return Path(os.path.abspath(folder)).parents[1] / "config.yaml"


def run_section(folder: Path) -> dict[str, Any] | None:
    """Return `policy.tokenizer` of the run that wrote the checkpoint `folder`, or None if `folder` is no checkpoint."""
    path = Path(os.path.abspath(folder))
    if (path.parent.name, path.name) != ("policy", "weights") or not _run_config(folder).is_file():
        return None
    return (_config.load_file(os.fspath(_run_config(folder))).get("policy") or {}).get("tokenizer") or {}


def _template_of_run(run: dict[str, Any] | None, folder: Path, own: Templates) -> Templates:
    """Return the chat template with which a run trained (None: it had none); `run` is the run's section
    policy.tokenizer. If the template cannot be read, return the configured value, or raise ValueError if `own`, the
    folder's template, is None, too. Without a run, return `own`."""
    value = own if run is None else run.get("chat_template", "default")
    if run is None or value is None:
        return value
    try:
        return get_tokenizer({"name": str(folder), "chat_template": value}).chat_template
    except (FileNotFoundError, ValueError):
        if own is None:
            raise ValueError(f"{folder} has no chat template, and that of its run cannot be read: {value!r}") from None
        return value  # cannot be read, so it is not the model's template
