"""The source of a model's configuration and weights: a Hugging Face folder, or random weights. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.argument_checks import nearest
from nemo_rl_cpp.errors import say_once
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import TINY_RANDOM, ModelFolderError, resolve_model
from nemo_rl_cpp.models import hf_config, weight_files
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes

if TYPE_CHECKING:
    from typing import Self

    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.config.policy import TrainedModelConfig

BLOCK_WEIGHTS = 32
"""Number of weights of a row that share one scale in a quantised matrix (csrc/kernels/weight_blocks.h)."""


@dataclass(frozen=True)
class ModelFolder:
    """The description of a model before it is built: `config` is config.json in the canonical form of
    `models.hf_config`, `path` the folder of the weights (None: drawn from `seed`), `max_length` the longest sequence
    (None: all positions), `remarks` warnings for the user, and `adapter` a saved LoRA adapter that is added to the
    weights (None: no adapter)."""

    config: dict[str, Plain]
    path: Path | None
    seed: int = 0
    value_head: bool = False
    max_length: int | None = None
    remarks: tuple[str, ...] = ()
    quantization: str | None = None
    adapter: weight_files.SavedAdapter | None = None

    raw = property(attrgetter("config"))

    def native(self) -> dict[str, Plain]:
        native = hf_config.native_config(self.config, value_head=self.value_head, max_length=self.max_length)
        return native if self.quantization is None else {**native, "quantization": self.quantization}

    def check_weights(self) -> None:
        """Raise the errors that building the model and loading its weights would raise. Only the headers of its files are
        read."""
        native = self.native()
        if self.path is not None:
            entries = (
                (name, entry) for _, name, entry in weight_files.all_entries(weight_files.weight_files(self.path))
            )
            weight_files.fill_parameters(self.path, parameter_shapes(native), entries, lambda name, entry: None)

    def check_trains(self, name: str) -> None:
        """Raise ModelFolderError if the model, given as `name`, is an adapter of a quantised base model, which can
        generate but not be trained further."""
        if self.adapter is not None:
            raise ModelFolderError(hf_config.adapter_alone(name, self.adapter.base))

    def check_device(self, device: str) -> None:
        """Raise ModelFolderError if `device` is a GPU, whose attention does not take the model's largest heads."""
        sizes = [size for size, *_ in self.native().get("layer_sizes", ())]
        if device != "cpu" and max(sizes, default=0) > 256:
            raise ModelFolderError(
                f"global_head_dim is {max(sizes)}, but attention on a GPU takes heads of up to 256: take the CPU, or policy.backend=hf"
            )

    def check_quantization(self, key: str) -> None:
        """Raise ModelFolderError if the rows of a matrix are not divisible into blocks of 32 weights, as the
        quantisation set by the configuration key `key` requires."""
        if self.quantization is None:
            return
        native = self.native()
        widths = {"hidden_size": native["hidden_size"], "intermediate_size": native["intermediate_size"],
                  "hidden_size_per_layer_input": native.get("per_layer_input", 0),
                  "num_attention_heads * head_dim": native["num_heads"] * native["head_dim"]}  # fmt: skip
        if (recurrent := native.get("recurrent")) and "gated_conv" not in recurrent:
            _, heads, _, size, _ = SUPPORTED_ARCHITECTURES[self.config["model_type"]].recurrent
            widths[f"{heads} * {size}"] = recurrent["value_heads"] * recurrent["value_dim"]
        if latent := native.get("latent"):
            widths |= {"q_lora_rank": latent["query_rank"], "kv_lora_rank": latent["rank"],
                       "num_attention_heads * v_head_dim": native["num_heads"] * latent["value_dim"]}  # fmt: skip
        experts = native.get("experts", {})
        names = ("intermediate_size", "shared_size", "latent_size")
        widths |= {f"experts' {name}": experts.get(name, 0) for name in names}
        for name, width in widths.items():
            if width % BLOCK_WEIGHTS:
                raise ModelFolderError(
                    f"{key} is {self.quantization}, whose blocks hold {BLOCK_WEIGHTS} weights of a row, but the model has "
                    f"{name} {width}, which is no multiple of it: set {key}=null"
                )

    def quantised(self, kind: str | None, key: str) -> Self:
        """Return this folder with matrices in the format `kind`, the value of `key`; None: unchanged. Raise
        ModelFolderError if the model does not fit this format, or is an adapter over a base in another one."""
        if kind is None:
            return self
        if self.adapter is not None and kind != self.quantization:
            raise ModelFolderError(
                f"{key} is {kind}, but the checkpoint is an adapter over a base in {self.quantization}"
            )
        folder = replace(self, quantization=kind)
        folder.check_quantization(key)
        return folder

    def check_slices(self, count: int, key: str) -> None:
        """Raise ModelFolderError if the model cannot be divided into `count` tensor-parallel slices, the value of the
        configuration key `key`."""
        native = self.native()
        shared = {
            "attention heads": native["num_heads"], "key/value heads (num_key_value_heads)": native["num_kv_heads"],
            "columns of the MLP (intermediate_size)": native["intermediate_size"],
        }  # fmt: skip
        for what, number in shared.items():
            if number % count:
                raise ModelFolderError(
                    f"{key} is {count}, but the model has {number} {what}, which {count} processes cannot share equally; "
                    "take a number that divides it, or 1"
                )
        if native["vocab_size"] < count:
            raise ModelFolderError(f"{key} is {count}, but the vocabulary has {native['vocab_size']} entries: take 1")
        unsliced = {
            "the model is a mixture of experts": "experts" in native,
            "the model has recurrent layers": "recurrent" in native,
            "the model has latent attention": "latent" in native,
            "layers have sizes of their own": "layer_sizes" in native,
            "tensors of the model hold several matrices together": native["fused_qkv"] or native["fused_gate_up"],
            "the model normalises all heads of the queries and keys together": native["qk_norm"] == "whole",
        }
        for what, has in unsliced.items():
            if has and count > 1:
                raise ModelFolderError(
                    f"{key} is {count}, but {what} ({self.config['model_type']}), which slices cannot; set it to 1"
                )

    def check_mixers(self, model: TrainedModelConfig, section: str, slices: int) -> None:
        """Raise ModelFolderError if `model`, the configuration section `section`, requests vLLM or Megatron's LoRA for
        a kind of layer (attention or a recurrent one) or a number of `slices` that does not support it."""
        native, kind = self.native(), self.config["model_type"]
        recurrent = native.get("recurrent")
        has_convolutions = recurrent is not None and "gated_conv" in recurrent
        if model.lora is not None and model.lora.joins:
            unlike = {
                "latent attention": "latent" in native,
                "gated short convolutions": has_convolutions,
                "gated delta nets": recurrent is not None and not recurrent.keys() & {"step_limits", "gated_conv"},
                "matrices that hold gate and up": native["fused_mlps"] or native["fused_gate_up"] > native["fused_qkv"],
                "layers of Gemma 4": "layer_sizes" in native,
                "experts, which target_modules may match": "experts" in native and bool(model.lora.target_modules),
                "tensor-parallel ranks": slices > 1,
            }
            if reasons := [reason for reason, holds in unlike.items() if holds]:
                raise ModelFolderError(
                    f"{section}.megatron_cfg.peft.enabled is true, but its adapters are not supported for {' and '.join(reasons)} ({kind}): "
                    f"use {section}.dtensor_cfg.lora_cfg"
                )
        unsent = {
            "matrices that hold gate and up": native["fused_mlps"],
            "Mamba-2": recurrent is not None and "step_limits" in recurrent,
            "gated short convolutions": has_convolutions,
            "latent attention": "latent" in native,
        }
        reasons = [reason for reason, holds in unsent.items() if holds]
        generation = getattr(model, "generation", None) if reasons or recurrent is not None else None
        if generation is None or not generation.runs_vllm:
            return
        if reasons:
            raise ModelFolderError(
                f"{section}.generation.backend is vllm, but {kind} has {reasons[0]}, whose weights are not sent to vLLM: set it to native"
            )
        vllm = generation.vllm_cfg
        if vllm.server_url is not None:
            return
        if (dtype := vllm.dtype_for(model.precision)) != "bfloat16":
            raise ModelFolderError(
                f"{section}.generation.vllm_cfg.python starts a vLLM that computes in {dtype}, but on CPUs its recurrent layers ({kind}) "
                f"compute only in bfloat16: set {section}.generation.vllm_cfg.precision to bfloat16"
            )
        if vllm.enable_prefix_caching:
            raise ModelFolderError(
                f"{section}.generation.vllm_cfg.enable_prefix_caching is true, but vLLM on CPUs caches no prefixes of the recurrent layers "
                f"of {kind}: set it to null"
            )

    def fill(self, model: C.DecoderModel) -> None:
        """Load or initialise the weights of a native `DecoderModel`, and add the adapter if there is one."""
        from nemo_rl_cpp.models.weights import add_saved_adapter, initialize_weights, load_weights

        if self.path is None:
            std, offset = float(self.config.get("initializer_range", 0.02)), self.native()["norm_offset"]
            initialize_weights(model, self.seed, std, offset)
        else:
            load_weights(model, self.path)
        if self.adapter is not None:
            add_saved_adapter(model, self.adapter)


