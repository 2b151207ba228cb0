import re
from pathlib import Path

import nemo_rl_cpp
import pytest
from nemo_rl_cpp.api import training
from nemo_rl_cpp.config.errors import OF_TRL

ROWS = [{"prompt": f"{a}{b}=", "answer": f"{a}" * 3} for a in range(10) for b in range(2)]
SMALL = dict(num_steps=1, num_prompts_per_step=2, num_generations=2, max_new_tokens=3, max_length=16)


def reward(completions, **columns):
    return [float(len(text)) for text in completions]


class OnSteps:
    def on_steps(self, event):
        pass


class OfTRL:
    def on_step_end(self, args, state, control):
        pass


class Plateau(nemo_rl_cpp.Callback):
    pass


class RewardModel:
    """As torch's modules are."""

    def parameters(self):
        return []

    def forward(self, ids):
        return ids

    __call__ = forward


def compute_score(data_source, solution_str, ground_truth):  # verl's
    return 0.0


class NoMethod(nemo_rl_cpp.AdvantageEstimator):
    pass


WRONG = [
    ({"learnig_rate": 1e-5}, "learnig_rate is unknown; did you mean learning_rate?"),
    ({"max_completion_length": 8}, "max_completion_length is unknown; did you mean max_new_tokens?"),
    ({"save_period": 5}, "save_period is unknown; did you mean checkpointing__save_period?"),
    ({"save_steps": 5}, "save_steps is unknown; did you mean checkpointing__save_period?"),
    ({"args": 5}, "args is unknown; docs/guides/python.md lists the arguments"),
    ({"use_dynamic_samplin": True}, "use_dynamic_samplin is unknown; did you mean use_dynamic_sampling?"),
    ({"loss_fn__ratio_clip_mx": 1}, "argument loss_fn__ratio_clip_mx: loss_fn.ratio_clip_mx is unknown; did you mean ratio_clip_max?"),
    ({"dataset": ROWS}, "prompts and dataset are the same thing"),
    ({"validation": [1]}, "row 0 of validation is 1"),
    ({"num_prompts_per_step": 0}, "argument num_prompts_per_step: grpo.num_prompts_per_step must be at least 1, not 0"),
    ({"stop_strings": [""]}, "argument stop_strings: policy.generation.stop_strings holds an empty string"),
    ({"log_dir": 3}, "log_dir is 3; it must be the path of a folder"),
    ({"checkpoint_dir": ""}, "checkpoint_dir is ''; it must be the path of a folder"),
    ({"num_generation": 4}, "num_generation is unknown; did you mean num_generations?"),
    ({"lora": "yes"}, "lora is .*: give True, a rank such as 16, or keys"),
    ({"policy__dtensor_cfg__lora_cfg__alpha": 8}, "lora_cfg.alpha is 8, but all weights are trained"),
    ({"lora": {"r": 8}}, "lora_cfg.r is unknown"),
    ({"ppo_epochs": 2}, "ppo_epochs is unknown; it is a key of train_ppo"),
    ({"prompts": reward, "reward_funcs": ROWS}, "prompts is a function: .* the order of arguments is model, prompts, reward_funcs"),
    ({"reward_funcs": None}, "reward_funcs is missing: give a function of (completions, **columns)"),
    ({"reward_funcs": {"a": reward}, "reward_weights": {"b": 1}}, "reward_weights has ['b'], but reward_funcs has ['a']: give equal names"),
    ({"learning_rate": "1e-5"}, "argument learning_rate: policy.optimizer.kwargs.lr must be a number, not '1e-5'"),
    ({"resume": "yes"}, "resume is 'yes': give True (go on with the run in checkpoint_dir), False (begin a new one) or None (either)"),
    ({"resume": True}, "resume is True, but there is no checkpoint_dir: give the folder of the run"),
    ({"seed": 3, "grpo__seed": 4}, "seed and grpo__seed are the same thing: give one of them"),
    ({"checkpoint_dir": "a", "checkpointing__checkpoint_dir": "b"}, "checkpoint_dir and checkpointing__checkpoint_dir are the same thing"),
    ({"adv_estimator": lambda rewards: rewards, "grpo__adv_estimator__name": "gdpo"}, "adv_estimator and grpo__adv_estimator__name are the same"),
    ({"loss_fn": lambda next_token_logprobs: 0, "loss_fn__name": "mymod.other"}, "loss_fn and loss_fn__name are the same thing"),
    ({"adv_estimator": "gdpo"}, "adv_estimator is gdpo, but reward_funcs is one function: give two"),
    ({"grpo__adv_estimator__name": "gdpo"}, "but reward_funcs is one function: give two"),
    ({"adv_estimator": {"name": "gdpo", "reward_weights": [1, 2]}, "reward_weights": [1, 3], "reward_funcs": [reward, reward]},
     "reward_weights and adv_estimator are the same thing: give one of them"),
    ({"adv_estimator": "gdpo", "grpo__adv_estimator__reward_weights": [1, 2], "reward_weights": [1, 3], "reward_funcs": [reward, reward]},
     "reward_weights and grpo__adv_estimator__reward_weights are the same thing: give one of them"),
    ({"callbacks": print}, "callbacks is a builtin_function_or_method: give a list of objects derived from nemo_rl_cpp.Callback"),
    ({"callbacks": [Plateau]}, "callbacks[0] is the class Plateau: give an object of it, Plateau()"),
    ({"callbacks": OnSteps()}, "callbacks[0] has the method OnSteps.on_steps, which nothing calls; the methods are on_step, on_validation, on_checkpoint, on_end"),
    ({"callbacks": [OfTRL()]}, "callbacks[0] has the method OfTRL.on_step_end, which nothing calls; the methods are on_step, on_validation, on_checkpoint, on_end"),
    ({"adv_estimator": "gdop"}, "argument adv_estimator: grpo.adv_estimator.name must be one of grpo, gdpo, .*; did you mean gdpo?"),
    ({"adv_estimator": "no_such.Thing"}, "grpo.adv_estimator.name cannot be used: advantage estimator 'no_such.Thing' cannot be imported"),
    ({"adv_estimator": NoMethod}, "advantage estimator NoMethod lacks compute_advantage, which nemo_rl_cpp.AdvantageEstimator asks for"),
    ({"adv_estimator": {"power": 2}}, "argument adv_estimator: grpo.adv_estimator.power is unknown"),
    ({"loss_fn": 3}, "loss_fn is 3: give a function, an object or a class of yours, its dotted name, or a mapping of keys of loss_fn"),
    # users of verl and of TRL's newer versions
    ({"policy.generation.top_p": 0.9}, "policy.generation.top_p is unknown; a key of the configuration is written policy__generation__top_p"),
    ({"reward_funcs": compute_score},
     "reward function compute_score asks for data_source and solution_str and ground_truth, but the samples have answer, completions, prompts; "
     "every function may ask for prompts and completions, lists of texts"),
    ({"reward_funcs": RewardModel()}, "reward_funcs is a RewardModel, a model: give a function of (prompts, completions) that asks it"),
    ({"reward_funcs": "OpenAssistant/reward-model"}, "'OpenAssistant/reward-model' is no dotted name"),
    ({"model": RewardModel()}, "model is a RewardModel; it must be a folder, a packaged model, or a name on the hub"),
    ({"loss_fn": {"kwargs": {"a": 1}}}, "loss_fn.kwargs go to a class or function of yours, but loss_fn.name is clipped_pg: leave them out"),
]  # fmt: skip
WRONG_PPO = [
    ({"ppo__adv_estimator__uses_critic": False}, "ppo.adv_estimator.uses_critic is for an estimator of yours, but .* gae needs a critic"),
    ({"critic_learning_rate": -1.0}, "argument critic_learning_rate: value.optimizer.kwargs.lr"),
    ({"adv_estimator": "grpo"}, "argument adv_estimator: ppo.adv_estimator.name must be one of gae, raw_reward, opd, a dotted name, not 'grpo'"),
]  # fmt: skip


