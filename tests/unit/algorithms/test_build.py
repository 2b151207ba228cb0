import pytest
import tiny
from nemo_rl_cpp.algorithms import build, parts
from nemo_rl_cpp.algorithms.checkpointing import Resume
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.logger import LoggerConfig
from nemo_rl_cpp.data.dataloader import MultipleDataloaderWrapper, StatefulDataLoader
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.loggers.logger import Logger


def test_tokenizer_of_the_tiny_random_model_can_be_configured_for_another_model():
    policy = load_grpo_config("grpo_tiny.yaml", ["policy.model_name=./m", "policy.tokenizer.name=tiny-random"]).policy
    assert parts.make_tokenizer(policy).get_vocab() == tiny_tokenizer().get_vocab()


def fail(*given, **more):
    raise RuntimeError("no more threads")


@pytest.mark.parametrize(
    ("steps", "epochs", "warmup", "whole", "of_policy"), [(100, 2, 0, 10, 30), (7, 2, 3, 7, 12), (100, 1, 9, 5, 0)]
)
def test_learning_rate_decay_ends_at_the_last_planned_step_of_the_policy(steps, epochs, warmup, whole, of_policy):
    config = load_ppo_config(
        "ppo_tiny.yaml",
        [f"ppo.max_num_steps={steps}", f"ppo.max_num_epochs={epochs}", f"ppo.policy_training_start_step={warmup}", "ppo.ppo_epochs=3"],
    )  # fmt: skip
    loader = StatefulDataLoader(list(range(10)), 2)
    several = MultipleDataloaderWrapper(2, config.data, {"a": loader})
    assert parts.planned_steps(config.ppo, loader) == whole and parts.planned_steps(config.ppo, several) == steps
    made = parts.make_policy(config, None, Resume(None, TrainState()), None, whole, lambda **given: given)
    assert made["total_steps"] == of_policy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "part"), [(build, "connect_hooks"), (parts, "MseValueLossFn"), (Logger, "log_hyperparams")]
)
def test_log_and_checkpoint_folders_are_unlocked_if_the_setup_of_a_run_fails(tmp_path, monkeypatch, owner, part):
    options = (*tiny.SMALL_PPO, "checkpointing.enabled=true")
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, fail)
        with pytest.raises(RuntimeError, match="no more threads") as refused:  # whose traceback keeps every part alive
            tiny.make(tmp_path, *options, config="ppo_tiny.yaml")
    failed = next((tmp_path / "logs").glob("exp_*"), None)
    if failed is not None:  # the logs of the run that failed may be used at once
        logger = Logger(LoggerConfig(log_dir=str(failed)))
        logger.claim()
        logger.finish()
    tiny.make(tmp_path, *options, config="ppo_tiny.yaml").close()
    assert refused.value.__traceback__ is not None