def open_model_folder(
    name: str, overrides: Mapping[str, Plain] | None = None, *, seed: int = 0, value_head: bool = False, max_length: int | None = None,
    length_key: str = "policy.max_total_sequence_length", key: str = "policy.model_name",
) -> ModelFolder:  # fmt: skip
    """Open the model `name`: "tiny-random" (with sizes from `hf_config_overrides`), a folder, or a name for
    `hub.sources.resolve_model`. Print its remarks. `length_key` and `key` are the configuration keys of `max_length`
    and of the name. Raise ModelFolderError if it is unsupported, damaged, or too short for `max_length`."""
    if name == TINY_RANDOM:
        folder = tiny_random(overrides, seed=seed, value_head=value_head, max_length=max_length)
    else:
        path = resolve_model(name, key=key)
        folder = read_model_folder(path, overrides, value_head=value_head, max_length=max_length)
    if max_length is not None:
        hf_config.check_length(folder.config, max_length, length_key, name)
    for remark in folder.remarks:
        say_once("warning", remark)
    return folder


def tiny_random(overrides: Mapping[str, Plain] | None = None, **fields: object) -> ModelFolder:
    """Return the small model with random weights that has the name `tiny-random`. `overrides` change its config.json;
    `fields` are further fields of `ModelFolder`."""
    remarks = _override_remarks(TINY_RANDOM, hf_config.TINY_CONFIG, overrides)
    try:
        config = hf_config.canonical_config(hf_config.TINY_CONFIG, overrides)
        return ModelFolder(config, None, remarks=tuple(remarks), **fields)
    except ModelFolderError as error:
        raise ModelFolderError(f"{TINY_RANDOM} with hf_config_overrides: {error}") from None


