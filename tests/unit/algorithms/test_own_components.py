import copy
import pickle

import nemo_rl_cpp
import pytest
import tiny
import torch
from nemo_rl_cpp.algorithms.advantage_estimator import make_estimator
from nemo_rl_cpp.algorithms.custom_components import OwnEstimator, OwnLoss, make_loss, own_loss
from nemo_rl_cpp.checks.data import check_environments
from nemo_rl_cpp.config import ConfigError, load_grpo_config, load_ppo_config
from recipes.own_loss import Reinforce, to_go

OWN = "recipes.own_loss."
REWARDS, MASK = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([[0.0, 1, 1], [0, 1, 0], [0, 1, 1]])
SECTION = load_grpo_config("grpo_tiny.yaml").loss_fn


def grpo(*overrides):
    return load_grpo_config("grpo_tiny.yaml", list(overrides))


def ppo(*overrides):
    return load_ppo_config("ppo_tiny.yaml", list(overrides))


def estimator(function, config=None):
    config = config or grpo()
    return OwnEstimator(function, config.algorithm, config.loop.adv_estimator, config.loss_fn)


def advantages(own, **more):
    return own.compute_advantage(prompt_ids=torch.zeros(3, 3), rewards=REWARDS, mask=MASK, **more)


def test_custom_advantage_estimator_receives_the_arguments_that_its_signature_names():
    seen = {}

    def every(rewards, **batch):
        seen.update(batch)
        return rewards

    assert advantages(estimator(lambda rewards, group_id: rewards * group_id), group_id=torch.tensor([0, 1, 2])).tolist() == [
        [0, 0, 0], [0, 0, 0], [4, 4, 4],
    ]  # fmt: skip
    advantages(estimator(every), group_id=None, values=3)
    assert set(seen) == {"prompt_ids", "mask", "group_id", "values"}


@pytest.mark.parametrize(("given", "words"), [
    (lambda rewards: 1.0, r"must return advantages as a tensor of shape \[3\] or \[3, 3\], but returned 1.0"),
    (lambda rewards: rewards[:2], r"but returned one of \[2\]"),
    (lambda rewards: rewards / 0, "returned inf as advantages of sample 0, token 1"),
    (lambda rewards: rewards[5], "failed with IndexError"),
])  # fmt: skip
def test_invalid_return_values_of_a_custom_advantage_estimator_are_errors(given, words):
    with pytest.raises((ValueError, IndexError), match=words) as caught:
        advantages(estimator(given))
    assert "\n" not in str(caught.value)


def test_custom_advantages_may_be_nan_at_masked_tokens():
    masked = torch.where(MASK == 1, 1.0, torch.nan)
    assert advantages(estimator(lambda rewards: masked))[0, 1] == 1.0


def test_custom_estimator_that_returns_no_critic_targets_is_an_error_in_ppo():
    config = ppo(f"ppo.adv_estimator.name={OWN}no_critic")
    with pytest.raises(ValueError, match="returned no returns, which the critic learns from"):
        advantages(estimator(lambda rewards: rewards, config))
    config.ppo.adv_estimator.uses_critic = False
    given, returns = advantages(estimator(lambda rewards: rewards, config))
    assert returns is None and given.shape == (3, 3) and not config.has_critic


