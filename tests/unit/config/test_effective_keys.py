"""Every key of a training run is effective, without effect, or refused, as the schema says; effective ones are shown to be so.

A key is effective if a run reads it, or if another value of it changes something else: another key, what is said about the
configuration, the data, or whether the configuration is accepted. Reads are seen by watching the attributes of all sections
while tiny runs train; checks of the configuration do not count as reads."""

import functools
import importlib.util
import json
import re
import sys
from unittest.mock import MagicMock

import forked_workers
import pytest
import tiny
import vllm_server_stand_in
from documents.snippets import ROOT
from nemo_rl_cpp.algorithms import build
from nemo_rl_cpp.algorithms.parts import make_data, make_tokenizer
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.base import Section, dotted_fields, field_name, section_at, section_type
from nemo_rl_cpp.config.fold import fold_text
from nemo_rl_cpp.config.master import GRPOMasterConfig, PPOMasterConfig
from nemo_rl_cpp.config.optimizer import PARALLEL_SIZES
from nemo_rl_cpp.environments.remote import ActorSettings
from nemo_rl_cpp.environments.single_turn import SingleTurnEnvironment
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.models.generation.vllm.server import client_of

sys.path.insert(0, str(ROOT / "docs" / "site"))
from configuration_pages import status_of  # noqa: E402

TRACKERS = ("wandb", "swanlab", "mlflow", "trackio")
MASTERS = {"grpo": GRPOMasterConfig, "ppo": PPOMasterConfig}
SHAPES = [  # {}: the section, grpo or ppo
    ("checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.metric_name=val:accuracy", "{}.val_period=1",
     "{}.val_at_end=true", "{}.stop_at_validation_metric=accuracy", "{}.stop_at_validation_threshold=2.0",
     "logger.monitor_gpus=true", "policy.generation.expose_http_server=true", *(f"logger.{name}_enabled=true" for name in TRACKERS)),
    ("{}.reward_scaling.enabled=true", "{}.reward_shaping.enabled=true", "{}.reward_shaping.overlong_buffer_length=2",
     "{}.reward_shaping.overlong_buffer_penalty=0.1", "{}.reward_shaping.max_response_length=3", "{}.use_dynamic_sampling=true",
     "{}.batch_multiplier=1.5", "policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=false"),
    ("{}.reward_shaping.enabled=true", "{}.reward_shaping.stop_properly_penalty_coef=0.5", "policy.sequence_packing.enabled=false",
     "data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=8", "policy.tokenizer.chat_template=default",
     "++reward_penalties={{penalize_unwanted_tokens:true,penalize_malformed_think_tag:true,"
     "token_ids:{{unwanted:[99],think_open:97,think_close:98}}}}"),
    ("policy.backend=hf", "loss_fn.name=dr_grpo"),
    ("loss_fn.name=clip_cov", "loss_fn.top_entropy_quantile=0.5"),
    ("loss_fn.name=kl_cov",),
]  # fmt: skip
SEVERAL = ("{0}.async_{0}.in_flight_weight_updates=true", "cluster.executor=processes", "cluster.gpus_per_node=3", "policy.generation.colocated.enabled=false",
           "policy.generation.colocated.resources.gpus_per_node=1", "{0}.async_{0}.enabled=true",
           "loss_fn.use_importance_sampling_correction=true")  # fmt: skip
