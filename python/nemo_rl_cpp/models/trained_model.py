"""The common part of policy and critic on the native core: batching, optimizer steps, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from math import prod
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.data.boundaries import save_generation_config
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.cluster import Cluster, device_for
from nemo_rl_cpp.distributed.ragged_batch import Batch, RaggedBatch
from nemo_rl_cpp.distributed.ranks import GradientSums, OtherRankFailedError, Ranks
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.lora import Lora, remove_adapter
from nemo_rl_cpp.models.model_folder import ModelFolder, open_model_folder, say_once
from nemo_rl_cpp.models.policy import train_step
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, plan, wanted_tokens
from nemo_rl_cpp.models.policy.small_moments import MOMENTS, converted
from nemo_rl_cpp.models.policy.updates import Updates, create_schedule
from nemo_rl_cpp.models.weights import Slices, buffers, load_weights, named_views, save_config, save_weights

if TYPE_CHECKING:
    from safetensors import PySafeSlice


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class TrainedModel:
    """The base class of `Policy` and `Value`: a model in training, in one process on one device, which may be one of
    several `ranks`.

    Args:
        cluster: one device (`Cluster` of world size 1) that holds the model; None: the device of `ranks`.
        config: the configuration section named by `section`.
        tokenizer: saved with the weights.
        weights_path: Hugging Face folder to load instead of `config.model_name` (resume).
        optimizer_path: folder written by `save_checkpoint`: optimizer state, master weights and schedule.
        total_steps: length of the run, for schedules that decay until its end.
        ranks: the processes that train the model together, by default this one alone. Each holds the weights or a
            tensor-parallel slice, and a shard of master weights and moments. All make the same calls with the same
            batch, of which each processes some samples."""

    section: str
    """Name of the configuration section, "policy" or "value", for error messages."""
    value_head = False

    def __init__(
        self,
        cluster: Cluster | None,
        config: TrainedModelConfig,
        tokenizer: TokenizerType | None,
        *,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
        total_steps: int | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        if cluster is not None and cluster.world_size() != 1:
            raise ValueError(
                f"{type(self).__name__} is one process, and the cluster has {cluster.world_size()} workers (cluster.gpus_per_node, "
                f"num_nodes): take Distributed{type(self).__name__}"
            )
        self.config, self.tokenizer = config, tokenizer
        self.ranks = ranks or Ranks()
        sharded, overlaps = config.shards_gradients, config.overlaps_grad_reduce
        self.device = (
            device_for(self.ranks.device, config.precision) if cluster is None else cluster.device(config.precision)
        )
        alone = self.ranks.size == 1 or self.device != "cpu"  # on GPUs gradients are summed after the backward pass
        self.sums = GradientSums() if alone else GradientSums(overlaps or sharded, sharded)
        self.folder = self._open_folder(seed)
        self.lora = Lora.of(config, self.folder, self.section)
        if self.lora is not None:
            self.model = self._load(self.folder, trainable=False)
            self.lora.begin(self.model, seed, weights_path, is_whole=self.ranks.tensor_size == 1)
        else:
            self.model = self._load(self.folder, trainable=True, weights=weights_path)
        self.slices = self._slices()
        self.trained = self.slices if self.lora is None else self.lora.slices(self.folder.native(), self.ranks)
        self.trainer = self._trainer_of(self.model)
        self.schedule = create_schedule(config, total_steps)
        self.replay_dir: Path | None = None  # receives batches whose loss or gradient is not finite
        if optimizer_path is not None:
            self._load_optimizer(Path(optimizer_path))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _open_folder(self, seed: int) -> ModelFolder:
        config = self.config
        folder = open_model_folder(
            config.model_name, config.hf_config_overrides, seed=seed, value_head=self.value_head, max_length=config.max_total_sequence_length,
            length_key=f"{self.section}.max_total_sequence_length", key=f"{self.section}.model_name",
        )  # fmt: skip
        folder.check_trains(config.model_name)
        folder = replace(folder, quantization=config.quantization)
        folder.check_device(str(self.device))
        folder.check_quantization(f"{self.section}.quantization")
        folder.check_slices(self.ranks.tensor_size, config.tensor_parallel_key(self.section))
        folder.check_mixers(config, self.section, self.ranks.tensor_size)
        megatron = config.megatron_cfg
        if megatron.enabled and megatron.moe_router_load_balancing_type != "none" and str(self.device) != "cpu":
            raise ModelFolderError(
                f"{self.section}.megatron_cfg.moe_router_load_balancing_type is {megatron.moe_router_load_balancing_type}, which the native core "
                "computes on the CPU only: set it to none, or cluster.device to cpu"
            )
        if config.megatron_cfg.enabled and config.megatron_cfg.mtp_num_layers:
            key = f"{self.section}.megatron_cfg.mtp_num_layers"
            say_once("note", f"heads for multi-token prediction ({key}) are not trained, and saved models lack them")
        return folder

    def _slices(self) -> Slices:
        return Slices.of(self.folder.native(), self.ranks)

    def _trainer_of(self, model: C.DecoderModel) -> C.Trainer:
        """Return a trainer for the model; if the model is frozen, one that does not communicate with other ranks."""
        if model is not self.model:
            return C.Trainer(model)
        sums = self.sums
        beside = self.ranks.beside() if sums.beside else None
        halves = self.config.effective_optimizer().store_param_remainders
        return C.Trainer(model, self.ranks.communicator, beside, sums.sharded, *self._moment_dtypes(), halves)

    def _moment_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Return the dtypes of AdamW's first and second moment; None: the dtype of the master weights."""
        settings = self.config.effective_optimizer()
        dtypes = {"bfloat16": torch.bfloat16, "uint8": torch.uint8}
        return dtypes.get(settings.exp_avg_dtype), dtypes.get(settings.exp_avg_sq_dtype)

    def _load(self, folder: ModelFolder, *, trainable: bool, weights: str | Path | None = None) -> C.DecoderModel:
        """Return the model of `folder`, with the weights of the folder `weights` unless that is None."""
        if weights is None:
            folder.check_weights()
        model = C.DecoderModel(
            folder.native(), DTYPES[self.config.precision], trainable, self.device, self.ranks.tensor
        )
        if trainable and self.config.freezes_routers:
            model.freeze_routers()
        if weights is None:
            folder.fill(model)
        else:
            load_weights(model, weights)
        return model

    learning_rate = property(attrgetter("schedule.lr"))

    def weight_digest(self) -> str:
        """Return a digest of the weights in the run's precision: 16 hexadecimal digits."""
        return f"{self.model.digest():016x}"

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights by Hugging Face name, as views of the storage that training (and generation) use.

        With LoRA the adapters are merged into the weights, in a copy unless training uses merged weights. With tensor
        parallelism all processes of the group must call this: the first returns copies of the whole, the others {}."""
        weights = self.model.compute if self.lora is None else self.model.merged()
        whole = self.slices.gather(weights, "the weights")
        return {} if whole is None else named_views(self.slices.whole.specs, whole) | buffers(self.model)

    def first_state_dict(self) -> dict[str, Tensor]:
        """Return `state_dict`, on the CPU, in the first data-parallel group and {} in others. All workers must call
        this."""
        if self.slices.ranks.rank > 0:
            return {}
        return {name: tensor.cpu() for name, tensor in self.state_dict().items()}

    # ---- forward and optimizer step ---------------------------------------------------------------------------------

    @property
    def _bias_update_rate(self) -> float:
        """Return moe_router_bias_update_rate if the model has sigmoid routers, otherwise 0."""
        rate = self.config.router_bias_update_rate
        return rate if rate and self.model.routers else 0.0

    @cached_property
    def _balance_weight(self) -> float:
        """Return the weight of the load-balancing loss of softmax routers; 0 if there is no such loss."""
        megatron = self.config.megatron_cfg
        kind, given = megatron.moe_router_load_balancing_type, megatron.moe_aux_loss_coeff
        if not megatron.enabled or kind == "none" or "experts" not in self.folder.native() or self.model.routers:
            return 0.0
        return float(self.folder.config["router_aux_loss_coef"] if given is None else given)

    def _update_router_biases(self) -> None:
        """Raise the bias of each expert with fewer tokens than the average, lower the others, and reset the counts."""
        for bias, load in self.model.routers if self._bias_update_rate else ():
            tokens = self.ranks.whole(load).double()
            bias.add_(torch.sign(tokens.mean() - tokens).to(bias.device), alpha=self._bias_update_rate)
            load.zero_()

    def _batching(self, kind: str, micro_batch_size: int | None = None) -> MicroBatching:
        config = self.config
        packing, dynamic = config.sequence_packing, config.dynamic_batching
        budget = next((b for b in (packing, dynamic) if b.enabled), None)
        samples = micro_batch_size or (config.train_micro_batch_size if kind == "train" else config.logprob_batch_size)
        tokens = 0 if budget is None or micro_batch_size else getattr(budget, f"{kind}_mb_tokens")
        return MicroBatching(
            max_samples=0 if tokens else samples, max_tokens=tokens, share_prefix=config.share_prompt_prefix and not (kind == "train" and (self._bias_update_rate or self._balance_weight)),
            checkpoint=config.activation_checkpointing, algorithm=packing.algorithm,
            largest_first=packing.microbatch_order == "largest_first",
            length_round=dynamic.sequence_length_round if budget is dynamic else 0,
        )  # fmt: skip

    def _score(
        self, model: C.DecoderModel, batch: RaggedBatch, scoring: train_step.Scoring = train_step.Scoring(), rows: list[int] | None = None,
        entropies: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the log-probability (or critic's value) of each token to score, [T]; 0 at all other tokens. Each rank
        scores its share of the batch (or the samples `rows`, which differ between ranks), and every rank returns the
        results of all ranks. With `entropies`, return the entropies, in nats, instead."""
        rows = self.ranks.part(batch) if rows is None else rows
        trainer = self.trainer if model is self.model else self._trainer_of(model)
        batching = self._batching("logprob")
        native, micro_batches = plan(batch, wanted_tokens(batch), rows, batching)
        out = torch.zeros(batch.num_tokens, dtype=trainer.out_dtype)
        entropy = torch.zeros_like(out) if entropies else None
        with getattr(trainer, "together", nullcontext)():  # a `ShardedTrainer` has passes of all ranks
            for micro in micro_batches:
                trainer.forward(native, micro, scoring.temperature, batching.share_prefix, False, False, out,
                                top_p=scoring.top_p, top_k=scoring.top_k, entropy=entropy)  # fmt: skip
        if entropy is not None:
            return self.ranks.whole(entropy)
        return self.ranks.whole(train_step.without_removed_tokens(out)[0] if scoring.filters else out)

    def _score_candidates(
        self, model: C.DecoderModel, batch: RaggedBatch, temperature: float, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return (ids int64 [T, k], log-probabilities [T, k]) of the batch's `candidate_ids`, or if it has none, of the
        k most likely tokens at the position of each token to score. Other positions have 0."""
        trainer = self.trainer if model is self.model else self._trainer_of(model)
        batching, rows = self._batching("logprob"), self.ranks.part(batch)
        given = batch.tokens.get("candidate_ids")
        given = None if given is None else given.contiguous()
        native, micro_batches = plan(batch, wanted_tokens(batch), rows, batching, targets=given)
        logprobs = torch.zeros((batch.num_tokens, k), dtype=trainer.out_dtype)
        ids = torch.zeros(logprobs.shape, dtype=torch.int64) if given is None else given
        for micro in micro_batches:
            common = native, micro, temperature, batching.share_prefix
            if given is None:
                trainer.likeliest(*common, ids, logprobs)
            else:
                trainer.forward(*common, False, False, logprobs)
        return self.ranks.whole(ids) if given is None else ids, self.ranks.whole(logprobs)

    def _runner(
        self, loss_fn: train_step.Loss, mbs: int | None, scoring: train_step.Scoring = train_step.Scoring()
    ) -> train_step.MicroBatchRunner:
        evaluate = train_step.evaluate_value_loss if self.value_head else None
        return train_step.MicroBatchRunner(
            self.trainer, loss_fn, self._batching("train", mbs), scoring, evaluate, self.ranks, self.config.gradient_blocks, self.sums,
            counts_loads=self._bias_update_rate > 0, balance_weight=self._balance_weight,
        )  # fmt: skip

    def _global_batch_size(self, size: int, gbs: int | None) -> int:
        gbs = gbs or self.config.train_global_batch_size
        if size % gbs:
            raise ValueError(f"the {size} samples are not a multiple of {self.section}.train_global_batch_size={gbs}")
        return gbs

    def _pass_over(
        self, batch: RaggedBatch, gbs: int, way: train_step.MicroBatchRunner, eval_mode: bool, first: Mapping[str, object] = MappingProxyType({}),
        after_first: Callable[[train_step.GlobalBatchResult], None] | None = None,
    ) -> Updates:  # fmt: skip
        """Take one optimizer step per global batch of `gbs` samples, then one step of the learning-rate schedule; with
        `eval_mode` take neither. `way` runs the forward and backward passes, in the first global batch with the options
        `first`. `after_first` receives the first global batch's result before the weights change."""
        updates = Updates(in_turns=way.sums.sharded)
        for begin in range(0, batch.size, gbs):
            if not eval_mode:
                self.trainer.zero_grad()
            result, error = None, None
            try:
                with getattr(self.trainer, "together", nullcontext)():
                    options = first if begin == 0 else {}
                    result = way.forward_backward(batch, begin, begin + gbs, backward=not eval_mode, **options)
            except train_step.NonFiniteError as found:
                said = found if self.section == "policy" else train_step.NonFiniteError(f"{self.section}: {found}")
                error = self._with_replay(said, batch)
            except Exception as found:
                error = found
            try:
                self.ranks.fail_together(error)
            except OtherRankFailedError:
                if not eval_mode:
                    way.abandon_sum()  # the failed rank has joined a sum, which the next step must not receive
                raise
            if begin == 0 and after_first is not None:
                after_first(result)
            settings = {"lr": self.schedule.lr, "wd": self.schedule.weight_decay}
            if not eval_mode:
                updates.norms.append(self._step(batch, *settings.values()))
                settings["grad_norm"] = updates.norms[-1]
            updates.add(result, settings)
        if not eval_mode:
            self.schedule.step()
        return updates

    def _step(self, data: RaggedBatch, lr: float, weight_decay: float) -> float:
        """Take the optimizer step and return the gradient norm before clipping. Raise NonFiniteError unless finite."""
        settings = self.config.effective_optimizer()
        result = self.trainer.step(
            lr=lr, beta1=settings.betas[0], beta2=settings.betas[1], eps=settings.eps, weight_decay=weight_decay,
            max_grad_norm=self.config.effective_max_grad_norm() or 0.0,
        )  # fmt: skip
        if not result.finite:
            names: list[str] = []
            if self.ranks.size == 1:  # with several ranks each holds only a shard of the gradient
                grads = named_views(self.trained.own.specs, self.trainer.grads)
                names = [name for name, grad in grads.items() if not torch.isfinite(grad).all()]
            bad = f"; first bad parameters: {', '.join(names[:4])}" if names else ""
            error = train_step.NonFiniteError(
                f"{self.section}: the gradient norm is {result.grad_norm}{bad}; the learning rate is {lr:g}; the weights "
                "were not updated"
            )
            raise self._with_replay(error, data) if self.ranks.is_first else error
        self._update_router_biases()
        return result.grad_norm

    def _with_replay(self, error: train_step.NonFiniteError, data: RaggedBatch) -> train_step.NonFiniteError:
        """Return `error` with the path of a file from which `train(torch.load(path), loss_fn)` reproduces it."""
        if self.replay_dir is None or self.ranks.tensor_rank > 0:  # other tensor ranks would write the same batch
            return error
        self.replay_dir.mkdir(parents=True, exist_ok=True)
        rank = f"_rank{self.ranks.rank}" if self.ranks.rank else ""
        path = self.replay_dir / f"nonfinite_{self.section}_batch{rank}.pt"
        torch.save({k: v for k, v in data.items() if isinstance(v, Tensor)}, path)
        return train_step.NonFiniteError(f"{error}; the batch was written to {path}")

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def saved_config(self) -> dict[str, Plain]:
        """Return the contents of a checkpoint's config.json."""
        return self.folder.config

    def save_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path | None = None) -> None:
        """Save the model in Hugging Face format (weights, config, generation config, tokenizer) to `weights_path`, and
        all other state of a bit-identical resume (moments, master weights, schedule) to `optimizer_path`. Of a
        quantised model only the adapter is saved. If a parameter is infinite or NaN, write nothing and raise
        NonFiniteError."""
        error, bad = None, self.non_finite_parameters()
        if bad:
            error = train_step.NonFiniteError(
                f"{self.section}: {len(bad)} parameters are not finite, first {', '.join(bad[:4])}, so nothing was saved to "
                f"{weights_path}: go back to an earlier checkpoint, with a lower learning rate"
            )
        self.ranks.fail_together(error)
        whole = {} if self.config.quantization else self.first_state_dict()
        adapters = None
        if self.lora is not None and self.ranks.rank == 0:
            adapters = self.trained.gather(self.model.masters, "the adapters")
        if self.ranks.is_first:
            try:
                self._save_files(whole, adapters, Path(weights_path))
            except Exception as found:  # such as a full disk; the other ranks must not wait for this rank
                error = found
        self.ranks.fail_together(error)
        if optimizer_path is not None:
            self._save_optimizer(Path(optimizer_path))

    def _save_model(self, whole: dict[str, Tensor], weights_path: Path) -> None:
        if self.config.quantization is None:
            save_weights(self.model, weights_path, self.saved_config(), tensors=whole)
        else:
            save_config(weights_path, self.saved_config(), self.model.compute.dtype)

    def _save_files(self, whole: dict[str, Tensor], adapters: Tensor | None, weights_path: Path) -> None:
        self._save_model(whole, weights_path)
        if not self.value_head:
            save_generation_config(self.folder.path, self.folder.raw, self.tokenizer, weights_path)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(weights_path))
        if self.lora is None:
            remove_adapter(weights_path)
        else:
            self.lora.save(weights_path, self.trained.whole, adapters)

    def checkpoint_bytes(self, optimizer: bool) -> int:
        trained = list(self._optimizer_tensors().values()) if optimizer else []
        if self.lora is not None:
            trained.append(self.model.masters)
        weights = 0 if self.config.quantization else self.slices.whole.total * self.model.compute.element_size()
        return weights + self.trained.whole.total * sum(tensor.element_size() for tensor in trained)

    def non_finite_parameters(self) -> list[str]:
        bad: dict[str, None] = {}
        places = (
            (self.slices.own, 0, self.model.compute),
            (self.trained.own, self.model.masters_begin, self.model.masters),
        )
        for layout, begin, flat in places:
            if flat is None or all(  # inf or NaN spreads to the sum, for which torch copies its input to float64
                bool(torch.isfinite(part.sum(dtype=torch.float64))) for part in flat.split(1 << 22)
            ):
                continue
            finite = torch.ones(layout.total, dtype=torch.bool)
            finite[begin : begin + flat.numel()] = torch.isfinite(flat)
            bad |= dict.fromkeys(n for n, view in named_views(layout.specs, finite).items() if not bool(view.all()))
        return list(bad)

    def keep_bad_batches(self, folder: Path) -> None:
        self.replay_dir = folder

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        tensors = {"exp_avg": self.trainer.exp_avg, "exp_avg_sq": self.trainer.exp_avg_sq}
        if self.config.effective_optimizer().store_param_remainders:
            tensors["remainders"] = self.model.remainders
        elif self.lora is None and self.model.masters.dtype != self.model.compute.dtype:
            tensors["masters"] = self.model.masters
        return tensors

    def _save_optimizer(self, folder: Path) -> None:
        """Save the optimizer state of all ranks, in files that do not depend on the number of ranks."""
        whole, shard, total = {}, self.trainer.shard, self.trained.own.total
        for name, tensor in self._optimizer_tensors().items():
            gathered = self.trained.ranks.gather_shards(tensor, shard, total, name)
            whole[name] = self.trained.gather(gathered, name)
        if not self.ranks.is_first:
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_file(whole, folder / "optimizer.safetensors")
        state = {"optimizer_steps": self.trainer.optimizer_steps, "schedule": self.schedule.state_dict()}
        (folder / "optimizer.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")

    def _load_optimizer(self, folder: Path) -> None:
        total = self.trained.whole.total
        try:
            with safe_open(folder / "optimizer.safetensors", framework="pt") as saved:
                for name, tensor in self._optimizer_tensors().items():
                    if name not in saved.keys() and {name, *saved.keys()} >= {"masters", "remainders"}:
                        self._read_other_masters(saved)
                        continue
                    value = saved.get_slice(name)
                    if value.get_shape() != [total]:
                        raise ValueError(f"{name} has {prod(value.get_shape())} elements, this model {total}")
                    in_codes = tensor.dtype == torch.uint8
                    if name in MOMENTS and (value.get_dtype() == "U8") != in_codes:
                        both = [saved.get_tensor(each) for each in MOMENTS]
                        value = converted(both, in_codes)[MOMENTS.index(name)]
                    self._fill(name, tensor, value)
            if self.lora is None:
                self.model.masters_changed()
            state = json.loads((folder / "optimizer.json").read_text())
            self.trainer.optimizer_steps = state["optimizer_steps"]
            self.schedule.load_state_dict(state["schedule"])
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{folder}: this is not the optimizer state of this model ({why}): resume from another checkpoint, or start from scratch "
                "from its weights (policy.model_name)"
            ) from error

    def _read_other_masters(self, saved: safe_open) -> None:
        """Read master weights that were saved in the form that this run does not use (`store_param_remainders`):
        float32 numbers, or remainders that complete the loaded bfloat16 weights (csrc/kernels/adamw.h)."""
        begin, end = self.trainer.shard
        if "masters" in saved.keys():
            whole = self.trained.take(saved.get_tensor("masters"))
            remainders = torch.empty_like(whole, dtype=torch.int16)
            C.split_weights(whole, self.model.compute, remainders)
            self.model.remainders.copy_(remainders[begin:end])
            return
        lower, upper = self.trained.take(saved.get_tensor("remainders")), self.model.compute.view(torch.int16)
        whole = upper.int().bitwise_left_shift_(16).add_(lower).view(torch.float32)
        self.model.masters.copy_(whole[begin:end])
        self.model.compute.copy_(whole)  # all of it, as masters_changed() rounds this rank's part only

    def _fill(self, name: str, tensor: Tensor, saved: PySafeSlice | Tensor) -> None:
        begin, end = self.trainer.shard
        tensor.copy_(saved[begin:end] if self.ranks.tensor_size == 1 else self.trained.take(saved[:])[begin:end])

    # ---- the rest of the interfaces ---------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        self.model.release_workspace()
        return True


def in_layout_of(data: Batch, batch: RaggedBatch, of_tokens: Tensor) -> Tensor:
    """Return the per-token results `of_tokens` [T] of `batch` in the layout of `data`, which holds the same samples:
    [T] for a RaggedBatch, [B, S] for padded tensors."""
    return of_tokens if isinstance(data, RaggedBatch) else batch.padded(of_tokens)
