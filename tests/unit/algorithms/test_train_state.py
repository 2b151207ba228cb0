import json

from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.config.access import to_json


def test_train_state_replaces_the_best_validation_metric_only_with_a_better_value():
    state = TrainState(total_steps=10)
    for value in (float("nan"), 0.5, 0.7, 0.6):
        state.note_metric(value)
    assert (state.best_metric, state.best_metric_step) == (0.7, 10)
    state.total_steps = 20
    state.note_metric(0.7)
    assert state.best_metric_step == 10
    state.note_metric(0.4, higher_is_better=False)
    assert (state.best_metric, state.best_metric_step) == (0.4, 20)


def test_train_state_is_restored_from_a_checkpoint_without_stop_reason_and_step_limit():
    state = TrainState(consumed_samples=64, total_steps=3, draw_counter=80, log_dir="logs/exp_001", max_num_steps=5)
    state.stop("interrupted")
    info = state.to_training_info({"val:accuracy": 0.5})
    assert info["val:accuracy"] == 0.5 and info["stop_reason"] == "interrupted"
    assert "val_reward" not in info and "max_num_steps" not in info
    again = TrainState.from_training_info(info | {"from_a_newer_version": 1})
    assert again == TrainState(consumed_samples=64, total_steps=3, draw_counter=80, log_dir="logs/exp_001")
    assert not again.finished, "a run that was interrupted may go on"
    assert TrainState.from_training_info(None) == TrainState()
    state.val_reward = float("inf")
    written = json.loads(json.dumps(to_json(state.to_training_info())))
    assert TrainState.from_training_info(written).val_reward == float("inf")
