"""The state from which a training loop resumes exactly where it stopped."""

from dataclasses import dataclass, field, fields
from typing import Self

from nemo_rl_cpp.config.access import as_number


@dataclass
class TrainState:
    """The counters of a run, saved as `training_info.json` with NeMo RL's names; `total_steps` are finished.
    `draw_counter` counts every prompt drawn, also those that dynamic sampling drops, and seeds generation."""

    consumed_samples: int = 0
    current_step: int = 0
    current_epoch: int = 0
    total_steps: int = 0
    total_valid_tokens: int = 0
    val_reward: float | None = None
    sampler_name: str | None = None
    draw_counter: int = 0
    best_metric: float | None = None
    best_metric_step: int | None = None
    log_dir: str | None = None
    stop_reason: str | None = None
    owes_validation: bool = False  # an interrupted step skipped its validation, which the resumed run begins with
    max_num_steps: int | None = field(default=None, metadata={"saved": False})
    max_num_epochs: int | None = field(default=None, metadata={"saved": False})

    @property
    def step(self) -> int:
        """The number of finished steps; also the version of the weights."""
        return self.total_steps

    @property
    def finished(self) -> bool:
        """Whether the loop must end; `stop_reason` then holds the reason."""
        if self.stop_reason is None:
            if self.max_num_steps is not None and self.total_steps >= self.max_num_steps:
                self.stop_reason = "max_num_steps"
            elif self.max_num_epochs is not None and self.current_epoch >= self.max_num_epochs:
                self.stop_reason = "max_num_epochs"
        return self.stop_reason is not None

    def advance(self, num_prompts: int = 0, num_valid_tokens: int = 0) -> None:
        """Count a finished step, which used `num_prompts` prompts and trained on `num_valid_tokens` tokens."""
        self.total_steps += 1
        self.current_step += 1
        self.consumed_samples += num_prompts
        self.total_valid_tokens += int(num_valid_tokens)

    def next_epoch(self) -> None:
        """Count an epoch, when the data loader starts over."""
        self.current_epoch += 1
        self.current_step = 0

    def draw(self, num_prompts: int) -> int:
        """Reserve draw ids for the next `num_prompts` prompts, and return the first. Draw ids number the prompts of the
        whole run in the order in which they are drawn."""
        first = self.draw_counter
        self.draw_counter += num_prompts
        return first

    def stop(self, reason: str) -> None:
        """End the run after the current step. If called again, keep the first reason."""
        self.stop_reason = self.stop_reason or reason

    def note_metric(self, value: float, higher_is_better: bool = True) -> None:
        """Record `value` if it is the best value of the checkpoint metric so far; NaN is never the best."""
        best = self.best_metric
        better = best is None or (value > best if higher_is_better else value < best)
        if better and value == value:
            self.best_metric, self.best_metric_step = float(value), self.total_steps

    def to_training_info(self, metric: dict[str, float] | None = None) -> dict[str, object]:
        """Return the content of training_info.json, with the entries of `metric`; without `val_reward` if None."""
        info = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("saved", True)}
        if info["val_reward"] is None:
            del info["val_reward"]
        return info | (metric or {})

    @classmethod
    def from_training_info(cls, info: dict[str, object] | None) -> Self:
        """Return the state that `to_training_info` saved as `info`, or a fresh one. Unknown names are ignored.
        `stop_reason` is not restored, because the configuration may now allow more steps."""
        known = {f.name for f in fields(cls) if f.metadata.get("saved", True)} - {"stop_reason"}
        values = {name: value for name, value in (info or {}).items() if name in known}
        for name in ("val_reward", "best_metric"):
            if name in values:
                values[name] = as_number(values[name])
        return cls(**values)
