"""The policy on the native core, in one process on one device. Its engine reads its weights in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.generation import EvalGenerationConfig
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.config.rules_model import checked_policy
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.cluster import Cluster
from nemo_rl_cpp.distributed.ragged_batch import Batch, BatchedDataDict, RaggedBatch
from nemo_rl_cpp.metrics.memory import available_bytes
from nemo_rl_cpp.models.generation.native import NativeGeneration, generation_on
from nemo_rl_cpp.models.interfaces import PolicyInterface, TrainingResult
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.models.policy.micro_batches import wanted_tokens
from nemo_rl_cpp.models.policy.train_step import Exactness, GlobalBatchResult, Loss, Scoring
from nemo_rl_cpp.models.policy.updates import Updates
from nemo_rl_cpp.models.trained_model import TrainedModel, in_layout_of


class Policy(TrainedModel, PolicyInterface):
    """A language model in training: log-probabilities, optimizer steps, checkpoints. The arguments are those of
    `TrainedModel`; `config` is the section `policy`, or a dictionary of its keys. `init_reference_model`: keep a frozen
    copy of `config.model_name` for `get_reference_policy_logprobs`. `teachers` maps configuration keys to the models
    for `get_teacher_logprobs`."""

    section = "policy"

    def __init__(
        self, cluster: Cluster | None, config: PolicyConfig | Mapping[str, object], tokenizer: TokenizerType | None,
        *, init_reference_model: bool = True, teachers: Mapping[str, str] = MappingProxyType({}), **options: object,
    ):  # fmt: skip
        config = checked_policy(config)
        super().__init__(cluster, config, tokenizer, **options)
        self.scoring = Scoring.of(config.generation)
        self.reference: C.DecoderModel | None = None
        if init_reference_model:  # with LoRA it is the current model without its adapters
            self.reference = self._load(self.folder, trainable=False) if self.lora is None else self.model.base()
        keys = {name: key for key, name in teachers.items()}  # each model is loaded once, even if several keys name it
        self.teachers = {name: self._teacher(name, key) for name, key in keys.items()}
        self.reused_forward_share = self.zero_gradient_share = 0.0
        self._steps_since_comparison = 0  # training steps since generation was last compared with a full forward pass
        if self.device != "cpu" and config.kept_activations_gb:
            raise ValueError(
                f"policy.kept_activations_gb={config.kept_activations_gb:g}: activations are kept on the CPU only; leave it out on a GPU"
            )

    def _teacher(self, name: str, key: str) -> C.DecoderModel:
        """Load the frozen teacher `name`, the value of `key`, with positions for the policy's longest sequence."""
        longest, length_key = self.config.max_total_sequence_length, "policy.max_total_sequence_length"
        folder = open_model_folder(name, max_length=longest, length_key=length_key, key=key)
        folder.check_slices(self.ranks.tensor_size, self.config.tensor_parallel_key(self.section))
        return self._load(folder, trainable=False)

    @property
    def skips_prev_logprobs(self) -> bool:
        """Return whether training takes generation's log-probabilities as the old policy's (reuse_generation_logprobs).
        Always False on transformers, where the two differ by rounding."""
        return self.config.backend != "hf" and self.config.reuse_generation_logprobs != "never"

    # ---- log-probabilities ------------------------------------------------------------------------------------------

    def get_logprobs(self, data: Batch) -> BatchedDataDict:
        """Return the log-probabilities [T], or [B, S] for padded `data`, under generation's sampling settings; 0 where
        a mask is 0, at first tokens, on padding, and for tokens that top-k or top-p removes."""
        return BatchedDataDict(logprobs=self._logprobs(self.model, data, self.scoring))

    def _logprobs(self, model: C.DecoderModel, data: Batch, scoring: Scoring) -> Tensor:
        batch = RaggedBatch.of(data)
        return in_layout_of(data, batch, self._score(model, batch, scoring))

    def get_reference_policy_logprobs(self, data: Batch) -> BatchedDataDict:
        if self.reference is None:
            raise ValueError("the policy was built without a reference model (init_reference_model=False)")
        logprobs = self._logprobs(self.reference, data, self.scoring.unfiltered())
        return BatchedDataDict(reference_logprobs=logprobs)

    def get_entropies(self, data: Batch) -> BatchedDataDict:
        batch = RaggedBatch.of(data)
        entropies = self._score(self.model, batch, self.scoring.unfiltered(), entropies=True)
        return BatchedDataDict(entropies=in_layout_of(data, batch, entropies))

    def get_sum_pi_squared(self, data: Batch) -> BatchedDataDict:
        """Return the sum of p^2 over the vocabulary at each token. With logits z, temperature T and log p_T(y) = z_y /
        T - log sum exp(z / T), it equals p_T(y)^2 / p_{T/2}(y) for any token y; here, the sampled one."""
        batch, scoring = RaggedBatch.of(data), self.scoring.unfiltered()
        half = Scoring(scoring.temperature / 2)
        ours, sharper = (self._score(self.model, batch, s) for s in (scoring, half))
        squares = torch.where(wanted_tokens(batch), (2 * ours - sharper).exp(), 0.0)
        return BatchedDataDict(sum_pi_squared=in_layout_of(data, batch, squares))

    def get_teacher_logprobs(self, data: Batch, teacher: str) -> BatchedDataDict:
        logprobs = self._logprobs(self.teachers[teacher], data, self.scoring.unfiltered())
        return BatchedDataDict(teacher_logprobs=logprobs)

    def get_topk_logprobs(self, data: RaggedBatch, k: int, teacher: str | None = None) -> BatchedDataDict:
        model = self.model if teacher is None else self.teachers[teacher]
        ids, logprobs = self._score_candidates(model, data, self.scoring.temperature, k)
        return BatchedDataDict(ids=ids, logprobs=logprobs)

    # ---- training ---------------------------------------------------------------------------------------------------

    def train(
        self, data: Batch, loss_fn: Loss, eval_mode: bool = False, gbs: int | None = None, mbs: int | None = None
    ) -> TrainingResult:
        """Take one optimizer step per global batch of `gbs` rows, in micro-batches of `mbs` rows (None: the configured
        sizes), then one step of the learning-rate schedule.

        If the data has no `prev_logprobs`, the current weights must be those that generated the responses. The first
        update then takes the old policy's log-probabilities from its own forward pass, and later updates from
        generation if it was bit-identical to this pass, otherwise from a separate pass before the first update. They
        are returned as "prev_logprobs", for another call. Sets `reused_forward_share` and `zero_gradient_share`, the
        shares of tokens without a forward and without a backward pass."""
        batch = RaggedBatch.of(data)
        done = self.train_part(batch, loss_fn, eval_mode, gbs, mbs)
        self.zero_gradient_share, self.reused_forward_share = done.shares(self.reused_forward_share)
        return done.report(data, batch)

    def train_part(
        self, data: RaggedBatch, loss_fn: Loss, eval_mode: bool = False, gbs: int | None = None, mbs: int | None = None
    ) -> PolicyUpdates:
        """Train on this rank's samples of the batch; see `train`."""
        batch = data.copy()
        gbs = self._global_batch_size(batch.size, gbs)
        way = self._runner(loss_fn, mbs, self.scoring)
        on_policy = "prev_logprobs" not in batch.tokens
        exactness = Exactness() if on_policy and "generation_logprobs" in batch.tokens else None
        keeps = exactness is not None and self.config.backend != "hf"  # transformers' generation keeps no activations
        if keeps:
            self._compare_whole_pass_now_and_then()

        def after_first(result: GlobalBatchResult) -> None:
            if on_policy:
                whole = gbs == batch.size
                prev = self.ranks.whole(result.outputs) if whole else self._old_logprobs(batch, exactness, gbs)
                batch.tokens["prev_logprobs"] = prev
            if keeps:
                self._keep_activations(exactness, tokens=result.packed_tokens * (batch.size // gbs))

        reused_before, first = self.trainer.reused_tokens, {"on_policy": on_policy, "exactness": exactness}
        updates = self._pass_over(batch, gbs, way, eval_mode, first, after_first)
        reused = self.trainer.reused_tokens - reused_before
        return PolicyUpdates(updates, exactness, batch.tokens["prev_logprobs"], reused, on_policy)

    def _old_logprobs(self, batch: RaggedBatch, exactness: Exactness | None, gbs: int) -> Tensor:
        """Return the old policy's log-probabilities [T] for the updates after the first: generation's if they equalled
        those of the first update's forward pass bit for bit (`exactness`), otherwise newly computed ones, also if all
        tokens of the first update are masked."""
        compared, mismatched = (0, 0) if exactness is None else (exactness.tokens, exactness.mismatched_tokens)
        if self.ranks.sum(compared) > 0 and self.ranks.sum(mismatched) == 0:
            return batch.tokens["generation_logprobs"].to(self.trainer.out_dtype)
        own = [self.ranks.blocks(batch, b, b + gbs, self.config.gradient_blocks) for b in range(0, batch.size, gbs)]
        rows = sorted(row for blocks in own for block in blocks for row in block)
        return self._score(self.model, batch, self.scoring, rows)

    def _compare_whole_pass_now_and_then(self) -> None:
        """Once in `kept_activations_check_period` steps, let generation keep no activations. Training then runs a whole
        forward pass, whose comparison with generation detects errors that reused activations would hide, such as stale
        weights."""
        self._steps_since_comparison += 1
        if self.model.max_kept_bytes == 0 or self._steps_since_comparison == self.config.kept_activations_check_period:
            self.model.keep_activations(0)
            self._steps_since_comparison = 0

    def _keep_activations(self, exactness: Exactness, tokens: int) -> None:
        """Let the next generation keep its activations for training, if generation and training agreed bit for bit in
        this step (`exactness`) and the activations of `tokens` tokens fit into free memory (not checked if
        kept_activations_gb is set); otherwise let it keep none."""
        gigabytes, agree = self.config.kept_activations_gb, exactness.tokens > 0 and exactness.mismatched_tokens == 0
        share = available_bytes() // (4 * self.ranks.size) if gigabytes is None else int(gigabytes * 1e9)
        limit = self.model.max_kept_bytes or share
        fits = gigabytes is not None or tokens * self.model.kept_bytes_per_token <= limit
        possible = self.device == "cpu" and self.ranks.tensor_size == 1 and not self.config.activation_checkpointing
        if not agree or not fits or limit == 0 or not possible:
            self.model.keep_activations(0)
        elif self.model.max_kept_bytes == 0:
            self.model.release_workspace()  # a backward pass on kept activations needs only one layer's workspace
            self.model.keep_activations(limit)

    # ---- generation and the rest of the interface ---------------------------------------------------------------------

    def create_generation(
        self, generation_config: EvalGenerationConfig | None = None, **options: object
    ) -> NativeGeneration:
        options.setdefault("memory_share", 1 / self.ranks.sharers)
        engine = generation_on(
            self.model, self.folder, self.config, self.tokenizer, self.weight_digest, generation_config, **options
        )
        if self.ranks.tensor_size > 1:
            engine.agree = self.ranks.tensor_least
            engine.prepare_for_generation()
        return engine

    def performance(self) -> dict[str, float]:
        """Return `zero_gradient_share` of the last `train`, and on the native core `reused_forward_share`, which is 0 in
        the first step of a process, even of a resumed run: it describes how a step ran, not its result."""
        reused = {} if self.config.backend == "hf" else {"reused_forward_share": self.reused_forward_share}
        return reused | {"zero_gradient_share": self.zero_gradient_share}


@dataclass
class PolicyUpdates:
    """The result of one `train` call for this rank's samples.

    Attributes:
        exactness: comparison of generation's log-probabilities with training's; None if nothing was compared.
        prev_logprobs: log-probabilities before the first update [T], of all ranks' samples.
        reused_tokens: number of tokens for which training reused generation's activations.
        on_policy: this call computed `prev_logprobs`; they were not in the data."""

    updates: Updates
    exactness: Exactness | None
    prev_logprobs: Tensor
    reused_tokens: int
    on_policy: bool

    @classmethod
    def of_ranks(cls, parts: Sequence[PolicyUpdates]) -> PolicyUpdates:
        exactness, compared = None, [part.exactness for part in parts if part.exactness is not None]
        if compared:
            tokens, mismatched, gaps = zip(*map(astuple, compared))
            exactness = Exactness(sum(tokens), sum(mismatched), max(gaps))
        updates = Updates.of_ranks([part.updates for part in parts])
        reused = sum(part.reused_tokens for part in parts)
        return replace(parts[0], updates=updates, exactness=exactness, reused_tokens=reused)

    def shares(self, last_reused: float) -> tuple[float, float]:
        """Return (fraction of tokens without a backward pass, fraction of tokens without a forward pass in training). A
        call that repeats a batch reuses no activations; its second fraction is `last_reused`, that of the first call on
        the batch."""
        packed = max(self.updates.packed_tokens, 1)
        reused = self.reused_tokens / packed if self.reused_tokens or self.on_policy else last_reused
        return self.updates.zero_gradient_tokens / packed, reused

    def report(self, data: Batch, batch: RaggedBatch) -> TrainingResult:
        """Return the result of `train` in the layout of `data`; `batch` holds the same samples without padding."""
        prev = in_layout_of(data, batch, self.prev_logprobs)
        return self.updates.report() | {"exactness": self.exactness, "prev_logprobs": prev}
