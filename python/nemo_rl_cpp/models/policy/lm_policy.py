"""The policy on the native core: one process, one device; the engine reads these very weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.model_folder import ModelFolder, open_model_folder
from nemo_rl_cpp.models.policy.interfaces import ColocatablePolicyInterface
from nemo_rl_cpp.models.policy.schedule import create_schedule
from nemo_rl_cpp.models.policy.single_process import SingleProcessPolicy
from nemo_rl_cpp.models.policy.train_step import (
    Exactness,
    MicroBatching,
    NonFiniteError,
    Scoring,
    plan,
    run_global_batch,
    wanted_tokens,
    without_removed_tokens,
)
from nemo_rl_cpp.models.weights import load_weights, named_views, save_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Policy(ColocatablePolicyInterface, SingleProcessPolicy):
    """A language model in training: log-probabilities, optimizer steps, checkpoints (NeMo RL's `Policy`).

    Args:
        cluster: one device (`RayVirtualCluster` of world size 1) or None.
        config: the `policy` section.
        tokenizer: saved beside the weights.
        weights_path: Hugging Face folder to load instead of `config.model_name` (resume).
        optimizer_path: folder written by `save_checkpoint`; optimizer state, master weights and schedule.
        init_reference_model: keep a frozen copy of `config.model_name` for `get_reference_policy_logprobs`.
        total_steps: length of the run, for schedules that decay over the whole of it.
    """

    def __init__(
        self, cluster: Any, config: Any, tokenizer: Any, name_prefix: str = "lm_policy", workers_per_node: Any = None,
        init_optimizer: bool = True, weights_path: str | Path | None = None, optimizer_path: str | Path | None = None,
        init_reference_model: bool = True, processor: Any = None, worker_extension_cls_fqn: str | None = None,
        skip_weight_load: bool = False, *, total_steps: int | None = None, seed: int = 0,
    ):
        if processor is not None or worker_extension_cls_fqn is not None or skip_weight_load:
            raise ValueError(
                "Policy: processor (multimodal models), worker_extension_cls_fqn (workers in other processes) and skip_weight_load "
                "(weights from another process) are not supported; leave them at their defaults"
            )
        if cluster is not None and cluster.world_size() != 1:
            raise ValueError(f"policy.backend=native trains in one process; cluster has {cluster.world_size()} devices (cluster.gpus_per_node, num_nodes)")
        self.config, self.tokenizer, self.name = config, tokenizer, name_prefix
        self.scoring = Scoring.of(config.generation)
        self.folder = open_model_folder(config.model_name, config.hf_config_overrides, seed=seed)
        self.model = self._load(self.folder, trainable=True) if weights_path is None else self._load_from(weights_path)
        self.reference = self._load(self.folder, trainable=False) if init_reference_model else None
        self.trainer = C.Trainer(self.model)
        self.schedule = create_schedule(config, total_steps)
        self.replay_dir: Path | None = None
        if init_optimizer and optimizer_path is not None:
            self._load_optimizer(Path(optimizer_path))
        self._exact = config.reuse_generation_logprobs != "never"

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def _load(self, folder: ModelFolder, *, trainable: bool) -> Any:
        model = C.DecoderModel(native_config(folder.config), DTYPES[self.config.precision], trainable)
        folder.fill(model)
        return model

    def _load_from(self, weights_path: str | Path) -> Any:
        model = C.DecoderModel(native_config(self.folder.config), DTYPES[self.config.precision], True)
        load_weights(model, weights_path)
        return model

    @property
    def data_parallel_size(self) -> int:
        return 1

    @property
    def skips_prev_logprobs(self) -> bool:
        """Whether training takes generation's log-probabilities as the old policy's (reuse_generation_logprobs)."""
        return self._exact

    @property
    def learning_rate(self) -> float:
        return self.schedule.lr

    # ---- log-probabilities ------------------------------------------------------------------------------------------

    def _batching(self, kind: str, micro_batch_size: int | None = None) -> MicroBatching:
        config = self.config
        budget = next((b for b in (config.sequence_packing, config.dynamic_batching) if b.enabled), None)
        samples = micro_batch_size or (config.train_micro_batch_size if kind == "train" else config.logprob_batch_size)
        tokens = 0 if budget is None or micro_batch_size else getattr(budget, f"{kind}_mb_tokens")
        return MicroBatching(
            max_samples=0 if tokens else samples, max_tokens=tokens, share_prefix=config.share_prompt_prefix,
            checkpoint=config.activation_checkpointing,
        )

    def _logprobs(self, model: Any, data: Mapping[str, Any], micro_batch_size: int | None, scoring: Scoring) -> Tensor:
        trainer = self.trainer if model is self.model else C.Trainer(model)
        wanted = wanted_tokens(data)
        batching = self._batching("logprob", micro_batch_size)
        batch, micro_batches = plan(data, wanted, 0, len(wanted), batching)
        out = torch.zeros(data["input_ids"].shape, dtype=trainer.logprob_dtype)
        for rows in micro_batches:
            trainer.forward(batch, rows, scoring.temperature, batching.share_prefix, False, False, out, top_p=scoring.top_p, top_k=scoring.top_k)
        return without_removed_tokens(out)[0] if scoring.filters else out

    def get_logprobs(self, data: Mapping[str, Any], timer: Any = None, micro_batch_size: int | None = None) -> BatchedDataDict:
        """{"logprobs": [B, S]}: column t is log pi(token t | tokens before it); 0 where `token_mask` or `sample_mask` is 0,
        at column 0, on padding, and for a token that top-k or top-p removes. Under generation's temperature, top_p and
        top_k, as generation reports them."""
        return BatchedDataDict(logprobs=self._logprobs(self.model, data, micro_batch_size, self.scoring))

    def get_reference_policy_logprobs(self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Any = None) -> BatchedDataDict:
        """{"reference_logprobs": [B, S]} under the frozen initial weights and generation's temperature, but without top-k
        and top-p; else as `get_logprobs`."""
        if self.reference is None:
            raise ValueError("the policy was built without a reference model (init_reference_model=False)")
        return BatchedDataDict(reference_logprobs=self._logprobs(self.reference, data, micro_batch_size, self.scoring.unfiltered()))

    # ---- training ---------------------------------------------------------------------------------------------------

    def train(
        self, data: Mapping[str, Any], loss_fn: Any, eval_mode: bool = False, gbs: int | None = None, mbs: int | None = None,
        timer: Any = None, check_dim_skip_keys: Any = None,
    ) -> dict[str, Any]:
        """One optimizer step a global batch of `gbs` rows, then one step of the learning-rate schedule.

        Without `prev_logprobs` in the data the rollout's weights must be the current ones: the first update takes its own
        forward as the old policy's log-probabilities, later updates generation's (the same bits; where they are not, they
        are counted, and the later rows are scored before the first update).

        Returns:
            {"loss": [global batches], "grad_norm": [global batches], "all_mb_metrics": name -> one value a micro-batch}.
            Metrics but minima and maxima are divided by the number of global batches, as NeMo RL does.
        """
        size = len(data["input_ids"])
        gbs = gbs or self.config.train_global_batch_size
        if size % gbs:
            raise ValueError(f"the batch of {size} samples is not a multiple of policy.train_global_batch_size={gbs}")
        data = dict(data)
        batching = self._batching("train", mbs)
        on_policy = "prev_logprobs" not in data
        exactness = Exactness() if on_policy and "generation_logprobs" in data else None
        losses, norms, metrics, packed = [], [], [], 0
        for begin in range(0, size, gbs):
            first = begin == 0
            if not eval_mode:
                self.trainer.zero_grad()
            try:
                result = run_global_batch(
                    self.trainer, data, loss_fn, begin, begin + gbs, batching, self.scoring,
                    train=not eval_mode, on_policy=on_policy and first, exactness=exactness if first else None,
                )
            except NonFiniteError as error:
                raise self._with_replay(error, data) from None
            if on_policy and first and begin + gbs < size:
                data["prev_logprobs"] = self._old_logprobs(data, exactness)
            lr, weight_decay = self.schedule.lr, self.schedule.weight_decay
            if not eval_mode:
                norms.append(self._step(data, lr, weight_decay))
            losses.append(result.loss)
            metrics += [{**m, "lr": lr, "wd": weight_decay} for m in result.metrics]
            packed += result.packed_tokens
        if not eval_mode:
            self.schedule.step()
        return {
            "loss": torch.tensor(losses),
            "grad_norm": torch.tensor(norms if norms else [0.0]),
            "all_mb_metrics": _collect(metrics, size // gbs),
            "exactness": exactness,
            "packed_tokens": packed,
        }

    def _old_logprobs(self, data: Mapping[str, Any], exactness: Exactness | None) -> Tensor:
        """For updates after the first: generation's own when they were the same bits, else a scoring pass now."""
        if exactness is not None and exactness.mismatched_tokens == 0:
            return data["generation_logprobs"].to(self.trainer.logprob_dtype)
        return self._logprobs(self.model, data, None, self.scoring)

    def _step(self, data: Mapping[str, Any], lr: float, weight_decay: float) -> float:
        settings = self.config.effective_optimizer()
        result = self.trainer.step(
            lr=lr, beta1=settings.betas[0], beta2=settings.betas[1], eps=settings.eps, weight_decay=weight_decay,
            max_grad_norm=self.config.effective_max_grad_norm() or 0.0,
        )
        if not result.finite:
            names = [n for n, g in named_views(self.model.layout, self.trainer.grads).items() if not torch.isfinite(g).all()]
            error = NonFiniteError(f"the gradient norm is {result.grad_norm}; first bad parameters: {', '.join(names[:4])}; the weights were not updated")
            raise self._with_replay(error, data)
        return result.grad_norm

    def _with_replay(self, error: NonFiniteError, data: Mapping[str, Any]) -> NonFiniteError:
        if self.replay_dir is None:
            return error
        self.replay_dir.mkdir(parents=True, exist_ok=True)
        path = self.replay_dir / "nonfinite_batch.pt"
        torch.save({k: v for k, v in data.items() if isinstance(v, Tensor)}, path)
        return NonFiniteError(f"{error}; the batch was written to {path}")

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, weights_path: str | Path, optimizer_path: str | Path | None = None, tokenizer_path: str | Path | None = None,
        checkpointing_cfg: Any = None,
    ) -> None:
        """`weights_path` becomes a Hugging Face folder (weights, config, tokenizer); `optimizer_path` holds what a
        bit-identical resume needs besides: moments, master weights, schedule."""
        save_weights(self.model, weights_path, self.folder.config)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(weights_path))
            if tokenizer_path is not None:
                self.tokenizer.save_pretrained(str(tokenizer_path))
        if optimizer_path is not None:
            self._save_optimizer(Path(optimizer_path))

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
        from safetensors import safe_open

        with safe_open(folder / "optimizer.safetensors", framework="pt") as saved:
            for name, tensor in self._optimizer_tensors().items():
                value = saved.get_tensor(name)
                if value.shape != tensor.shape:
                    raise ValueError(f"{folder}: {name} has {value.numel()} elements, this model {tensor.numel()}: not this model's checkpoint")
                tensor.copy_(value)
        self.model.masters_changed()
        state = json.loads((folder / "optimizer.json").read_text())
        self.trainer.optimizer_steps = state["optimizer_steps"]
        self.schedule.load_state_dict(state["schedule"])

    # ---- generation and the rest of the interface ---------------------------------------------------------------------

    def create_generation(self, generation_config: Any = None, **options: Any) -> Any:
        """An engine on these weights: no copy, no refit."""
        from nemo_rl_cpp.models.generation.native import NativeGeneration

        options.setdefault("max_model_len", self.config.generation.effective_max_model_len(self.config.max_total_sequence_length))
        runner = C.NativeModelRunner(self.model)
        return NativeGeneration(runner, generation_config or self.config.generation, self.tokenizer, digest=self.weight_digest, **options)

    def weight_digest(self) -> str:
        """16 hexadecimal digits over the weights that products read."""
        return f"{self.model.digest():016x}"

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by Hugging Face name, as views of the storage that training and generation use."""
        return named_views(self.model.layout, self.model.compute)

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do on the CPU: weights, gradients and optimizer state stay where they are."""

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do on the CPU."""

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Nothing to do on the CPU."""

    def shutdown(self) -> bool:
        self.model.release_workspace()
        return True


def _collect(metrics: list[dict[str, float]], num_global_batches: int) -> dict[str, list[float]]:
    collected: dict[str, list[float]] = {}
    for micro in metrics:
        if micro.get("num_valid_samples", 1) == 0:
            continue
        for name, value in micro.items():
            scale = 1.0 if "_min" in name or "_max" in name else 1.0 / num_global_batches
            collected.setdefault(name, []).append(value * scale)
    return collected
