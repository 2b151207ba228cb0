import pytest
from nemo_rl_cpp.config import ConfigError, load_grpo_config
from nemo_rl_cpp.config.loss import LOSSES, ClippedPGLossConfig

BASE = "configs/grpo_tiny.yaml"


@pytest.mark.parametrize("name", LOSSES)
def test_loss_name_sets_the_configuration_keys_that_define_the_loss(name):
    loss = load_grpo_config(BASE, [f"loss_fn.name={name}"]).loss_fn
    assert loss.name == name
    for key, value in LOSSES[name].items():
        assert getattr(loss, key) == value
    assert ClippedPGLossConfig.model_validate(loss.model_dump()).model_dump() == loss.model_dump()


def test_verl_loss_names_are_translated_to_loss_names_of_this_package():
    names = {"vanilla": "clipped_pg", "geo_mean": "gmpo"}
    assert {name: ClippedPGLossConfig(name=name).name for name in names} == names


def test_loss_agg_mode_overrides_token_level_loss_of_the_shipped_configuration():
    loss = load_grpo_config(BASE, ["loss_fn.loss_agg_mode=seq-mean-token-mean"]).loss_fn
    assert not loss.token_level_loss


def test_dr_grpo_loss_is_normalised_by_max_new_tokens_unless_another_factor_is_set():
    for given, factor in (("policy.generation.max_new_tokens=7", 7), ("loss_fn.loss_scale_factor=100", 100)):
        assert load_grpo_config(BASE, ["loss_fn.name=dr_grpo", given]).loss_fn.loss_scale_factor == factor


@pytest.mark.parametrize("overrides, key", [
    (["loss_fn.name=dapo", "loss_fn.token_level_loss=false"], "token_level_loss is false"),
    (["loss_fn.name=sapo", "loss_fn.use_cispo=true"], "use_cispo"),
    (["loss_fn.name=vespo", "loss_fn.truncated_importance_sampling_type=tis"], "does not go with the loss vespo"),
    (["grpo.adv_estimator.name=pass_at_k", "grpo.adv_estimator.pass_k=8"], "sets that hold them all do not differ"),
    (["loss_fn.name=luspo", "loss_fn.loss_agg_mode=token-mean"], "loss_agg_mode is 'token-mean'"),
    (["loss_fn.name=sapo", "loss_fn.sapo_temperature_pos=0"], "sapo_temperature_pos"),
    (["loss_fn.use_cispo=true", "loss_fn.token_level_loss=false", "loss_fn.sequence_level_importance_ratios=true"],
     "sequence_level_importance_ratios must be false with loss_fn.use_cispo"),
    (["loss_fn.name=gspo", "loss_fn.score_centering_k=6"], "score_centering_k goes with"),
    (["loss_fn.name=gpg", "loss_fn.score_centering_k=6", "loss_fn.use_importance_sampling_correction=true"], "score_centering_k goes with"),
])  # fmt: skip
def test_key_that_contradicts_the_loss_name_is_an_error(overrides, key):
    with pytest.raises(ConfigError, match=key):
        load_grpo_config(BASE, overrides)
