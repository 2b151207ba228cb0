"""Where a model's configuration and weights come from: a Hugging Face folder, or a fresh random model. Works without torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_cpp.models.hf_config import (
    TINY_CONFIG,
    canonical_config,
    check_length,
    config_remarks,
    native_config,
    parameter_shapes,
    read_config,
    read_config_file,
)
from nemo_rl_cpp.models.sources import TINY_RANDOM, ModelFolderError
from nemo_rl_cpp.models.weight_files import INDEX_FILE, SINGLE_FILE, check_parameters, head_differs


@dataclass(frozen=True)
class ModelFolder:
    """What a model is before its weights are loaded.

    `config` is config.json in the one form of `models.hf_config`; `path` the folder with the weights, None where the model starts
    random; `remarks` are sentences that its user should read.
    """

    config: dict[str, Any]
    path: Path | None
    seed: int = 0
    remarks: tuple[str, ...] = ()

    def fill(self, model: Any) -> None:
        """Loads or draws the weights of a native `DecoderModel`."""
        from nemo_rl_cpp.models.weights import initialize_weights, load_weights

        if self.path is None:
            initialize_weights(model, self.seed, std=float(self.config.get("initializer_range", 0.02)))
        else:
            load_weights(model, self.path)

    def print_remarks(self) -> None:
        for remark in self.remarks:
            print(f"warning: {remark}", file=sys.stderr, flush=True)

    def check_weights(self, *, value_head: bool = False, max_length: int | None = None) -> None:
        """Raises what building and filling the model would raise, by the files' headers alone."""
        native = native_config(self.config, value_head=value_head, max_length=max_length)
        if self.path is not None:
            check_parameters(self.path, parameter_shapes(native))


def open_model_folder(
    name: str, overrides: Mapping[str, Any] | None = None, *, seed: int = 0, max_length: int | None = None,
    key: str = "policy.max_total_sequence_length", name_key: str = "policy.model_name",
) -> ModelFolder:  # fmt: skip
    """`policy.model_name`: "tiny-random" (sizes from `hf_config_overrides`), a folder, or a name that
    `models.sources.resolve_model` finds. Its remarks are printed.

    Args:
        overrides: `hf_config_overrides`, in either of transformers' spellings.
        max_length: tokens of the longest sequence, which the model must have positions for.
        key, name_key: what messages call that length and the model's name.

    Raises:
        ModelFolderError: the model is not supported, its files are damaged, or sequences are too long for it.
    """
    if name == TINY_RANDOM:
        folder = tiny_random(overrides, seed)
    else:
        from nemo_rl_cpp.models.sources import resolve_model

        folder = read_model_folder(resolve_model(name, key=name_key), overrides)
    if max_length is not None:
        check_length(folder.config, max_length, key, name)
    folder.print_remarks()
    return folder


def tiny_random(overrides: Mapping[str, Any] | None = None, seed: int = 0) -> ModelFolder:
    """The small model that starts random."""
    try:
        return ModelFolder(canonical_config(TINY_CONFIG, overrides), None, seed)
    except ModelFolderError as error:
        raise ModelFolderError(f"{TINY_RANDOM} with hf_config_overrides: {error}") from None


def read_model_folder(path: Path, overrides: Mapping[str, Any] | None = None) -> ModelFolder:
    """The model of a folder on this machine; nothing is printed.

    A head beside tied weights that is not the embedding counts, and the two are untied, as vLLM does it (transformers 5 keeps both,
    too).
    """
    config = read_config(path, overrides)
    remarks = [f"{path / 'config.json'}: {remark}" for remark in config_remarks(read_config_file(path))]
    if (path / SINGLE_FILE).is_file() and (path / INDEX_FILE).is_file():
        remarks.append(f"{path} holds {SINGLE_FILE} and {INDEX_FILE}: {SINGLE_FILE} counts, as in transformers, and the files of the index are not read")
    if config["tie_word_embeddings"] and head_differs(path):
        config["tie_word_embeddings"] = False
        remarks.append(
            f"{path / 'config.json'} says tie_word_embeddings, but the weights hold an lm_head.weight that is not the embedding: "
            "the two are kept apart (tie_word_embeddings=false)"
        )
    return ModelFolder(config, path, remarks=tuple(remarks))