ONLY_GRPO = [
    SEVERAL,
    ("grpo.adv_estimator.name=reinforce_plus_plus", "policy.dtensor_cfg.lora_cfg.enabled=true"),
    ("grpo.adv_estimator.name=gdpo", "policy.megatron_cfg.enabled=true", "++policy.dtensor_cfg.enabled=false", "++policy.megatron_cfg.peft.enabled=true"),
    ("grpo.adv_estimator.name=pass_at_k", "grpo.adv_estimator.pass_k=2"),
    ("grpo.adv_estimator.name=opd", "grpo.adv_estimator.outcome_advantage_weight=0.5", "grpo.adv_estimator.proximal_teacher_alpha=0.5",
     "on_policy_distillation={{enabled:true,teacher_model_by_agent_name:{{x:tiny-random}},default_teacher_alias:x}}"),
    ("grpo.adv_estimator.name=recipes.own_loss.Centred", "grpo.adv_estimator.kwargs={{power:2}}",
     "loss_fn.name=recipes.own_loss.Reinforce", "loss_fn.kwargs={{scale:2.0}}"),
    ("++grpo.length_penalty={{profile_band:{{enabled:true,defaults:{{total:{{a:1.0,b:2.0,f:0.5}},reasoning:{{a:-2.0,b:-1.0,f:0.5}},"
     "answer:{{a:1.0,b:2.0,f:0.5}}}}}},default:{{profiled_length_penalty:0.1,total_bonus:0.1,reasoning_bonus:0.1,answer_bonus:0.1,longest_total_penalty:0.1,"
     "longest_reasoning_penalty:0.1,longest_answer_penalty:0.1,group_total_length_penalty_coeff:0.1,"
     "group_reasoning_length_penalty_coeff:0.1,group_answer_length_penalty_coeff:0.1,total_zmad_threshold:1.0,total_zmad_penalty:0.1,"
     "reasoning_zmad_threshold:1.0,reasoning_zmad_penalty:0.1,answer_zmad_threshold:1.0,answer_zmad_penalty:0.1,"
     "profile_band_total:true,profile_band_reasoning:true,profile_band_answer:true,group_length_penalty_profile_gate:true}}}}",),
]  # fmt: skip
ONLY_PPO = [
    SEVERAL,
    ("ppo.adv_estimator.name=recipes.own_loss.to_go", "ppo.adv_estimator.kwargs={{factor:0.5}}",
     "loss_fn.name=recipes.own_loss.Reinforce", "loss_fn.kwargs={{scale:2.0}}"),
    ("value.megatron_cfg.enabled=false", "++value.dtensor_cfg.enabled=true", "value.optimizer={{kwargs:{{lr:1e-3}}}}", "value.max_grad_norm=1.0",
     "++value.dtensor_cfg.lora_cfg.enabled=true", "policy.megatron_cfg.enabled=false", "++policy.dtensor_cfg.enabled=true",
     "policy.optimizer={{kwargs:{{lr:1e-3}}}}", "++policy.dtensor_cfg.lora_cfg.enabled=true"),
    ("value.dynamic_batching.enabled=true", "value.sequence_packing.enabled=false", "++policy.megatron_cfg.peft.enabled=true",
     "++value.megatron_cfg.peft.enabled=true", "value.megatron_cfg.scheduler.lr_warmup_iters=1"),
    ("ppo.adv_estimator.name=opd", "ppo.adv_estimator.outcome_advantage_weight=0.5",
     "on_policy_distillation={{enabled:true,teacher_model_by_agent_name:{{x:tiny-random}},default_teacher_alias:x}}"),
]  # fmt: skip
WITH_VLLM = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.python={python}")
OF_A_SERVER = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.server_url=http://127.0.0.1:9",
               "policy.generation.vllm_cfg.http_refit_api_key_env_var=HOME")  # fmt: skip
CHECKS = ("/config/rules", "/config/fold.py", "/config/loader.py", "/config/master.py", "/report/given.py")
PASSES_ON = ("/config/base.py", "/config/access.py")


class Alternating(SingleTurnEnvironment):
    """Every other response is right, so that each group has both; in two parts where an estimator wants them."""

    def __init__(self, in_parts):
        self.in_parts = in_parts

    def step(self, message_log_batch, metadata):
        answer = self._finish([row % 2 for row in range(len(metadata))], metadata)
        return answer._replace(rewards={"a": answer.rewards, "b": 1 - answer.rewards}) if self.in_parts else answer


class Reads:
    """Dotted keys that code other than the checks reads, by the place of the first read."""

    def __init__(self):
        self.keys, self._paths, self._alive = {}, {}, []

    def root(self, config):
        self._paths[id(config)] = ""
        self._alive.append(config)
        return config

    def attribute(self, section, name):
        value = object.__getattribute__(section, name)
        if name not in type(section).__pydantic_fields__:
            return value
        path = self._paths.get(id(section))
        if path is not None:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, Section):
                    self._paths[id(inner)] = f"{path}{name}."
                    self._alive.append(inner)
        key = path + name if path is not None else (type(section).__name__, name)
        if key not in self.keys and (reader := self._reader()) is not None:
            self.keys[key] = reader
        return value

    def whole(self, section):
        """A section that a tracker gets as it is."""
        if (reader := self._reader()) is not None and reader.startswith("loggers/backends.py"):
            self.keys.update(((type(section).__name__, name), reader) for name in type(section).model_fields)

    @staticmethod
    def _reader():
        frame, found = sys._getframe(3), None
        while frame is not None:
            file = frame.f_code.co_filename
            of_a_rule = "/config/" in file and frame.f_code.co_name.startswith(("check", "_check"))
            if of_a_rule or any(part in file for part in CHECKS):
                return None
            if found is None and "/nemo_rl_cpp/" in file and not file.endswith(PASSES_ON):
                found = f"{file.partition('/nemo_rl_cpp/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return found

    def sees(self, dotted, owner, name):
        return dotted in self.keys or (owner.__name__, name) in self.keys


def keys_of(model):
    """dotted key -> (section, attribute, field)."""
    found = {}
    for dotted, info in dotted_fields(model):
        if section_type(info.annotation) is None:
            parent, _, name = dotted.rpartition(".")
            section = section_at(model, parent) if parent else model
            found[dotted] = (section, field_name(section, name), info)
    return found


