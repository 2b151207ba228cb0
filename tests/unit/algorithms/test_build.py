"""A run that cannot be put together leaves nothing held."""

import pytest
import tiny
from nemo_rl_cpp.algorithms import build
from nemo_rl_cpp.loggers.logger import Logger


def fail(*given, **more):
    raise RuntimeError("no more threads")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "part"), [(build, "make_services"), (build, "MseValueLossFn"), (Logger, "log_hyperparams")]
)
def test_folders_are_free_after_a_part_failed(tmp_path, monkeypatch, owner, part):
    options = (
        "checkpointing.enabled=true", "ppo.num_prompts_per_step=8", "ppo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=32", "value.train_global_batch_size=32",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, fail)
        with pytest.raises(RuntimeError, match="no more threads") as refused:  # whose traceback keeps every part alive
            tiny.make(tmp_path, *options, config="ppo_tiny.yaml")
    failed = next((tmp_path / "logs").glob("exp_*"), None)
    if failed is not None:  # the logs of the run that failed may be used at once
        logger = Logger({"log_dir": str(failed)})
        logger.claim()
        logger.finish()
    tiny.make(tmp_path, *options, config="ppo_tiny.yaml").close()
    assert refused.value.__traceback__ is not None
