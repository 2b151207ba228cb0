import pytest
from nemo_rl_cpp.environments.loading import create_env
from nemo_rl_cpp.environments.math_environment import MathEnvironment
from nemo_rl_cpp.models.generation.native import NativeGeneration


def reverse_digits(section):
    return create_env("reverse_digits", section)


def generation(section):
    return NativeGeneration(None, section, None)


@pytest.mark.parametrize(("make", "section", "said"), [
    (MathEnvironment, {"num_workers": 1, 3: 4}, "env.math the keys of a mapping must be texts, not int (3)"),
    (MathEnvironment, {"num_workers": 1, "bogus": 2}, "env.math.bogus is unknown; the section knows math_verify_impl, "),
    (reverse_digits, {"bogus": 2}, "env.reverse_digits.bogus is unknown; the section takes no keys"),
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
