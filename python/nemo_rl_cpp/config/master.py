"""The classes of whole configurations: of training runs and of an evaluation."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import ClassVar, Literal, TypeVar

from pydantic import PrivateAttr, ValidationError

from nemo_rl_cpp.dotted_names import is_user_defined

from . import rules, rules_model
from .access import plain_values
from .base import Folder, Int, Positive, Section, check_marks, fill, key, mistakes, own_keys, section
from .checkpointing import CheckpointingConfig
from .cluster import ClusterConfig
from .data import DataConfig, DatasetDefaults, EvalDataConfig, dataset_keys
from .distillation import (
    DistillationConfig,
    DistillationLossConfig,
    OnPolicyDistillationConfig,
    SFTConfig,
    SFTLossConfig,
    TeacherConfig,
    absolute_folder,
)
from .env import EnvConfigs, environment_sections
from .errors import ConfigError, Problem, Report
from .fold import exactness_of
from .generation import EvalGenerationConfig, GenerationConfig
from .logger import LoggerConfig
from .loop import AsyncRLConfig, DataPlaneConfig, GRPOConfig, LoopConfig, PPOConfig
from .loss import ClippedPGLossConfig, MseValueLossConfig
from .penalties import RewardPenaltyConfig
from .policy import FROM_THE_POLICY, PolicyConfig, TokenizerConfig, TrainedModelConfig, ValueConfig


class EvalConfig(Section):
    """Settings of an evaluation: the metric, and how many responses to each prompt it is computed from."""

    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """What is reported: pass@k, the probability that at least one of k responses is correct, or cons@k, the probability
    that the majority answer of k responses is correct."""
    num_tests_per_prompt: Positive = key(1, "Number of responses to each prompt.")
    k_value: Positive = key(1, "k of the metric. At most num_tests_per_prompt.")
    seed: Int = key(42, "Random seed for sampling.")
    max_rollout_turns: Positive = key(1, "Maximum number of turns of a rollout, for environments that reply.")
    save_path: Folder | None = key(None, "Folder for evaluation_data.json and config.json. null: they are not written.")


class MasterConfig(Section):
    """The base class of whole configurations. An instance records where keys are set and which variables were read."""

    _positions: dict[str, str] = PrivateAttr(default_factory=dict)
    _environment: dict[str, str] = PrivateAttr(default_factory=dict)

    positions = property(attrgetter("_positions"))
    """{dotted key: place ("file.yaml:line" or "override '...'")} of each key that a file or the command line sets."""

    environment_texts = property(attrgetter("_environment"))
    """{value of an environment variable: "${oc.env:NAME}"} for each variable that was read. In saved configurations
    the text replaces the value (see `config.access.written`)."""

    has_critic: ClassVar[bool] = False
    """Whether a critic is trained."""

    def trained_models(self) -> dict[str, TrainedModelConfig]:
        """Return {section name ("policy", "value"): section} of the trained models; empty for an evaluation."""
        return {}

    sampling: ClassVar[tuple[str, GenerationConfig]]
    """(dotted key, section) that configures generation: `policy.generation`, or in an evaluation `generation`."""

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        """Return every dotted key that a configuration may have, with the keys of all datasets and environments."""
        found = set(own_keys(cls))
        for name, inner in environment_sections().items():
            found.update(f"env.{name}.{key}" for key in own_keys(inner))
        return frozenset(found)

    @classmethod
    def takes_own_key(cls, dotted: str) -> bool:
        if dotted.startswith("env."):
            return dotted.split(".")[1] not in environment_sections()
        return super().takes_own_key(dotted)

    def fill_defaults(self) -> None:
        """Set keys that are null and whose default depends on other keys."""

    _check_together: ClassVar[Callable[..., None]]
    """The method (report) that reports settings which do not fit together."""

    def check_rules(self, report: Report) -> None:
        """Call `fill_defaults`, then report unsupported settings and settings that do not fit together."""
        self.fill_defaults()
        check_marks(self, "", report)
        if rules.sound_environments(self.env, report):
            self._check_together(report)

    def check_all(self, report: Report) -> None:
        for name, inner in environment_sections().items():
            if isinstance(self.env.get(name), dict):
                try:
                    inner.model_validate(self.env[name])
                except ValidationError as failure:
                    report.problems += [Problem("", f"env.{name}.{p.key}", p.message) for p in mistakes(failure, inner)]
        self.check_rules(report)


class TrainMasterConfig(MasterConfig):
    """The base class of the configurations of training runs, with the sections that all algorithms share."""

    algorithm: ClassVar[str]
    """The name of the training loop's section: "grpo", "ppo", "distillation" or "sft"."""
    candidates: ClassVar[int | None] = None
    """The number of most likely tokens for which teacher and policy are compared; None: the sampled token alone."""
    _fixed: frozenset[str] = PrivateAttr(frozenset())
    loss_fn: ClippedPGLossConfig = section(ClippedPGLossConfig)
    policy: PolicyConfig = key(..., "Model, training and generation.")
    data: DataConfig = section(DataConfig)
    env: EnvConfigs = key({}, "Environments by name.")
    checkpointing: CheckpointingConfig = section(CheckpointingConfig)
    logger: LoggerConfig = section(LoggerConfig)
    cluster: ClusterConfig = section(ClusterConfig)
    reward_penalties: RewardPenaltyConfig | None = section(RewardPenaltyConfig)
    async_rl: AsyncRLConfig | None = None
    """Overlapping rollouts in the form of NeMo RL's SingleController. null: see async_grpo and async_ppo."""
    data_plane: DataPlaneConfig | None = section(DataPlaneConfig)

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        of_data = (key for keys in dataset_keys().values() for key in keys)
        return super().known_keys() | {f"data.{split}.{key}" for key in of_data for split in ("train", "validation")}

    def _check_together(self, report: Report) -> None:
        rules.check_training(self, report)
        fixed = rules_model.check_budget(self, report)
        if not self.positions:  # a checked configuration of files keeps what the files say
            self._fixed = fixed

    fixed_by_user = property(attrgetter("_fixed"))
    """The dotted keys that the user has set, which policy.memory_budget_gb must not change (`check_budget`)."""

    def trained_models(self) -> dict[str, TrainedModelConfig]:
        return {"policy": self.policy}

    @property
    def sampling(self) -> tuple[str, GenerationConfig]:
        return "policy.generation", self.policy.generation

    @property
    def teachers(self) -> dict[str, str]:
        """{dotted key: model name} of each teacher that the run loads in the native core; empty without teachers."""
        return {}

    @property
    def loop(self) -> LoopConfig:
        return getattr(self, self.algorithm)

    @property
    def title(self) -> str:
        return f"{self.algorithm.upper()} {self.policy.model_name}"

    def fill_defaults(self) -> None:
        self.policy.fill_defaults()
        gym, flags = self.env.get("nemo_gym"), self.env.get("should_mask_flagged_samples")
        if isinstance(gym, dict) and flags is not None:
            gym.setdefault("should_mask_flagged_samples", flags)
        if self.loop.beside_training.enabled and not self.policy.generation.colocated.enabled:
            self.cluster.note_beside_training()
        row = exactness_of(self.policy)
        self.loss_fn.fill_correction(row is not None and not row.equal)
        if self.loss_fn.loss_agg_mode == "seq-mean-token-sum-norm":
            fill(self.loss_fn, loss_scale_factor=float(self.policy.generation.max_new_tokens))