@pytest.fixture(scope="module")
def reads(tmp_path_factory):
    """What the runs of SHAPES read."""
    patch, watch = pytest.MonkeyPatch(), Reads()
    forked_workers.in_place(patch)
    dump, check = Section.model_dump, build.checked

    def model_dump(section, **options):
        watch.whole(section)
        return dump(section, **options)

    find = importlib.util.find_spec
    patch.setattr(importlib.util, "find_spec", lambda name, *more: TRACKERS if name in TRACKERS else find(name, *more))
    for name in TRACKERS:
        patch.setitem(sys.modules, name, MagicMock(**{"start_run.return_value.info.run_id": "run"}))
    patch.setattr(build, "check_trackers", lambda cfg: None)
    patch.setattr(build, "checked", lambda config, model: watch.root(check(config, model)))
    patch.setattr(Section, "model_dump", model_dump)
    patch.setattr(Section, "__getattribute__", lambda section, name: watch.attribute(section, name), raising=False)
    small = {
        "grpo": (*tiny.SMALL, "grpo.max_num_steps=2"),
        "ppo": ("ppo.num_prompts_per_step=8", "ppo.num_generations_per_prompt=4", "policy.train_global_batch_size=32",
                "value.train_global_batch_size=32", "ppo.ppo_epochs=1", "ppo.policy_training_start_step=0", "ppo.max_num_steps=2"),
    }  # fmt: skip
    try:
        for section, more in (("grpo", ONLY_GRPO), ("ppo", ONLY_PPO)):
            for shape in [*SHAPES, *more]:
                options = [override.format(section) for override in shape]
                run = tiny.make(
                    tmp_path_factory.mktemp(section), *tiny.LOGGED, *small[section], *options, config=f"{section}_tiny.yaml",
                    environment=Alternating("gdpo" in shape[0]) if shape in ONLY_GRPO[1:] else None,
                )  # fmt: skip
                with run:
                    run.train()
        python = vllm_server_stand_in.interpreter(tmp_path_factory.mktemp("vllm"))
        options = [override.format(python=python) for override in WITH_VLLM]
        with tiny.make(tmp_path_factory.mktemp("grpo"), *small["grpo"], *options, "grpo.max_num_steps=1") as run:
            run.train()
        client_of(watch.root(load_grpo_config("grpo_tiny.yaml", OF_A_SERVER)).policy)  # which nobody asks
        make_tokenizer(watch.root(load_grpo_config("grpo_arithmetic_smollm2.yaml")).policy)
        ActorSettings.of(watch.root(load_grpo_config("grpo_tiny.yaml")).cluster)  # as a run with Ray does
    finally:
        patch.undo()
    return watch


LOAD = {"grpo": load_grpo_config, "ppo": load_ppo_config}
ENGINE_SIZES = ("tensor", "pipeline", "expert", "data")
FEW = ("++data.train.num_samples=20", "++data.validation.num_samples=20")
APART = ("policy.generation.colocated.enabled=false", "loss_fn.use_importance_sampling_correction=true")
PROMPTED = ("data.default.processor=math_hf_data_processor",)


def alone(model, backend):
    """The overrides that leave this of NeMo RL's backends as the only one."""
    if backend == "megatron_cfg":
        return f"{model}.megatron_cfg.enabled=true", f"{model}.dtensor_cfg.enabled=false"
    return (
        f"{model}.dtensor_cfg.enabled=true",
        f"{model}.megatron_cfg.enabled=false",
        f"{model}.optimizer={{kwargs:{{lr:1e-3}}}}",
    )