def one_sentence(caught, words):
    pattern = ".*".join(map(re.escape, words.split(".*")))
    assert re.search(pattern, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("train", "given", "words"),
    [(train, *case) for train, cases in ((nemo_rl_cpp.train_grpo, WRONG), (nemo_rl_cpp.train_ppo, WRONG_PPO)) for case in cases],
    ids=range(len(WRONG) + len(WRONG_PPO)),
)  # fmt: skip
def test_invalid_training_call_is_a_one_line_error_before_training(tmp_path, monkeypatch, train, given, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "_train", lambda *parts: pytest.fail("training began"))
    with pytest.raises(ValueError) as caught:
        train(**{"model": "tiny-random", "prompts": ROWS, "reward_funcs": reward} | SMALL | given)
    one_sentence(caught, words)
    assert list(tmp_path.iterdir()) == []


def test_suggested_replacements_of_trl_keywords_equal_those_in_the_trl_migration_guide():
    rows = (Path(__file__).parents[3] / "docs" / "coming-from-trl.md").read_text().splitlines()
    for theirs, ours in OF_TRL.items():
        own = [row for row in rows if re.search(rf"\b{theirs}\b", row) and row.startswith("|")]
        assert any(ours.format("grpo") in row for row in own), (theirs, ours)


async def late(text):
    return float(len(text))


def test_reward_function_that_returns_a_coroutine_is_a_one_line_error_that_names_the_function(tmp_path):
    def mine(completions):
        return [late("a"), *[1.0] * (len(completions) - 1)]

    with pytest.raises(ValueError) as caught:
        nemo_rl_cpp.train_grpo("tiny-random", ROWS, mine, **SMALL, log_dir=tmp_path)
    words = "returned a coroutine for completion 0: make the function async and await each"
    one_sentence(caught, f"reward function mine .*{words}")