class TaughtMasterConfig(TrainMasterConfig):
    """The base class of the configurations of GRPO and PPO runs, which can also learn from teachers: models that score
    the policy's samples (`on_policy_distillation`)."""

    on_policy_distillation: OnPolicyDistillationConfig | None = section(OnPolicyDistillationConfig)

    @property
    def teachers(self) -> dict[str, str]:
        teaching, key = self.on_policy_distillation, "on_policy_distillation.teacher_model_by_agent_name"
        if teaching is None:
            return {}
        return {f"{key}.{name}": model for name, model in teaching.models().items()}

    def fill_defaults(self) -> None:
        if self.async_rl is not None:
            changed = self.loop.beside_training.model_copy(update=self.async_rl.beside_training)
            setattr(self.loop, f"async_{self.algorithm}", changed)
        super().fill_defaults()


class GRPOMasterConfig(TaughtMasterConfig):
    """The configuration of a GRPO, DAPO or ProRLv2 run (`run_grpo_math`)."""

    algorithm = "grpo"
    grpo: GRPOConfig = section(GRPOConfig)


class DistillationMasterConfig(TrainMasterConfig):
    """The configuration of a distillation run (`run_distillation`): a teacher scores the policy's own samples, and the
    policy learns from these scores."""

    algorithm = "distillation"
    distillation: DistillationConfig = section(DistillationConfig)
    teacher: TeacherConfig = key(..., "The teacher.")
    loss_fn: DistillationLossConfig = section(DistillationLossConfig)

    @property
    def teachers(self) -> dict[str, str]:
        return {} if self.teacher.is_outside else {"teacher.model_name": absolute_folder(self.teacher.model_name)}

    candidates = property(attrgetter("distillation.topk_logits_k"))


