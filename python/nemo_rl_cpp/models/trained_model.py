"""A model in training on the native core, policy or critic: batching, optimizer steps, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.data.boundaries import save_generation_config
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.model_folder import ModelFolder, open_model_folder
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, plan, wanted_tokens
from nemo_rl_cpp.models.policy.schedule import create_schedule
from nemo_rl_cpp.models.policy.train_step import (
    GlobalBatchResult,
    NonFiniteError,
    Scoring,
    TrainingPass,
    first_bad_gradient,
    without_removed_tokens,
)
from nemo_rl_cpp.models.weights import load_weights, named_views, save_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class TrainedModel:
    """One process, one device: what `Policy` and `Value` share.

    Args:
        section: the configuration section, "policy" or "value"; error messages name its keys.
        cluster: one device (`RayVirtualCluster` of world size 1), which says where the model lies; None: on the CPU.
        config: that section.
        tokenizer: saved beside the weights.
        weights_path: Hugging Face folder to load instead of `config.model_name` (resume).
        optimizer_path: folder written by `save_checkpoint`; optimizer state, master weights and schedule.
        total_steps: length of the run, for schedules that decay over the whole of it.
    """

    value_head = False

    def __init__(
        self, section: str, cluster: Any, config: Any, tokenizer: Any, *, weights_path: str | Path | None, optimizer_path: str | Path | None,
        total_steps: int | None, seed: int,
    ):  # fmt: skip
        if cluster is not None and cluster.world_size() != 1:
            raise ValueError(
                f"{section} trains in one process; cluster has {cluster.world_size()} devices (cluster.gpus_per_node, num_nodes)"
            )
        self.section, self.config, self.tokenizer = section, config, tokenizer
        self.device = "cpu" if cluster is None else cluster.device(config.precision)
        self.folder = open_model_folder(
            config.model_name, config.hf_config_overrides, seed=seed, value_head=self.value_head, max_length=config.max_total_sequence_length,
            length_key=f"{section}.max_total_sequence_length", key=f"{section}.model_name",
        )  # fmt: skip
        self.model = self._load(self.folder, trainable=True) if weights_path is None else self._load_from(weights_path)
        self.trainer = C.Trainer(self.model)
        self.schedule = create_schedule(config, total_steps)
        self.replay_dir: Path | None = None  # where a batch goes that makes a loss or gradient non-finite
        if optimizer_path is not None:
            self._load_optimizer(Path(optimizer_path))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _load(self, folder: ModelFolder, *, trainable: bool) -> Any:
        folder.check_weights()
        model = C.DecoderModel(folder.native(), DTYPES[self.config.precision], trainable, self.device)
        folder.fill(model)
        return model

    def _load_from(self, weights_path: str | Path) -> Any:
        model = C.DecoderModel(self.folder.native(), DTYPES[self.config.precision], True, self.device)
        load_weights(model, weights_path)
        return model

    @property
    def data_parallel_size(self) -> int:
        return 1

    @property
    def learning_rate(self) -> float:
        return self.schedule.lr

    def weight_digest(self) -> str:
        """16 hexadecimal digits over the weights that products read."""
        return f"{self.model.digest():016x}"

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by Hugging Face name, as views of the storage that training (and generation) use."""
        return named_views(self.model.layout, self.model.compute)

    # ---- forward and optimizer step ---------------------------------------------------------------------------------

    def _batching(self, kind: str, micro_batch_size: int | None = None) -> MicroBatching:
        config = self.config
        packing, dynamic = config.sequence_packing, config.dynamic_batching
        budget = next((b for b in (packing, dynamic) if b.enabled), None)
        samples = micro_batch_size or (config.train_micro_batch_size if kind == "train" else config.logprob_batch_size)
        tokens = 0 if budget is None or micro_batch_size else getattr(budget, f"{kind}_mb_tokens")
        return MicroBatching(
            max_samples=0 if tokens else samples, max_tokens=tokens, share_prefix=config.share_prompt_prefix,
            checkpoint=config.activation_checkpointing, algorithm=packing.algorithm,
            largest_first=packing.microbatch_order == "largest_first",
            length_round=dynamic.sequence_length_round if budget is dynamic else 0,
        )  # fmt: skip

    def _score(
        self, model: Any, batch: RaggedBatch, micro_batch_size: int | None, scoring: Scoring = Scoring()
    ) -> Tensor:
        """What the model's head says of each wanted token, [T]; 0 elsewhere."""
        trainer = self.trainer if model is self.model else C.Trainer(model)
        batching = self._batching("logprob", micro_batch_size)
        rows, micro_batches = plan(batch, wanted_tokens(batch), 0, batch.size, batching)
        out = torch.zeros(batch.num_tokens, dtype=trainer.out_dtype)
        for micro in micro_batches:
            trainer.forward(rows, micro, scoring.temperature, batching.share_prefix, False, False, out,
                            top_p=scoring.top_p, top_k=scoring.top_k)  # fmt: skip
        return without_removed_tokens(out)[0] if scoring.filters else out

    def _global_batch_size(self, size: int, gbs: int | None) -> int:
        gbs = gbs or self.config.train_global_batch_size
        if size % gbs:
            raise ValueError(
                f"the batch of {size} samples is not a multiple of {self.section}.train_global_batch_size={gbs}"
            )
        return gbs

    def _pass_over(
        self, batch: RaggedBatch, gbs: int, way: TrainingPass, eval_mode: bool, first: Mapping[str, Any] = MappingProxyType({}),
        after_first: Callable[[GlobalBatchResult], None] | None = None,
    ) -> Updates:  # fmt: skip
        """One optimizer step a global batch of `gbs` samples, then one of the schedule; with `eval_mode` neither. The first
        global batch is passed with the options `first`, and `after_first` sees its result before the weights change."""
        go = way.forward if eval_mode else way.forward_backward
        updates = Updates(batch.size // gbs)
        for begin in range(0, batch.size, gbs):
            if not eval_mode:
                self.trainer.zero_grad()
            try:
                result = go(batch, begin, begin + gbs, **(first if begin == 0 else {}))
            except NonFiniteError as error:
                said = error if self.section == "policy" else NonFiniteError(f"{self.section}: {error}")
                raise self._with_replay(said, batch) from None
            if begin == 0 and after_first is not None:
                after_first(result)
            lr, weight_decay = self.schedule.lr, self.schedule.weight_decay
            if not eval_mode:
                updates.norms.append(self._step(batch, (begin, begin + gbs), lr, weight_decay, way.forward_backward))
            updates.add(result, {"lr": lr, "wd": weight_decay})
        if not eval_mode:
            self.schedule.step()
        return updates

    def _step(
        self, data: RaggedBatch, rows: tuple[int, int], lr: float, weight_decay: float, run: Callable[..., Any]
    ) -> float:
        """The optimizer step on the gathered gradients of these rows; returns their norm before clipping. `run(data, begin, end)`
        makes the gradients of some rows again, to find where one is not finite."""
        settings = self.config.effective_optimizer()
        result = self.trainer.step(
            lr=lr, beta1=settings.betas[0], beta2=settings.betas[1], eps=settings.eps, weight_decay=weight_decay,
            max_grad_norm=self.config.effective_max_grad_norm() or 0.0,
        )  # fmt: skip
        if not result.finite:
            names = [
                n for n, g in named_views(self.model.layout, self.trainer.grads).items() if not torch.isfinite(g).all()
            ]
            where = first_bad_gradient(self.trainer, data, *rows, run)
            error = NonFiniteError(
                f"{self.section}: the gradient norm is {result.grad_norm}{where}; first bad parameters: {', '.join(names[:4])}; the learning "
                f"rate is {lr:g}; the weights were not updated"
            )
            raise self._with_replay(error, data)
        return result.grad_norm

    def _with_replay(self, error: NonFiniteError, data: RaggedBatch) -> NonFiniteError:
        """The error, with the batch written to `replay_dir` so that `train(torch.load(path), loss_fn)` meets it again."""
        if self.replay_dir is None:
            return error
        self.replay_dir.mkdir(parents=True, exist_ok=True)
        path = self.replay_dir / f"nonfinite_{self.section}_batch.pt"
        torch.save({k: v for k, v in data.items() if isinstance(v, Tensor)}, path)
        return NonFiniteError(f"{error}; the batch was written to {path}")

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def saved_config(self) -> dict[str, Any]:
        """config.json of a checkpoint."""
        return self.folder.config

    def save_checkpoint(
        self, weights_path: str | Path, optimizer_path: str | Path | None = None, tokenizer_path: str | Path | None = None,
        checkpointing_cfg: Any = None,
    ) -> None:  # fmt: skip
        """`weights_path` becomes a Hugging Face folder (weights, config, generation config, tokenizer); `optimizer_path` holds what a
        bit-identical resume needs besides: moments, master weights, schedule. NonFiniteError, and nothing is written, where a
        parameter is infinite or NaN."""
        if bad := self.non_finite_parameters():
            raise NonFiniteError(
                f"{self.section}: {len(bad)} parameters are not finite, first {', '.join(bad[:4])}, so nothing was saved to "
                f"{weights_path}: go back to an earlier checkpoint, with a lower learning rate"
            )
        save_weights(self.model, weights_path, self.saved_config())
        if not self.value_head:
            save_generation_config(self.folder.path, self.folder.config, self.tokenizer, Path(weights_path))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(weights_path))
            if tokenizer_path is not None:
                self.tokenizer.save_pretrained(str(tokenizer_path))
        if optimizer_path is not None:
            self._save_optimizer(Path(optimizer_path))

    def checkpoint_bytes(self, optimizer: bool) -> int:
        """Bytes of the tensors that `save_checkpoint` writes, with or without those of the optimizer."""
        moments = sum(tensor.nbytes for tensor in self._optimizer_tensors().values()) if optimizer else 0
        return self.model.compute.nbytes + moments

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters that hold an infinity or NaN, in the weights or in their masters."""
        bad: dict[str, None] = {}
        for flat in {t.data_ptr(): t for t in (self.model.compute, self.model.masters) if t is not None}.values():
            if not bool(torch.isfinite(flat.sum(dtype=torch.float64))):  # infinities and NaN survive a sum
                views = named_views(self.model.layout, flat)
                bad |= dict.fromkeys(name for name, view in views.items() if not bool(torch.isfinite(view).all()))
        return list(bad)

    def keep_bad_batches(self, folder: Path) -> None:
        """A batch that makes a loss or gradient non-finite is written into `folder` before the error is raised."""
        self.replay_dir = folder

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        tensors = {"exp_avg": self.trainer.exp_avg, "exp_avg_sq": self.trainer.exp_avg_sq}
        if self.model.masters.data_ptr() != self.model.compute.data_ptr():
            tensors["masters"] = self.model.masters
        return tensors

    def _save_optimizer(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(self._optimizer_tensors(), folder / "optimizer.safetensors")
        state = {"optimizer_steps": self.trainer.optimizer_steps, "schedule": self.schedule.state_dict()}
        (folder / "optimizer.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")

    def _load_optimizer(self, folder: Path) -> None:
        from safetensors import SafetensorError

        try:
            self._read_optimizer(folder)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{folder}: this is not the optimizer state of this model ({why}): resume from another checkpoint, or begin anew "
                "from its weights (policy.model_name)"
            ) from error

    def _read_optimizer(self, folder: Path) -> None:
        from safetensors import safe_open

        with safe_open(folder / "optimizer.safetensors", framework="pt") as saved:
            for name, tensor in self._optimizer_tensors().items():
                value = saved.get_tensor(name)
                if value.shape != tensor.shape:
                    raise ValueError(f"{name} has {value.numel()} elements, this model {tensor.numel()}")
                tensor.copy_(value)
        self.model.masters_changed()
        state = json.loads((folder / "optimizer.json").read_text())
        self.trainer.optimizer_steps = state["optimizer_steps"]
        self.schedule.load_state_dict(state["schedule"])

    # ---- the rest of the interfaces ---------------------------------------------------------------------------------

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: weights, gradients and optimizer state stay where they are."""

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: they stay there."""

    def shutdown(self) -> bool:
        self.model.release_workspace()
        return True


def in_layout_of(data: Mapping[str, Any] | RaggedBatch, batch: RaggedBatch, of_tokens: Tensor) -> Tensor:
    """A result [T] as the caller's batch has its tokens: [T] of a RaggedBatch, [B, S] of padded tensors."""
    return of_tokens if isinstance(data, RaggedBatch) else batch.padded(of_tokens)


