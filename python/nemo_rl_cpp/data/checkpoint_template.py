"""Which chat template a conversation with a checkpoint goes through: the model's own, which the run need not have used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rl_cpp.data.boundaries import passes_text_through


def settle_chat_template(tokenizer: Any, folder: Path) -> list[str]:
    """Lets `tokenizer` use the chat template for the model in `folder`; returns what a user must know of it, a sentence each.

    The model's own template counts. Only where it has none, and `folder` is a checkpoint of a run (`step_N/policy/weights`,
    with `step_N/config.yaml`), the run's template is used. ValueError where there is neither.
    """
    remarks = []
    run = _run_section(folder)
    where = f"policy.tokenizer.chat_template of {folder.parents[1] / 'config.yaml'}" if run is not None else ""
    used = _template_of_run(run, tokenizer.chat_template)
    if tokenizer.chat_template is None:
        if not used:
            raise ValueError(f"{folder} has no chat template: give the text as it is, without --chat")
        tokenizer.use_chat_template(used)
        remarks.append(f"the model has no chat template of its own: the run's is used ({where})")
    elif used is None:
        remarks.append(
            f"the model's own chat template is used; the run trained on contents as they are ({where} is null): give the text without --chat for that"
        )
    elif used != tokenizer.chat_template:
        remarks.append(f"the model's own chat template is used; the run trained with another one ({where})")
    if run and run.get("chat_template_kwargs"):
        remarks.append(f"the run gave its chat template the values {dict(run['chat_template_kwargs'])} (chat_template_kwargs), which are not used here")
    if passes_text_through(tokenizer):
        remarks.append(f"the chat template of {folder} passes text through: the model does not see that this is a message, as without --chat")
    return remarks


def _run_section(folder: Path) -> dict[str, Any] | None:
    """`policy.tokenizer` of the run that wrote the checkpoint; None for a folder that is none."""
    from nemo_rl_cpp.utils.config import load_config

    file = folder.parents[1] / "config.yaml" if len(folder.parents) > 1 else folder
    if (folder.parent.name, folder.name) != ("policy", "weights") or not file.is_file():
        return None
    return (load_config(file).get("policy") or {}).get("tokenizer") or {}


def _template_of_run(run: dict[str, Any] | None, own: Any) -> Any:
    """The text of the template that the run used, `own` where it used the model's; None for contents as they are."""
    from nemo_rl_cpp.data.tokenizer import chat_template_of

    if run is None or "chat_template" not in run:
        return own
    value = run["chat_template"]
    return None if value is None else chat_template_of(value, own)
