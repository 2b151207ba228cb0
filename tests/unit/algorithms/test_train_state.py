import json

from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.config.access import to_json


def test_train_state_counts_steps_and_finishes_at_the_step_limit():
    state = TrainState(max_num_steps=2)
    assert state.draw(8) == 0 and state.draw(4) == 8 and state.draw_counter == 12
    assert not state.finished
    state.advance(num_prompts=8, num_valid_tokens=100)
    assert (state.step, state.current_step, state.consumed_samples, state.total_valid_tokens) == (1, 1, 8, 100)
    assert not state.finished
    state.next_epoch()
    assert (state.current_epoch, state.current_step, state.total_steps) == (1, 0, 1)
    state.advance()
    assert state.finished and state.stop_reason == "max_num_steps"


def test_train_state_finishes_at_the_epoch_limit_and_keeps_the_first_stop_reason():
    state = TrainState(max_num_epochs=1)
    state.next_epoch()
    assert state.finished and state.stop_reason == "max_num_epochs"
    state.stop("interrupted")
    assert state.stop_reason == "max_num_epochs"
    other = TrainState()
    other.stop("early_stop")
    assert other.finished and other.stop_reason == "early_stop"


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
    again = TrainState.from_training_info(info)
    assert again == TrainState(consumed_samples=64, total_steps=3, draw_counter=80, log_dir="logs/exp_001")
    assert not again.finished, "a run that was interrupted may go on"
    state.val_reward = float("inf")
    written = json.loads(json.dumps(to_json(state.to_training_info())))
    assert TrainState.from_training_info(written).val_reward == float("inf")


def test_saved_train_state_may_have_unknown_keys_and_missing_keys_get_defaults():
    state = TrainState.from_training_info({"total_steps": 7, "from_a_newer_version": 1, "val:accuracy": 0.1})
    assert state == TrainState(total_steps=7)
    assert TrainState.from_training_info(None) == TrainState()