@dataclass
class Updates:
    """What the global batches of one `train` call came to."""

    num_global_batches: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    packed_tokens: int = 0
    zero_gradient_tokens: int = 0

    def add(self, result: GlobalBatchResult, settings: dict[str, float]) -> None:
        """One global batch, and the settings of its optimizer step."""
        self.losses.append(result.loss)
        self.metrics += [metrics | settings for metrics in result.metrics]
        self.packed_tokens += result.packed_tokens
        self.zero_gradient_tokens += result.zero_gradient_tokens

    def report(self) -> dict[str, Any]:
        """What `train` returns."""
        return {
            "loss": torch.tensor(self.losses),
            "grad_norm": torch.tensor(self.norms if self.norms else [0.0]),
            "all_mb_metrics": collect_metrics(self.metrics, self.num_global_batches),
            "packed_tokens": self.packed_tokens,
        }


_UNDIVIDED = {"lr", "wd", "global_valid_seqs", "global_valid_toks", "token_mult_prob_error_sum"}


def collect_metrics(metrics: list[dict[str, float]], num_global_batches: int) -> dict[str, list[float]]:
    """name -> one value a micro-batch. Sums over a global batch are divided by the number of global batches, as NeMo RL
    does; minima, maxima, what is a property of the whole global batch, and a sum that is yet to be divided by the global
    batch's tokens (`token_mult_prob_error_sum`) are not."""
    collected: dict[str, list[float]] = {}
    for micro in metrics:
        if micro.get("num_valid_samples", 1) == 0:
            continue
        for name, value in micro.items():
            whole = "_min" in name or "_max" in name or name in _UNDIVIDED
            collected.setdefault(name, []).append(value if whole else value / num_global_batches)
    return collected
