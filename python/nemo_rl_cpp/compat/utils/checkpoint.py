"""NeMo RL's checkpoint manager: the house's, with the calls that its loop does not make."""

import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl_cpp.checkpoints import manager as house
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig


class CheckpointManager(house.CheckpointManager):
    """Checkpoints of a run, see `nemo_rl_cpp.checkpoints.manager.CheckpointManager`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def init_tmp_checkpoint(self, step: int, training_info: Mapping[str, Any], run_config: Any = None) -> Path:
        """Waits for background work, then makes `tmp_step_N`."""
        self.finalize_pending()
        return super().init_tmp_checkpoint(step, training_info, run_config)

    def recover(self) -> list[str]:
        """Finishes or removes what a crash in mid-save left behind; nothing while background work goes on."""
        return [] if self.has_pending_finalization else super().recover()

    def begin_finalization(self, checkpoint_path: Path | str, wait_fn: Callable[[], None] | None = None) -> None:
        """`finalize_checkpoint` on a background thread, after `wait_fn()`. Nothing may write to the folder any more,
        except what `wait_fn` waits for. An error is raised by the next `finalize_pending`."""
        self.finalize_pending()

        def work() -> None:
            try:
                if wait_fn is not None:
                    wait_fn()
                self.finalize_checkpoint(checkpoint_path)
            except BaseException as error:
                self.abandon(checkpoint_path)
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint-finalization", daemon=True)
        self._thread.start()

    def finalize_pending(self) -> None:
        """Waits for the background finalization, if any; RuntimeError when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"the checkpoint could not be finished: {error}") from error

    @property
    def has_pending_finalization(self) -> bool:
        """Whether a background finalization is at work."""
        return self._thread is not None and self._thread.is_alive()

    def shutdown(self) -> None:
        """Waits for background work and gives the folder free; may be called again."""
        try:
            self.finalize_pending()
        finally:
            super().shutdown()

    def __exit__(self, exc_type: Any, exc: BaseException | None, traceback: Any) -> None:
        try:
            self.shutdown()
        except RuntimeError as error:
            if exc is None:
                raise
            warnings.warn(f"{error} (while another exception was being raised)", stacklevel=2)

    def checkpoint_metric(
        self, train_metrics: Mapping[str, float] | None, val_metrics: Mapping[str, float] | None
    ) -> dict[str, float]:
        """`{metric_name: value}` for training_info, or an empty dict.

        Empty with `metric_name: null`, and, with a warning, when a `val:` metric is wanted but no validation ran on
        this step. ValueError when the metrics are there but have no such name; AssertionError when `metric_name` names
        neither train nor val metrics.
        """
        if self.metric_name is None:
            return {}
        kind, _, name = self.metric_name.partition(":")
        assert kind in ("train", "val") and name, (
            f"checkpointing.metric_name={self.metric_name!r}: write train:NAME or val:NAME (for example val:accuracy), or null "
            "to keep the newest checkpoints"
        )
        metrics = val_metrics if kind == "val" else train_metrics
        if not metrics:
            warnings.warn(
                f"checkpointing.metric_name={self.metric_name!r}, but this step has no {kind} metrics: the checkpoint is "
                "saved without it. Make save_period a multiple of val_period, or set val_at_end.",
                stacklevel=2,
            )
            return {}
        if name not in metrics:
            raise ValueError(
                f"checkpointing.metric_name={self.metric_name!r}: the {kind} metrics have no {name!r}; "
                f"there are {', '.join(sorted(metrics))}"
            )
        return {self.metric_name: float(metrics[name])}

    def get_best_checkpoint_path(self) -> str | None:
        """Folder of the checkpoint with the best metric (ties: the newer); those without it are left out with a
        warning. The latest when none has it or no metric is configured, None when there is none at all."""
        self.recover()
        records = self._store.history()
        ranked = [record for record in records if self._metric(record) is not None]
        missing = [record.step for record in records if self._metric(record) is None]
        advice = "set save_period to a multiple of val_period, or val_at_end"
        if self.metric_name and missing:
            warnings.warn(
                f"Ignoring {len(missing)} checkpoint(s) without metric '{self.metric_name}' (steps {missing}): {advice}",
                stacklevel=2,
            )
        if self.metric_name and missing and not ranked:
            warnings.warn(
                f"No checkpoints contain metric '{self.metric_name}'. Returning latest checkpoint: {advice}",
                stacklevel=2,
            )
        whole = (record for record in self._best_first(ranked) if self._store.problem(record.path) is None)
        best = next(whole, None)
        return str(best.path) if best is not None else self.get_latest_checkpoint_path()

    def remove_old_checkpoints(self, exclude_latest: bool = True) -> None:
        """Removes what no rule keeps, see `_thin_out`; the latest stays with `exclude_latest`."""
        self._store.acquire()
        try:
            self._thin_out(exclude_latest)
        finally:
            self._store.release()