def changes(kind):
    """What no run reads: key -> (overrides before, the override that changes it)."""
    models = ["policy"] + (["value"] if kind == "ppo" else [])
    two = ("cluster.gpus_per_node=2",)  # a size that several devices are cut by
    found = {f"policy.generation.vllm_cfg.{name}_parallel_size": (two, "2") for name in ENGINE_SIZES}
    for model in models:
        for backend, names in PARALLEL_SIZES.items():
            found |= {f"{model}.{backend}.{name}": ((*alone(model, backend), *two), "2") for name in names}
    found |= {f"{model}.dtensor_cfg.enabled": (alone(model, "megatron_cfg"), "true") for model in models}
    found |= {
        "policy.backend": ((), "hf"),
        "policy.generation.backend": ((), "vllm"),
        "policy.generation.vllm_cfg.kv_cache_dtype": ((), "fp8"),
        "policy.generation.colocated.enabled": ((), "false"),
        "policy.generation.colocated.resources.num_nodes": (
            ("cluster.executor=processes", "cluster.num_nodes=2", "policy.generation.colocated.enabled=false",
             "policy.generation.colocated.resources.num_nodes=1"), "2",
        ),
        "cluster.gpus_per_node": ((), "8"),
        "cluster.num_nodes": ((), "4"),
        "cluster.strict_sizes": (two, "true"),
        "cluster.executor": ((), "ray"),
        "async_rl.sampler.max_lookahead_versions": (("async_rl={sampler:{max_lookahead_versions:1}}", *APART), "2"),
        "async_rl.sampler.name": (("async_rl={sampler:{name:in_order,max_staleness_versions:2}}", *APART), "windowed"),
        "async_rl.sampler.max_staleness_versions": (("async_rl={sampler:{name:windowed}}", *APART), "2"),
        "cluster.max_restarts": (("checkpointing.enabled=false",), "1"),
        f"{kind}.skip_reference_policy_logprobs_calculation": (("loss_fn.reference_policy_kl_penalty=0.1", f"{kind}.skip_reference_policy_logprobs_calculation=false"), "true"),
        "data.use_multiple_dataloader": (("data.num_prompts_per_dataloader=32",), "true"),
        "data.default.dataset_name": (("~data.train.dataset_name", "~data.train.num_digits", "data.default.dataset_name=reverse_digits"), "arithmetic"),
        "data.default.env_name": (("env.arithmetic={}",), "arithmetic"),
        "data.default.processor": ((), "math_data_processor"),
        "data.default.prompt_file": (PROMPTED, "PROMPT"),
        "data.default.system_prompt_file": (PROMPTED, "PROMPT"),
    }  # fmt: skip
    if kind == "grpo":
        found["grpo.normalize_rewards"] = ((), "false")
    for side in ("train", "validation"):
        found |= {
            f"data.{side}.dataset_name": ((f"~data.{side}.num_digits",), "arithmetic"),
            f"data.{side}.env_name": (("env.arithmetic={}",), "arithmetic"),
            f"data.{side}.processor": ((), "math_data_processor"),
            f"data.{side}.prompt_file": (PROMPTED, "PROMPT"),
            f"data.{side}.system_prompt_file": (PROMPTED, "PROMPT"),
            f"data.{side}.split_validation_size": ((), "3"),
            f"data.{side}.seed": ((f"data.{side}.seed=1",), "2"),
        }
    return found


@functools.cache
def observed(kind, overrides, with_data):
    """All that a configuration says: its keys; the line about sizes, or data and environments. A text if it is refused."""
    try:
        config = LOAD[kind](f"{kind}_tiny.yaml", [*FEW, *(f"++{o}" if o[0] != "~" else o for o in overrides)])
        keys = flatten_dict(config.model_dump(), expand_lists=False)
        if not with_data:
            return keys, fold_text(config)
        made = make_data(config, make_tokenizer(config.policy))
    except ValueError as error:
        return f"refused: {str(error).partition(': ')[2]}"
    data = {
        side: [(name, len(rows), [row["message_log"] for row in (rows[0], rows[1])]) for name, rows in several.items()]
        for side, several in (
            ("train", made.train if isinstance(made.train, dict) else {"": made.train}), ("validation", {"": made.validation}),
        )
    }  # fmt: skip
    sides = made.environments.train, made.environments.validation
    environments = [[(task, repr(env)) for task, env in side.items()] for side in sides]
    made.environments.close()
    return keys, repr(data) + re.sub("0x[0-9a-f]+", "", repr(environments))


def observed_but(kind, key, overrides):
    """What a configuration says, without the value of `key` itself."""
    found = observed(kind, tuple(overrides), key.startswith("data."))
    if isinstance(found, str):
        return found
    keys, said = found
    return json.dumps([{name: value for name, value in keys.items() if name != key}, said], default=str)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MASTERS)
def test_configuration_keys_documented_as_effective_influence_a_run(reads, kind, tmp_path):
    (tmp_path / "prompt.txt").write_text("0{}0")
    by_change, idle = changes(kind), []
    for key, (section, name, info) in keys_of(MASTERS[kind]).items():
        if status_of(info) != "effective" or reads.sees(key, section, name):
            continue
        if key not in by_change:
            idle.append(key)
            continue
        before, value = by_change[key]
        changed = f"{key}={value}".replace("PROMPT", str(tmp_path / "prompt.txt"))
        if observed_but(kind, key, before) == observed_but(kind, key, [*before, changed]):
            idle.append(key)
    assert idle == [], " ".join(idle)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MASTERS)
def test_configuration_keys_documented_as_without_effect_are_not_read_by_a_run(reads, kind):
    keys = keys_of(MASTERS[kind])
    idle = {key for key, (_, _, info) in keys.items() if status_of(info) == "without effect"}
    assert {key: reads.keys[key] for key in idle & reads.keys.keys()} == {}
