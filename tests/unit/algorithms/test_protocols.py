"""The interfaces of policy, critic, generation, weight synchroniser, environment and logger back end: what is declared is called,
and is implemented.

A fake policy and a fake engine, written against the Protocols alone, run the whole loop."""

import inspect
from functools import partial

import pytest
import tiny
from nemo_rl_cpp.algorithms.build import connect_hooks
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.config.logger import LOGGER_BACKENDS, LoggerConfig, TensorboardConfig, register_logger
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.environments.loading import create_env, environment_class
from nemo_rl_cpp.loggers.folders import JsonlLogger
from nemo_rl_cpp.loggers.interface import LoggerInterface
from nemo_rl_cpp.loggers.tensorboard import TensorboardLogger
from nemo_rl_cpp.models.generation.hf import HfGeneration
from nemo_rl_cpp.models.generation.interfaces import end_engine
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.models.hf.trained import HfPolicy, HfValue
from nemo_rl_cpp.models.interfaces import GenerationInterface, PolicyInterface, ValueInterface
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.weight_sync import SharedWeights, WeightSynchronizer
from registered import forget

NATIVE = {
    PolicyInterface: [HfPolicy, Policy],
    ValueInterface: [HfValue, Value],
    GenerationInterface: [HfGeneration, NativeGeneration],
    WeightSynchronizer: [SharedWeights],
    Environment: [environment_class(name) for name in ENV_REGISTRY],
    LoggerInterface: [JsonlLogger, *LOGGER_BACKENDS.values()],
}


def declared(protocol):
    """The names of a Protocol, those that it inherits included."""
    names = {name for cls in protocol.__mro__ for name in [*vars(cls), *inspect.get_annotations(cls)]}
    return {name for name in names if not name.startswith("_")}


class Recorder:
    """Stands before `thing` and notes each public name that is asked of it."""

    def __init__(self, thing, asked):
        object.__setattr__(self, "_thing", thing)
        object.__setattr__(self, "_asked", asked)

    def __getattr__(self, name):
        self._asked.add(name)
        return getattr(self._thing, name)

    def __setattr__(self, name, value):
        raise AssertionError(f"{name} is set from outside, which no Protocol says")


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """By Protocol: the names that GRPO and PPO with all that uses a model ask for, in runs that save and meet a full disk."""
    names = {protocol: set() for protocol in NATIVE}
    watched = (
        "checkpointing.enabled=true", "checkpointing.save_period=2", "checkpointing.metric_name=null",
        "loss_fn.reference_policy_kl_penalty=0.1", "policy.reuse_generation_logprobs=never", "++logger.watched_enabled=true",
    )  # fmt: skip
    logger = lambda *given, **more: Recorder(TensorboardLogger(*given, **more), names[LoggerInterface])  # noqa: E731
    register_logger("watched", logger, TensorboardConfig)
    try:
        grpo = [("grpo_tiny.yaml", (*tiny.SMALL, *options)) for options in (TAUGHT, OF_WHOLE_DISTRIBUTIONS)]
        for config, options in (*grpo, ("ppo_tiny.yaml", PPO)):
            section = config.partition("_")[0]
            kl = f"{section}.skip_reference_policy_logprobs_calculation=false"
            folder = tmp_path_factory.mktemp(section)
            for steps in (2, 3) if section == "grpo" else (2,):  # the second run resumes the first
                run = tiny.make(
                    folder, *options, *watched, kl, f"{section}.max_num_steps={steps}", config=config,
                    policy_factory=lambda **given: Recorder(Policy(**given), names[PolicyInterface]),
                    environment=Recorder(create_env("reverse_digits"), names[Environment]),
                )  # fmt: skip
                with run:
                    watch(run, names)
                    run.train()
                    for model in run.models.values():
                        assert model.learning_rate > 0  # which only the message about weights that are not finite asks
    finally:
        forget(LOGGER_BACKENDS.data, "watched", LoggerConfig, ("watched", "watched_enabled"))
    return names


def watch(run, names):
    """Puts recorders before what is made while a run is built."""
    collector = run.collector
    collector.generation = Recorder(collector.generation, names[GenerationInterface])
    collector.roll_out = partial(collector.roll_out.func, collector.generation, **collector.roll_out.keywords)
    collector.refit._generation = collector.generation
    run.resources.callback(end_engine, collector.generation)
    collector.refit = Recorder(collector.refit, names[WeightSynchronizer])
    if "value" in run.models:
        run.critic.model = Recorder(run.critic.model, names[ValueInterface])
        connect_hooks(run)  # which save and check the recorder's model
    run.checkpoints.owed = True  # a save was missed: the loop asks whether there is room for it


TEACHER = "on_policy_distillation={enabled:true,teacher_model_by_agent_name:{x:tiny-random}}"
TAUGHT = ("grpo.adv_estimator.name=opd", TEACHER)
OF_WHOLE_DISTRIBUTIONS = (
    "grpo.adv_estimator.name=optimal_token_baseline", "loss_fn.name=gpg", "loss_fn.score_centering_k=2",
    "loss_fn.top_entropy_quantile=0.5",
)  # fmt: skip
PPO = (*tiny.SMALL_PPO, "ppo.ppo_epochs=1", "ppo.policy_training_start_step=0")


@pytest.mark.parametrize("protocol", NATIVE, ids=lambda protocol: protocol.__name__)
def test_typing_protocols_declare_exactly_the_methods_that_the_package_calls(asked, protocol):
    assert {name for name in asked[protocol] if not name.startswith("_")} == declared(protocol)


PAIRS = [(protocol, native) for protocol, natives in NATIVE.items() for native in natives]


@pytest.mark.parametrize(("protocol", "native"), PAIRS, ids=lambda cls: cls.__name__)
def test_classes_implement_every_method_of_their_typing_protocol_with_equal_parameters(protocol, native):
    for name in declared(protocol):
        own = next(vars(cls)[name] for cls in native.__mro__ if name in vars(cls))
        promised = inspect.getattr_static(protocol, name, None)
        is_default = protocol is LoggerInterface and not getattr(promised, "__isabstractmethod__", False)
        assert promised is None or own is not promised or is_default, f"{native.__name__} does not implement {name}"
        if inspect.isfunction(promised):
            parameters = inspect.signature(own).parameters
            missing = [
                each for each, parameter in inspect.signature(promised).parameters.items()
                if each not in parameters and parameter.kind is not parameter.VAR_KEYWORD
            ]  # fmt: skip
            assert not missing or any(p.kind is p.VAR_KEYWORD for p in parameters.values()), (name, missing)
            assert (promised.__doc__ or "").strip(), name


# ---- a back end that knows the Protocols and nothing else of the house