def test_custom_loss_receives_the_arguments_that_its_signature_names():
    leaf = torch.zeros(2, 2, requires_grad=True)
    data = {"token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2), "advantages": torch.ones(2, 3)}
    counts = {"global_valid_seqs": torch.tensor(2.0), "global_valid_toks": torch.tensor(4.0)}
    value, metrics = OwnLoss(Reinforce(2.0), SECTION)(data=data, next_token_logprobs=leaf, **counts)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert gradient.tolist() == [[-0.5, -0.5], [-0.5, -0.5]] and metrics == {"own_loss_samples": 2.0}


def test_custom_loss_function_can_read_the_section_of_its_keys():
    leaf = torch.zeros(2, 2, requires_grad=True)
    loss = OwnLoss(
        lambda next_token_logprobs, loss_config: (next_token_logprobs + loss_config.ratio_clip_min).sum(), SECTION
    )
    value, _ = loss(data={}, global_valid_seqs=None, global_valid_toks=None, next_token_logprobs=leaf)
    assert value.item() == pytest.approx(4 * SECTION.ratio_clip_min)


@pytest.mark.parametrize(("given", "words"), [
    (lambda logprobs, data: 3.0, "asks for logprobs, but its inputs are data, global_valid_seqs, global_valid_toks, next_token_logprobs"),
    (lambda data: 3.0, "must return a scalar tensor, or .scalar tensor, metrics., but returned 3.0"),
    (lambda next_token_logprobs: next_token_logprobs, r"but returned a Tensor of shape \[2, 2\]"),
    (lambda data: torch.tensor(1.0), "does not depend on next_token_logprobs"),
    (lambda data: data["rewards"], "failed with KeyError 'rewards'"),
])  # fmt: skip
def test_invalid_return_values_of_a_custom_loss_are_errors(given, words):
    leaf = torch.zeros(2, 2, requires_grad=True)
    with pytest.raises((ValueError, KeyError), match=words):
        OwnLoss(given, SECTION)(data={}, global_valid_seqs=None, global_valid_toks=None, next_token_logprobs=leaf)


def test_custom_loss_is_pickled_as_its_configured_dotted_name():
    config = grpo(f"loss_fn.name={OWN}Reinforce", "loss_fn.kwargs={scale:3.0}")
    again = pickle.loads(pickle.dumps(make_loss(config.loss_fn)))
    assert again._made.component.scale == 3.0 and again.loss_type is again._made.component.loss_type
    with pytest.raises(ValueError, match="was given as an object, which other processes do not have: set loss_fn.name"):
        copy.copy(OwnLoss(Reinforce(), SECTION))


def test_built_in_loss_configured_by_name_is_not_wrapped_as_a_custom_loss():
    loss = nemo_rl_cpp.algorithms.loss.ClippedPGLossFn(SECTION)
    assert own_loss(loss, SECTION) is loss and hasattr(loss, "token_loss")


@pytest.mark.parametrize(("overrides", "words"), [
    ([f"grpo.adv_estimator.name={OWN}Centerd"], "recipes.own_loss has no Centerd; did you mean Centred?"),
    (["loss_fn.name=nowhere.Loss"], "there is no module nowhere"),
])  # fmt: skip
def test_preflight_check_reports_custom_components_that_cannot_be_imported(overrides, words):
    (finding,) = check_environments(grpo(*overrides))
    assert finding.level == "error" and finding.key in ("grpo.adv_estimator.name", "loss_fn.name")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(finding.message)


@pytest.mark.parametrize(("overrides", "words"), [
    ([f"grpo.adv_estimator.name={OWN}Centred", "grpo.adv_estimator.kwargs={powr:2}"], "Centred.* unexpected keyword argument 'powr'"),
    (["grpo.adv_estimator.name=math.pi"], "is 3.14159.* without compute_advantage: derive it from nemo_rl_cpp.AdvantageEstimator"),
    ([f"loss_fn.name={OWN}Centred"], "Centred is a .* without __call__: derive it from nemo_rl_cpp.LossFunction, or give a function"),
])  # fmt: skip
def test_error_for_a_failing_constructor_of_a_custom_component_names_the_component(overrides, words):
    config = grpo(*overrides)
    with pytest.raises((ValueError, TypeError), match=words):
        make_loss(config.loss_fn)
        make_estimator("grpo", config.loop.adv_estimator, config.loss_fn)


def test_error_for_an_unavailable_argument_of_a_custom_estimator_names_the_argument():
    with pytest.raises(ValueError, match="to_go asks for values, but its inputs are prompt_ids, rewards, mask"):
        advantages(estimator(to_go))


@pytest.mark.parametrize(
    "overrides", [["grpo.adv_estimator.kwargs={a:1}"], ["loss_fn.kwargs={a:1}"], ["loss_fn.name=reinforce"], ["loss_fn.name=a..b"]]
)  # fmt: skip
def test_keyword_arguments_without_a_configured_custom_component_are_an_error(overrides):
    with pytest.raises(ConfigError, match="go to a class or function of yours|one of clipped_pg, .* a dotted name"):
        grpo(*overrides)


def test_run_trains_with_a_custom_estimator_and_loss(tmp_path):
    kwargs = "grpo.adv_estimator.kwargs={power:2}"
    names = (f"grpo.adv_estimator.name={OWN}Centred", kwargs, f"loss_fn.name={OWN}Reinforce")
    with tiny.make(tmp_path, *tiny.SMALL, *names, "grpo.max_num_steps=2") as run:
        before = run.policy.weight_digest()
        run.train()
    assert run.history[-1]["advantage/power"] == 2.0 and run.history[-1]["own_loss_samples"] > 0
    assert run.policy.weight_digest() != before


def test_custom_reinforce_loss_matches_the_native_loss(tmp_path):
    """The guide's REINFORCE and the native loss without ratio give the same weights up to rounding."""
    weights = {}
    for name, overrides in {
        "own": [f"loss_fn.name={OWN}Reinforce"],
        "ours": ["loss_fn.disable_ppo_ratio=true"],
    }.items():
        with tiny.make(tmp_path / name, *tiny.SMALL, *overrides, "grpo.max_num_steps=1") as run:
            run.train()
        weights[name] = run.policy.state_dict()
    for key, ours in weights["ours"].items():
        torch.testing.assert_close(weights["own"][key], ours, rtol=0, atol=2e-6, msg=key)
