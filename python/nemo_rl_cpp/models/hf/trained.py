"""Policy and critic on transformers (`policy.backend: hf`, `value.backend: hf`), for any model that
AutoModelForCausalLM or AutoModel loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nemo_rl_cpp.config.generation import EvalGenerationConfig
from nemo_rl_cpp.config.policy import HfConfig, PolicyConfig, TrainedModelConfig
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.errors import say_once
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import TINY_RANDOM, ModelFolderError, resolve_model
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES
from nemo_rl_cpp.models.generation.distributed import EngineHost
from nemo_rl_cpp.models.generation.hf import HfGeneration
from nemo_rl_cpp.models.generation.interfaces import Responses
from nemo_rl_cpp.models.generation.native import engine_options
from nemo_rl_cpp.models.hf.flat_model import FlatModel, ShardedModel
from nemo_rl_cpp.models.hf.outputs import SCORE, ValueNet, keeps_packed_samples_apart, quietly, transformers
from nemo_rl_cpp.models.hf.trainer import HfTrainer, ShardedTrainer
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, read_config_file
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching
from nemo_rl_cpp.models.trained_model import DTYPES, TrainedModel
from nemo_rl_cpp.models.weight_files import INDEX_FILE
from nemo_rl_cpp.models.weights import Slices, remove_weights

if TYPE_CHECKING:
    from safetensors import PySafeSlice
    from transformers import PreTrainedConfig

_TINY_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_TINY_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class HfFolder:
    """The description of a model before it is built: `config`, transformers' configuration object with
    `hf_config_overrides` applied; `raw`, the same as the contents of a config.json; `path`, the folder of the weights
    (None: drawn from `seed`); `settings`, the section `hf_cfg`. `value_head`: build a critic."""

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
        """Build the module in float32, with weights from the folder `weights`, else from `path`, else random ones.

        Raises ModelFolderError for missing, unexpected or misshapen weights."""
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
        model_type, misshapen = self.config.model_type, told["mismatched_keys"]
        ask = f"is it the folder of a {model_type} {'model' if self.value_head else 'language model'} ({self.section}.model_name)?"
        for what, names in (("are missing", told["missing_keys"]), ("belong to no parameter", left)):
            if names:
                listed = ", ".join(sorted(map(str, names))[:4])
                raise ModelFolderError(f"{folder}: {len(names)} tensors {what}, first {listed}: {ask}")
        if misshapen:
            raise ModelFolderError(f"{folder}: shapes differ from config.json: {sorted(map(str, misshapen))[:4]}")
        return ValueNet.of(model, folder) if self.value_head else model


def open_hf_folder(config: TrainedModelConfig, section: str, *, seed: int = 0, value_head: bool = False) -> HfFolder:
    """Open the model `policy.model_name` or `value.model_name` for transformers, and print notes once per process.
    Raises ModelFolderError if there is no such model, transformers does not know it, or sequences are too long."""
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
    """Open the model `name` (`generation.model_name`), which only generates. Return its folder, and its module in
    `precision`. Raise ModelFolderError if it has positions for fewer than `longest` tokens (None: no check)."""
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
    """Return the config.json of a Llama with the sizes of the native tiny model, changed by `overrides`."""
    sizes = {name: TINY_CONFIG[name] for name in _TINY_SIZES} | {"model_type": "llama"} | _TINY_TOKENS | overrides
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        sizes.setdefault("head_dim", hidden // heads)
    return sizes


def config_object(raw: dict[str, Plain], path: Path | None, settings: HfConfig, key: str) -> PreTrainedConfig:
    """Return transformers' configuration object for the config.json `raw` of the model in the folder `path` (None: a
    model without files). If `settings.trust_remote_code`, use the class that the folder's own code defines. Raise
    ModelFolderError with the configuration key `key` if transformers cannot read `raw`."""
    library, kind = transformers(), raw.get("model_type")
    if kind == "mistral" and "layer_types" in raw:  # as AutoConfig reads Ministral's config.json
        kind = "ministral"
        raw = {**raw, "model_type": kind}
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
            return library.CONFIG_MAPPING[kind].from_dict(_with_floats(raw))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelFolderError(
            f"{key}: transformers cannot read the configuration of this {kind} ({_first_line(error)})"
        ) from error


def _with_floats(value: Any) -> Any:
    """Return the content of a config.json with each {"__float__": "Infinity"}, as transformers 5 writes infinity,
    replaced by the number."""
    if isinstance(value, dict):
        return float(value["__float__"]) if "__float__" in value else {k: _with_floats(v) for k, v in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def save_module(module: nn.Module, folder: Path, whole: dict[str, Tensor] | None = None) -> None:
    """Write config.json and the weights, in the module's precision, under the names of the architecture's checkpoints.
    A critic gets the format of the native critic, transformers' `...ForSequenceClassification` with one label. `whole`:
    {name in the module: whole tensor}, if the module's parameters are sharded over ranks; otherwise None."""
    score = module.score.weight if isinstance(module, ValueNet) and whole is None else (whole or {}).get(SCORE)
    folder.mkdir(parents=True, exist_ok=True)
    remove_weights(folder)
    with quietly():
        backbone = module.backbone if isinstance(module, ValueNet) else module
        tensors = None if whole is None else _named_as(backbone, whole, "backbone." if backbone is not module else "")
        backbone.save_pretrained(folder, max_shard_size="5GB", state_dict=tensors)
    if tensors is not None:
        # transformers has written float32, the dtype in which ranks hold the parameters
        _change_config(folder, dtype=str(next(iter(whole.values())).dtype).removeprefix("torch."))
    # the caller writes this file with the run's end tokens
    (folder / "generation_config.json").unlink(missing_ok=True)
    if isinstance(module, ValueNet):
        _add_score(module, folder, score)