class PPOMasterConfig(TaughtMasterConfig):
    """The configuration of a PPO run (`run_ppo`)."""

    algorithm = "ppo"
    ppo: PPOConfig = section(PPOConfig)
    value_loss_fn: MseValueLossConfig = section(MseValueLossConfig)
    value: ValueConfig = section(ValueConfig)

    @property
    def has_critic(self) -> bool:
        estimator = self.ppo.adv_estimator
        return estimator.computes_gae or (is_user_defined(estimator.name) and estimator.uses_critic)

    def trained_models(self) -> dict[str, TrainedModelConfig]:
        return {"policy": self.policy} | ({"value": self.value} if self.has_critic else {})

    def fill_defaults(self) -> None:
        super().fill_defaults()
        fill(self.value, **{name: getattr(self.policy, name) for name in FROM_THE_POLICY})
        self.value.fill_batching()


class SFTMasterConfig(TrainMasterConfig):
    """The configuration of supervised fine-tuning on the answers of a dataset (`run_sft`)."""

    algorithm = "sft"
    sft: SFTConfig = section(SFTConfig)
    loss_fn: SFTLossConfig = section(SFTLossConfig)

    def fill_defaults(self) -> None:
        super().fill_defaults()
        self.sft._rows = self.policy.train_global_batch_size
        defaults = self.data.default or DatasetDefaults()
        if defaults.processor is None:
            self.data.default = defaults.model_copy(update={"processor": "sft_processor"})
        if "metric_name" not in self.checkpointing.model_fields_set:
            self.checkpointing.__dict__.update(metric_name="val:val_loss", higher_is_better=False)


class EvalMasterConfig(MasterConfig):
    """The configuration of an evaluation (`run_eval`)."""

    eval: EvalConfig = section(EvalConfig)
    generation: EvalGenerationConfig = key(..., "Model, sampling and engine.")
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    data: EvalDataConfig = key(..., "The dataset.")
    env: EnvConfigs = key({}, "Environments by name.")
    cluster: ClusterConfig = section(ClusterConfig)

    _check_together = rules.check_eval

    @property
    def sampling(self) -> tuple[str, GenerationConfig]:
        return "generation", self.generation

    def fill_defaults(self) -> None:
        generation = self.generation
        fill(generation.vllm_cfg, max_model_len=2048, precision="bfloat16")
        fill(generation, backend="native", max_new_tokens=generation.vllm_cfg.max_model_len)
        generation.fill_validation()
        fill(self.tokenizer, name=generation.model_name)
        if len(self.env) == 1:
            fill(self.data, env_name=next(iter(self.env)))


WholeConfig = GRPOMasterConfig | PPOMasterConfig | DistillationMasterConfig | SFTMasterConfig | EvalMasterConfig
"""The configuration of a training run or of an evaluation."""


def master_of(config: object) -> type[TrainMasterConfig]:
    """Return the class of a training run's configuration. For a mapping, the section of a training loop that it
    contains (`ppo`, `distillation` or `sft`) determines the class; without one, it is GRPOMasterConfig."""
    if isinstance(config, TrainMasterConfig):
        return type(config)
    sections = config if isinstance(config, Mapping) else ()
    kinds = {"ppo": PPOMasterConfig, "distillation": DistillationMasterConfig, "sft": SFTMasterConfig}
    return next((kind for name, kind in kinds.items() if name in sections), GRPOMasterConfig)


Master = TypeVar("Master", bound=MasterConfig)


def checked(config: object, model: type[Master]) -> Master:
    """Return `config`, an instance of `model` or a mapping, as a `model` that passes the checks of a file. An instance
    may have been changed, so it is checked, too. Raise ConfigError for mistakes."""
    if isinstance(config, model):
        report = Report({}, "")
        try:
            model.model_validate(config.model_dump(warnings=False))
        except ValidationError as failure:
            report.problems += mistakes(failure, model)
        if not report.problems:
            config.check_all(report)
        if report.problems:
            raise ConfigError(report.problems)
        return config
    if isinstance(config, Mapping):
        return model(**plain_values(config))
    text = f"the configuration must be a {model.__name__} or a mapping, not {type(config).__name__}"
    raise ConfigError([Problem("", "", text)])
