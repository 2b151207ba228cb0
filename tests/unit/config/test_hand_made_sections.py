import pytest
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.environments.loading import create_env
from nemo_rl_cpp.environments.math_environment import MathEnvironment
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.models.generation.native import NativeGeneration


def reverse_digits(section):
    return create_env("reverse_digits", section)


def generation(section):
    return NativeGeneration(None, section, None)


@pytest.mark.parametrize(("make", "section", "said"), [
    (Logger, {"log_dirs": "x"}, "logger.log_dirs is unknown; did you mean log_dir?"),
    (Logger, {"log_dir": "x", "wandb_enable": True}, "logger.wandb_enable is unknown; did you mean wandb_enabled?"),
    (Logger, {"log_dir": "x", "wandb": {"projct": "p"}}, "logger.wandb.projct is unknown; did you mean project?"),
    (Logger, {"log_dir": "x", 3: 4}, "logger the keys of a mapping must be texts, not int (3)"),
    (CheckpointManager, {"checkpoint_dir": "x", "save_perod": 5}, "checkpointing.save_perod is unknown; did you mean save_period?"),
    (CheckpointManager, {"checkpoint_dir": "x", "keep_topk": 5}, "checkpointing.keep_topk is unknown; did you mean keep_top_k?"),
    (MathEnvironment, {"num_workers": 1, "bogus": 2}, "env.math.bogus is unknown; the section knows math_verify_impl, "),
    (reverse_digits, {"bogus": 2}, "env.reverse_digits.bogus is unknown; the section takes no keys"),
    (reverse_digits, 3, "env.reverse_digits must be a section (lines of key: value), not 3"),
    (generation, {"max_tokens": 5}, "policy.generation.max_tokens is unknown"),
    (generation, {"temprature": 5}, "policy.generation.temprature is unknown; did you mean temperature?"),
    (generation, {"vllm_cfg": {"max_model_length": 5}}, "policy.generation.vllm_cfg.max_model_length is unknown; did you mean max_model_len?"),
])  # fmt: skip
def test_error_for_an_unknown_key_of_a_python_mapping_suggests_a_known_key(tmp_path, monkeypatch, make, section, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refused:
        make(section)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