def read_model_folder(path: Path, overrides: Mapping[str, Plain] | None = None, **fields: object) -> ModelFolder:
    """Return the description of the model in a local folder; print nothing. `fields` are further fields of
    `ModelFolder`.

    If config.json ties the weights but the LM head in the files differs from the embedding, both are used untied, as in
    vLLM (transformers 5 keeps both, too). This does not apply to a critic. If the folder is a checkpoint with only an
    adapter of a quantised base model, the weights are read from the base model that the adapter's files specify."""
    config = hf_config.read_config(path, overrides)
    if (adapter := weight_files.saved_adapter(path)) is not None:
        base = None if adapter.base == TINY_RANDOM else resolve_model(adapter.base, key="the adapter's base")
        return ModelFolder(
            config, base, **{"seed": adapter.seed} | fields, quantization=adapter.quantization, adapter=adapter
        )
    file, raw = path / "config.json", hf_config.read_config_file(path)
    remarks = [f"{file}: {remark}" for remark in hf_config.config_remarks(raw)]
    remarks += _override_remarks(str(path), raw, overrides)
    if (path / weight_files.SINGLE_FILE).is_file() and (path / weight_files.INDEX_FILE).is_file():
        remarks.append(
            f"{path} holds {weight_files.SINGLE_FILE} and {weight_files.INDEX_FILE}: {weight_files.SINGLE_FILE} counts, as in transformers, not the files of the index"
        )
    if config["tie_word_embeddings"] and not fields.get("value_head") and _has_own_head(path):
        config["tie_word_embeddings"] = False
        remarks.append(
            f"{file} says tie_word_embeddings, but the weights hold an lm_head.weight that is not the embedding: "
            "the two are kept apart (tie_word_embeddings=false)"
        )
    return ModelFolder(config, path, remarks=tuple(remarks), **fields)


def _override_remarks(name: str, raw: Mapping[str, Plain], overrides: Mapping[str, Plain] | None) -> list[str]:
    """Return a warning for each override that neither config.json, `raw`, nor the model_type's defaults have, but that
    resembles a key of config.json."""
    made = SUPPORTED_ARCHITECTURES.get(str((overrides or {}).get("model_type", raw.get("model_type"))))
    known = raw if made is None else {**made.defaults, **raw}
    near = {key: nearest(key, raw, 0.8) for key in overrides or {} if key not in known}
    return [f"{key} is not in the config.json of {name}: did you mean {its}?" for key, its in near.items() if its]


def _has_own_head(path: Path) -> bool:
    try:
        return weight_files.head_differs(path)
    except ModelFolderError:
        return False  # loading the weights raises this error; a resumed run does not load them
