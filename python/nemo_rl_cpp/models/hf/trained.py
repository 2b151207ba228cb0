"""What `HfPolicy` and `HfValue` share: the model in training is a module of transformers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nemo_rl_cpp.data.boundaries import save_generation_config
from nemo_rl_cpp.models.hf.flat_model import FlatModel
from nemo_rl_cpp.models.hf.folder import HfFolder, open_hf_folder
from nemo_rl_cpp.models.hf.outputs import keeps_packed_samples_apart
from nemo_rl_cpp.models.hf.saving import save_module
from nemo_rl_cpp.models.hf.trainer import HfTrainer
from nemo_rl_cpp.models.model_folder import note_as_said, was_said
from nemo_rl_cpp.models.slices import Slices
from nemo_rl_cpp.models.trained_model import DTYPES, TrainedModel

if TYPE_CHECKING:
    from nemo_rl_cpp.models.json_values import JsonObject
    from nemo_rl_cpp.models.policy.micro_batches import MicroBatching


class HfTrainedModel(TrainedModel):
    """`TrainedModel` on transformers: micro-batches, losses, optimizer, schedule and checkpoints are the same code; the passes
    through the model are torch's."""

    folder: HfFolder
    model: FlatModel
    trainer: HfTrainer

    def _open_folder(self, seed: int) -> HfFolder:
        if self.ranks.size > 1:
            raise ValueError(
                f"{self.section}.backend=hf trains in one process: set cluster.executor=auto, or {self.section}.backend=native"
            )
        return open_hf_folder(self.config, self.section, seed=seed, value_head=self.value_head)

    def _slices(self) -> Slices:
        layout = self.model.flat_layout
        return Slices(self.ranks, [layout], layout)

    def _load(self, folder: HfFolder, *, trainable: bool) -> FlatModel:
        return FlatModel(self._with_router(folder.build()), DTYPES[self.config.precision], trainable, self.device)

    def _load_from(self, weights_path: str | Path) -> FlatModel:
        module = self._with_router(self.folder.build(Path(weights_path)))
        return FlatModel(module, DTYPES[self.config.precision], True, self.device)

    def _with_router(self, module: nn.Module) -> nn.Module:
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
        return module

    def _trainer_of(self, model: FlatModel) -> HfTrainer:
        if model is not self.model:  # the reference is of the same architecture
            return HfTrainer(model, self.trainer.packed)
        packed = self.config.sequence_packing.enabled and keeps_packed_samples_apart(model.module)
        if self.config.sequence_packing.enabled and not packed:
            kind = self.folder.config.model_type
            print(
                f"note: {self.section}.sequence_packing: transformers does not keep the packed samples of a {kind} apart, so that micro-batches "
                "are padded instead", file=sys.stderr, flush=True,
            )  # fmt: skip
        return HfTrainer(model, packed)

    def _batching(self, kind: str, micro_batch_size: int | None = None) -> MicroBatching:
        made = replace(super()._batching(kind, micro_batch_size), share_prefix=False)
        if made.max_tokens and not made.length_round and not self.trainer.packed:
            made = replace(made, length_round=1)  # rows are padded, so that padding counts
        return made

    def saved_config(self) -> JsonObject:
        """config.json of a checkpoint."""
        module = self.model.module
        made = json.loads(module.config.to_json_string(use_diff=False))
        return {**made, "architectures": [type(module).__name__]}

    def _save_weights(self, whole: dict[str, Tensor], weights_path: Path, tokenizer_path: str | Path | None) -> None:
        save_module(self.model.module, weights_path)
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
