"""What `HfPolicy` and `HfValue` share: the model in training is a module of transformers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.boundaries import save_generation_config
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.models.hf.flat_model import FlatModel
from nemo_rl_cpp.models.hf.folder import HfFolder, open_hf_folder
from nemo_rl_cpp.models.hf.outputs import keeps_packed_samples_apart
from nemo_rl_cpp.models.hf.saving import names_in_checkpoints, save_module
from nemo_rl_cpp.models.hf.sharded_model import ShardedModel
from nemo_rl_cpp.models.hf.sharded_trainer import ShardedTrainer
from nemo_rl_cpp.models.hf.trainer import HfTrainer
from nemo_rl_cpp.models.model_folder import note_as_said, was_said
from nemo_rl_cpp.models.slices import Slices
from nemo_rl_cpp.models.trained_model import DTYPES, TrainedModel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from safetensors import PySafeSlice

    from nemo_rl_cpp.models.json_values import JsonObject
    from nemo_rl_cpp.models.policy.micro_batches import MicroBatching


class HfTrainedModel(TrainedModel):
    """`TrainedModel` on transformers: micro-batches, losses, optimizer, schedule and checkpoints are the same code; the passes
    through the model are torch's."""

    folder: HfFolder
    model: FlatModel | ShardedModel
    trainer: HfTrainer
    _packed = False
    """whether samples are laid end to end in one row"""

    def _open_folder(self, seed: int) -> HfFolder:
        return open_hf_folder(self.config, self.section, seed=seed, value_head=self.value_head)

    def _slices(self) -> Slices:
        if isinstance(self.model, ShardedModel):  # each rank has a slice: its rows of every parameter
            return Slices(Ranks(tensor=self.ranks.communicator), self.model.layouts, self.model.whole)
        layout = self.model.flat_layout
        return Slices(self.ranks, [layout], layout)

    def _load(self, folder: HfFolder, *, trainable: bool) -> FlatModel | ShardedModel:
        return self._model_of(folder.build(), trainable)

    def _load_from(self, weights_path: str | Path) -> FlatModel | ShardedModel:
        return self._model_of(self.folder.build(Path(weights_path)), True)

    def _model_of(self, module: nn.Module, trainable: bool) -> FlatModel | ShardedModel:
        self._with_router(module)
        if trainable:
            self._packed = self.config.sequence_packing.enabled and keeps_packed_samples_apart(module)
        dtype = DTYPES[self.config.precision]
        if self.ranks.size > 1:
            return ShardedModel(module, dtype, trainable, self.ranks)
        return FlatModel(module, dtype, trainable, self.device)

    def _with_router(self, module: nn.Module) -> None:
        """Says once where megatron_cfg asks for a router that is not trained, as NeMo RL's files do: here it is."""
        megatron = self.config.megatron_cfg
        frozen = megatron.enabled and megatron.freeze_moe_router
        routed = [
            name for name, _ in module.named_modules() if name.endswith(("router", "mlp.gate", "block_sparse_moe.gate"))
        ]
        if frozen and routed:
            key, what = (
                f"{self.section}.megatron_cfg.freeze_moe_router",
                f"backend hf trains every parameter, {routed[0]} too",
            )
            if not was_said(what):
                print(f"note: {note_as_said(what)} ({key} is true, and is not done)", file=sys.stderr, flush=True)

    def _trainer_of(self, model: FlatModel | ShardedModel) -> HfTrainer:
        if model is self.model and self.ranks.is_first and self.config.sequence_packing.enabled and not self._packed:
            kind = self.folder.config.model_type
            print(
                f"note: {self.section}.sequence_packing: transformers does not keep the packed samples of a {kind} apart, so that micro-batches "
                "are padded instead", file=sys.stderr, flush=True,
            )  # fmt: skip
        chunk = self.config.logprob_chunk_size if isinstance(self.config, PolicyConfig) else None
        if isinstance(model, ShardedModel):
            return ShardedTrainer(model, self._packed, self.ranks, chunk)
        return HfTrainer(model, self._packed, chunk)

    def _together(self, trainer: HfTrainer) -> AbstractContextManager[None]:
        return trainer.together()

    def first_state_dict(self) -> dict[str, Tensor]:
        """`state_dict`, which on a model that is shared out among ranks all of them call: whole tensors on the first, nothing elsewhere."""
        return self.state_dict()

    def _whole(self, own: Tensor, what: str) -> Tensor | None:
        return self.slices.gather(own, what)  # in one process this very tensor

    def _fill(self, name: str, tensor: Tensor, saved: PySafeSlice) -> None:
        own = self.slices.take(saved[:])
        if name == "masters" and isinstance(self.model, ShardedModel):
            self.model.write(own)
        else:
            tensor.copy_(own)

    def _batching(self, kind: str, micro_batch_size: int | None = None) -> MicroBatching:
        made = replace(super()._batching(kind, micro_batch_size), share_prefix=False)
        if made.max_tokens and not made.length_round and not self._packed:
            made = replace(made, length_round=1)  # rows are padded, so that padding counts
        return made

    @property
    def other_names_in_checkpoints(self) -> str | None:
        """What differs, where the weights have other names in this architecture's checkpoints than in its module: experts, above all."""
        here = {name: torch.empty(shape, device="meta") for name, shape, _ in self.model.layout}
        there = names_in_checkpoints(self.model.module, here)
        moved = sorted(there - here.keys())
        return (
            f"a {self.folder.config.model_type} has {moved[0]} and {len(moved) - 1} others in its checkpoints"
            if moved
            else None
        )

    def saved_config(self) -> JsonObject:
        """config.json of a checkpoint."""
        module = self.model.module
        made = json.loads(module.config.to_json_string(use_diff=False))
        return {**made, "architectures": [type(module).__name__]}

    def _save_weights(self, whole: dict[str, Tensor], weights_path: Path, tokenizer_path: str | Path | None) -> None:
        whole = whole if isinstance(self.model, ShardedModel) else None
        save_module(self.model.module, weights_path, whole)
        if not self.value_head:
            save_generation_config(self.folder.path, self.folder.raw, self.tokenizer, weights_path)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(weights_path))
            if tokenizer_path is not None:
                self.tokenizer.save_pretrained(str(tokenizer_path))

    def shutdown(self) -> bool:
        """The module goes with the last reference to it."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()
        return True
