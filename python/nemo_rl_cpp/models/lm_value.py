"""PPO's critic on the native core: the policy's architecture with a scalar head in place of the LM head."""

from nemo_rl_cpp.distributed.ragged_batch import Batch, BatchedDataDict, RaggedBatch
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES
from nemo_rl_cpp.models.interfaces import TrainingResult, ValueInterface
from nemo_rl_cpp.models.policy.train_step import Loss
from nemo_rl_cpp.models.policy.updates import Updates
from nemo_rl_cpp.models.trained_model import TrainedModel, in_layout_of


class Value(TrainedModel, ValueInterface):
    """PPO's critic in training: values, optimizer steps, checkpoints.

    The value of the state before token t is score · norm(h), where h is the hidden state after token t - 1.
    `config.model_name` is any checkpoint of a supported architecture. If it has `score.weight` [1, hidden size], like
    checkpoints of this class and of transformers' `...ForSequenceClassification` with one label, the head is read from
    there. Otherwise the head starts at zero, so that the first values are exactly 0 for any seed. (NeMo RL initialises
    the head at random.)

    The arguments are those of `TrainedModel`; `config` is the section `value`."""

    section = "value"
    value_head = True

    def get_values(self, data: Batch) -> BatchedDataDict:
        """Return {"values": [T], or [B, S] for padded `data`}: the value before each token to score, 0 elsewhere."""
        batch = RaggedBatch.of(data)
        return BatchedDataDict(values=in_layout_of(data, batch, self._score(self.model, batch)))

    def train(
        self, data: Batch, loss_fn: Loss, eval_mode: bool = False, *, gbs: int | None = None, mbs: int | None = None,
    ) -> TrainingResult:  # fmt: skip
        """Take one optimizer step per global batch of `gbs` rows, in micro-batches of `mbs` rows (None: the configured
        sizes), then one step of the learning-rate schedule. With `eval_mode` take no step.

        `data` has the loss's inputs: `returns`, and if the loss clips also `values` from `get_values`. `loss_fn` is
        `MseValueLossFn`, or a callable on values, see `evaluate_value_loss`."""
        return self.train_part(RaggedBatch.of(data), loss_fn, eval_mode, gbs, mbs).report()

    def train_part(
        self, data: RaggedBatch, loss_fn: Loss, eval_mode: bool = False, gbs: int | None = None, mbs: int | None = None
    ) -> Updates:
        gbs = self._global_batch_size(data.size, gbs)
        return self._pass_over(data, gbs, self._runner(loss_fn, mbs), eval_mode)

    def saved_config(self) -> dict[str, Plain]:
        """Return a config.json with which transformers' sequence classifier with one label loads the checkpoint."""
        title = SUPPORTED_ARCHITECTURES[self.folder.config["model_type"]].title
        one_label = {"id2label": {"0": "value"}, "label2id": {"value": 0}, "tie_word_embeddings": False}
        return {**self.folder.config, "architectures": [f"{title}ForSequenceClassification"], **one_label}
