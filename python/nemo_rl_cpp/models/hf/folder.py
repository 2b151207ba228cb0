"""The source of a transformers model: a Hugging Face folder, or random weights (`tiny-random`, with any
`model_type`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from nemo_rl_cpp.config.policy import HfConfig, TrainedModelConfig
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import TINY_RANDOM, ModelFolderError, resolve_model
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES
from nemo_rl_cpp.models.hf.flat_model import FlatModel
from nemo_rl_cpp.models.hf.library import quietly, transformers
from nemo_rl_cpp.models.hf.outputs import ValueNet
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, read_config_file
from nemo_rl_cpp.models.model_folder import say_once

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_TINY_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_TINY_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class HfFolder:
    """The description of a model before it is built.

    Attributes:
        config: transformers' configuration object, with `hf_config_overrides` applied.
        raw: the same contents as a config.json.
        path: the folder with the weights; None: random weights, drawn from `seed`.
        settings: the section `hf_cfg`.
        value_head: build a critic: the layers without the LM head, plus a scalar head.
        section: name of the configuration section, "policy" or "value", for error messages.
    """

    config: PreTrainedConfig
    raw: dict[str, Plain]
    path: Path | None
    settings: HfConfig
    seed: int = 0
    value_head: bool = False
    section: str = "policy"

    @property
    def positions(self) -> int | None:
        """Return the longest sequence that the model has positions for, in tokens; None without such a limit."""
        return next((value for n in _LENGTHS if isinstance(value := getattr(self.config, n, None), int)), None)

    def build(self, weights: Path | None = None) -> nn.Module:
        """Build the module in float32. Its weights come from the folder `weights`, else from `path`; else they are
        random.

        Raises ModelFolderError for missing, unexpected or misshapen weights, which transformers would initialise at
        random."""
        folder = weights or self.path
        with quietly():
            module = self._random() if folder is None else self._from(folder)
        return module.eval()  # no dropout, so that training scores what was sampled

    def _options(self) -> dict[str, object]:
        own_code, attention = self.settings.trust_remote_code or None, self.settings.attn_implementation
        options = {"dtype": torch.float32, "attn_implementation": attention, "trust_remote_code": own_code}
        return {name: value for name, value in options.items() if value is not None}

    def _auto(self) -> type:
        library = transformers()
        return library.AutoModel if self.value_head else library.AutoModelForCausalLM

    def _random(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self._auto().from_config(self.config, **self._options())
            if self.value_head:
                return ValueNet.of(model, None)
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            if head is not None and head.weight is not embedding.weight:
                # nearly uniform at first, like native models, because training from scratch must explore
                head.weight.data.mul_(0.1)
        return model

    def _from(self, folder: Path) -> nn.Module:
        try:
            model, told = self._auto().from_pretrained(
                folder, config=self.config, output_loading_info=True, local_files_only=True, use_safetensors=True, **self._options()
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelFolderError(f"{folder}: transformers cannot load this model ({_first_line(error)})") from error
        head = ("score.weight", "lm_head.weight", "lm_head.bias", "embed_out.weight")
        left = [name for name in told["unexpected_keys"] if not (self.value_head and str(name).endswith(head))]
        for what, names in (("are missing", told["missing_keys"]), ("belong to no parameter", left)):
            if names:
                listed = ", ".join(sorted(map(str, names))[:4])
                raise ModelFolderError(
                    f"{folder}: {len(names)} tensors {what}, first {listed}: is it the folder of a {self.config.model_type} "
                    f"{'model' if self.value_head else 'language model'} ({self.section}.model_name)?"
                )
        if told["mismatched_keys"]:
            raise ModelFolderError(
                f"{folder}: tensors of another shape than config.json says: {sorted(map(str, told['mismatched_keys']))[:4]}"
            )
        return ValueNet.of(model, folder) if self.value_head else model


def open_hf_folder(config: TrainedModelConfig, section: str, *, seed: int = 0, value_head: bool = False) -> HfFolder:
    """Open the model `policy.model_name` or `value.model_name` for transformers. Print notes on the model to stderr,
    each once per process.

    Raises ModelFolderError if there is no such model, transformers does not know its architecture, or sequences are too
    long for it.
    """
    name, overrides = config.model_name, dict(config.hf_config_overrides or {})
    key = f"{section}.model_name"
    path = None if name == TINY_RANDOM else resolve_model(name, key=key)
    raw = _tiny(overrides) if path is None else {**read_config_file(path), **overrides}
    settings = config.hf_cfg
    made = config_object(raw, path, settings, key)
    folder = HfFolder(made, raw, path, settings, seed, value_head, section)
    limit, length = folder.positions, config.max_total_sequence_length
    if limit is not None and length is not None and length > limit:
        raise ModelFolderError(
            f"{section}.max_total_sequence_length is {length}, but {name} has positions for {limit} tokens: lower it, or set "
            f"{section}.hf_config_overrides.max_position_embeddings if the model can do more"
        )
    for remark in _remarks(raw, key, name):
        say_once("note", remark)
    return folder


def open_frozen(name: str, precision: str, *, device: str, longest: int | None = None) -> tuple[HfFolder, nn.Module]:
    """Open the model `generation.model_name`, which only generates. Return its folder, and its module in `precision`.

    Raises ModelFolderError as `open_hf_folder` does; sequences have up to `longest` tokens
    (`generation.vllm_cfg.max_model_len`).
    """
    key, settings = "generation.model_name", HfConfig()
    path = resolve_model(name, key=key)
    raw = read_config_file(path)
    folder = HfFolder(config_object(raw, path, settings, key), raw, path, settings, section="generation")
    if longest is not None and folder.positions is not None and longest > folder.positions:
        raise ModelFolderError(
            f"generation.vllm_cfg.max_model_len is {longest}, but {name} has positions for {folder.positions} tokens: lower it"
        )
    # buffers, such as RoPE frequencies, stay float32
    return folder, FlatModel(folder.build(), getattr(torch, precision), False, device).module


def _remarks(raw: Mapping[str, Plain], key: str, name: str) -> Iterator[str]:
    kind = raw.get("model_type")
    if kind in SUPPORTED_ARCHITECTURES:
        yield (
            f"{key} is {name}, a {kind}: backend native has it too; it is faster, and its generation equals its training to the bit"
        )
    dropout = [k for k, v in raw.items() if ("dropout" in k or k.endswith("pdrop")) and isinstance(v, float) and v > 0]
    if dropout:
        yield f"{key} is {name}, whose config.json has {', '.join(dropout)} above 0: training computes without dropout"


def _tiny(overrides: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the config.json of a tiny model of any model_type, with the sizes of the native tiny model."""
    sizes = {name: TINY_CONFIG[name] for name in _TINY_SIZES} | {"model_type": "llama"} | _TINY_TOKENS | overrides
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        sizes.setdefault("head_dim", hidden // heads)
    return sizes


def config_object(raw: dict[str, Plain], path: Path | None, settings: HfConfig, key: str) -> PreTrainedConfig:
    """Return transformers' configuration object for the config.json `raw`. Raise ModelFolderError with the
    configuration key `key` if transformers cannot read it."""
    library, kind = transformers(), raw.get("model_type")
    runs_code = settings.trust_remote_code and path is not None and bool(raw.get("auto_map"))
    if not runs_code and kind not in library.CONFIG_MAPPING:
        hint = "; its folder names code of its own (auto_map), which a training runs with hf_cfg.trust_remote_code=true"
        hint = hint if raw.get("auto_map") else ""
        raise ModelFolderError(f"{key}: transformers {library.__version__} knows no model_type {kind!r}{hint}")
    saved = read_config_file(path) if runs_code else {}
    try:
        with quietly():
            if runs_code:
                changed = {k: v for k, v in raw.items() if k not in saved or saved[k] != v}
                return library.AutoConfig.from_pretrained(path, trust_remote_code=True, **changed)
            if path is None:
                return library.AutoConfig.for_model(**raw)
            return library.CONFIG_MAPPING[kind].from_dict(dict(raw))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelFolderError(
            f"{key}: transformers cannot read the configuration of this {kind} ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