def _named_as(module: nn.Module, whole: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return a state dict for the sharded `module`: the tensors of `whole` without `prefix`, and its buffers."""
    named = {name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return named | {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}


def _change_config(folder: Path, **changes: Plain) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _add_score(module: ValueNet, folder: Path, score: Tensor) -> None:
    """Complete the saved files of a critic's backbone: prefix the names of its tensors, add the head `score`, and name
    the class in config.json."""
    prefix = module.backbone.base_model_prefix
    files = sorted(folder.glob("model*.safetensors"))
    weight_map = {}
    for file in files:
        tensors = {f"{prefix}.{name}" if prefix else name: tensor for name, tensor in load_file(file).items()}
        if file == files[-1]:
            tensors[SCORE] = score.detach().cpu().clone()
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index = folder / INDEX_FILE
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        index.write_text(json.dumps({**content, "weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")
    known = transformers().MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    made = known[type(module.config)].__name__ if type(module.config) in known else type(module.backbone).__name__
    _change_config(folder, architectures=[made], id2label={"0": "value"}, label2id={"value": 0})


class HfTrainedModel(TrainedModel):
    """A policy or critic in training on transformers. It shares the native model's code for micro-batches, losses,
    optimizer, schedule and checkpoints; torch runs the forward and backward passes."""

    folder: HfFolder
    model: FlatModel | ShardedModel
    trainer: HfTrainer
    _packed = False
    """Whether the samples of a micro-batch are packed into one row."""

    def _open_folder(self, seed: int) -> HfFolder:
        return open_hf_folder(self.config, self.section, seed=seed, value_head=self.value_head)

    def _slices(self) -> Slices:
        if isinstance(self.model, ShardedModel):  # a rank's slice is its rows of every parameter
            return Slices(Ranks(tensor=self.ranks.communicator), self.model.layouts, self.model.whole)
        layout = self.model.flat_layout
        return Slices(self.ranks, [layout], layout)

    def _load(
        self, folder: HfFolder, *, trainable: bool, weights: str | Path | None = None
    ) -> FlatModel | ShardedModel:
        module = folder.build(None if weights is None else Path(weights))
        routers = tuple(f"{name}.weight" for name in ("router", "router.layer", "mlp.gate", "block_sparse_moe.gate"))
        for name, parameter in module.named_parameters() if self.config.freezes_routers else ():
            if name.endswith(routers):
                parameter.requires_grad_(False)
        if trainable:
            self._packed = self.config.sequence_packing.enabled and keeps_packed_samples_apart(module)
        dtype = DTYPES[self.config.precision]
        if self.ranks.size > 1:
            return ShardedModel(module, dtype, trainable, self.ranks)
        return FlatModel(module, dtype, trainable, self.device)

    def _trainer_of(self, model: FlatModel | ShardedModel) -> HfTrainer:
        if model is self.model and self.ranks.is_first and self.config.sequence_packing.enabled and not self._packed:
            kind = self.folder.config.model_type
            print(
                f"note: {self.section}.sequence_packing: transformers does not keep the packed samples of a {kind} apart, so that micro-batches "
                "are padded instead", file=sys.stderr, flush=True,
            )  # fmt: skip
        chunk = self.config.logprob_chunk_size if isinstance(self.config, PolicyConfig) else None
        trainer = ShardedTrainer if isinstance(model, ShardedModel) else HfTrainer
        return trainer(model, self._packed, chunk, self._moment_dtypes())

    def _fill(self, name: str, tensor: Tensor, saved: PySafeSlice | Tensor) -> None:
        own = self.slices.take(saved[:])
        if name == "masters" and isinstance(self.model, ShardedModel):
            self.model.write(own)
        else:
            tensor.copy_(own)

    def _batching(self, kind: str, micro_batch_size: int | None = None) -> MicroBatching:
        made = replace(super()._batching(kind, micro_batch_size), share_prefix=False)
        if made.max_tokens and not made.length_round and not self._packed:
            made = replace(made, length_round=1)  # rows are padded, and the padding counts towards the budget
        return made

    @property
    def other_names_in_checkpoints(self) -> str | None:
        """Return a text that lists weights (mostly experts) whose names in the architecture's checkpoints differ from
        those in its module; None if there are none."""
        from transformers.core_model_loading import revert_weight_conversion

        here = {spec.name: torch.empty(spec.shape, device="meta") for spec in self.model.flat_layout.specs}
        there = revert_weight_conversion(self.model.module, dict(here))
        if not (moved := sorted(there.keys() - here.keys())):
            return None
        return f"a {self.folder.config.model_type} has {moved[0]} and {len(moved) - 1} others in its checkpoints"

    def saved_config(self) -> dict[str, Plain]:
        module = self.model.module
        made = json.loads(module.config.to_json_string(use_diff=False))
        return {**made, "architectures": [type(module).__name__]}

    def _save_model(self, whole: dict[str, Tensor], weights_path: Path) -> None:
        save_module(self.model.module, weights_path, whole if isinstance(self.model, ShardedModel) else None)

    def shutdown(self) -> bool:
        """Free cached GPU memory; the module is freed with the last reference to it."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()
        return True


class HfPolicy(HfTrainedModel, Policy):
    """The policy on transformers, with the arguments of `Policy`. Generation and training agree only up to rounding, so
    each batch is scored before training on it, and the mismatch metrics report the difference."""

    def create_generation(
        self, generation_config: EvalGenerationConfig | None = None, **options: object
    ) -> HfGeneration:
        config = generation_config or self.config.generation
        options = engine_options(self.config, config, options)
        options.setdefault("memory_share", 1 / self.ranks.sharers)
        options.setdefault("end_token_ids", end_token_ids(self.folder.path, self.folder.raw, self.tokenizer))
        return HfGeneration(self.model.module, config, self.tokenizer, digest=self.weight_digest, **options)


class HfPolicyWorker(HfPolicy, EngineHost):
    """The policy in a worker process of the transformers backend, with the engines that read its weights."""

    def generate_with(self, *request: object, **options: object) -> Responses:
        """Return the responses as `EngineHost.generate_with` does. All ranks must call it: they gather weights."""
        with self.model.gathered():
            return super().generate_with(*request, **options)


class HfValue(HfTrainedModel, Value):
    """The critic on transformers, with the arguments of `Value`."""
