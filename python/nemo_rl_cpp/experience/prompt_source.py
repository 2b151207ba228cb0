"""The prompts of a run, one batch after another, each prompt with a number of its own."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.experience.rollouts import repeat_prompts

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.train_state import TrainState


class PromptSource:
    """Draws batches from a data loader and repeats every prompt G times.

    The loader begins again when it ends, so a step that needs more prompts than an epoch has left goes on with the next
    one. Every prompt drawn gets the next draw id of the run (`state` counts them and is saved), which keys the random
    numbers of its generations and serves as its `group_id`.
    """

    def __init__(self, loader: Iterable[BatchedDataDict], num_generations: int, state: "TrainState") -> None:
        self.loader = loader
        self.num_generations = num_generations
        self._state = state
        self._batches: Iterator[BatchedDataDict] | None = None
        self._drawn = 0
        self._finished_epochs = 0

    def next(self) -> BatchedDataDict:
        """The next prompts, each G times. Keys beyond the loader's: see `repeat_prompts`; `group_id` is the draw id."""
        batch = self._draw()
        repeated = repeat_prompts(batch, self.num_generations, self._state.draw(batch.size), stream="train")
        repeated["group_id"] = repeated["draw_ids"].clone()  # unique over the run, also when groups outlive their step
        return repeated

    def pop_finished_epochs(self) -> int:
        """Epochs that ended since the last call."""
        epochs, self._finished_epochs = self._finished_epochs, 0
        return epochs

    def _draw(self) -> BatchedDataDict:
        for _ in range(2):
            if self._batches is None:
                self._batches, self._drawn = iter(self.loader), 0
            epoch = getattr(self.loader, "epoch", None)
            batch = next(self._batches, None)
            if batch is None:
                self._end_epoch()
                continue
            self._drawn += 1
            if self._was_last(epoch):
                self._end_epoch()
            return batch
        raise ValueError("the data loader gives no batches: there are fewer prompts than grpo.num_prompts_per_step")

    def _was_last(self, epoch_before: int | None) -> bool:
        """Whether the batch just drawn ended its epoch. Our loader says so; of another one only the length is known; one
        without a length is found to have ended at the next draw."""
        if epoch_before is not None:
            return self.loader.epoch != epoch_before
        return hasattr(self.loader, "__len__") and self._drawn >= len(self.loader)

    def _end_epoch(self) -> None:
        self._batches = None
        self._finished_epochs += 1
