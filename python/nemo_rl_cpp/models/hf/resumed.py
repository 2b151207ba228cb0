"""Whether a checkpoint is of the model that a configuration describes, as transformers understands both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.models.hf.folder import config_object, open_hf_folder
from nemo_rl_cpp.models.hf_config import read_config_file

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from nemo_rl_cpp.config.policy import TrainedModelConfig
    from nemo_rl_cpp.models.json_values import Json

_NOT_OF_THE_MODEL = {
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "id2label", "label2id",
    "num_labels", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
"""What a save writes by itself, and what says how a model is used rather than what it computes."""


def hf_refusals(weights: Path, model: TrainedModelConfig, section: str) -> Iterator[tuple[str, str]]:
    """(key, why) for each number of the architecture that is another one in the configuration than in the checkpoint: transformers reads
    both, so that it fills what they leave out, and names that older files have (`rope_theta`, `rope_scaling`) become its own."""
    try:
        now = open_hf_folder(model, section).config
        before = config_object(read_config_file(weights), weights, model.hf_cfg, f"{section}.model_name")
    except (OSError, ValueError):
        return  # what cannot be read at all is said elsewhere
    old, new = _numbers(before), _numbers(now)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            outer = name.partition(".")[0]
            overridden = any(outer == key or outer in _NAMES.get(key, ()) for key in model.hf_config_overrides or {})
            key = f"{section}.hf_config_overrides" if overridden else f"{section}.model_name"
            yield key, f"{name} {json.dumps(old.get(name))} -> {json.dumps(new.get(name))} is another architecture"


_NAMES = {
    "rope_theta": ("rope_parameters",),
    "rope_scaling": ("rope_parameters",),
    "partial_rotary_factor": ("rope_parameters",),
}
"""What these keys become."""


def _numbers(config: PreTrainedConfig) -> dict[str, Json]:
    """By dotted names, without those that say nothing of what is computed."""
    return dict(_flat(json.loads(config.to_json_string(use_diff=False)), ""))


def _flat(tree: dict[str, Json], prefix: str) -> Iterator[tuple[str, Json]]:
    for name, value in tree.items():
        if name in _NOT_OF_THE_MODEL:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
