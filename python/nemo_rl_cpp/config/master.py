"""The whole configuration of a GRPO run, a PPO run and an evaluation."""

from pydantic import PrivateAttr

from nemo_rl_cpp.dotted_names import is_user_defined

from .base import Section, key, section
from .checkpointing import CheckpointingConfig
from .cluster import ClusterConfig
from .data import DataConfig, EvalDataConfig
from .env import EnvConfigs
from .eval import EvalConfig
from .exactness import exactness_of
from .generation import EvalGenerationConfig
from .grpo import DataPlaneConfig, GRPOConfig, RewardPenaltyConfig
from .logger import LoggerConfig
from .loop import LoopConfig
from .loss import ClippedPGLossConfig, MseValueLossConfig
from .policy import PolicyConfig, TokenizerConfig, fill
from .ppo import PPOConfig
from .value import ValueConfig


class MasterConfig(Section):
    """Common to all: the plain tree and where each key was written."""

    _positions: dict[str, str] = PrivateAttr(default_factory=dict)
    _environment: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def positions(self) -> dict[str, str]:
        """Dotted key -> "file.yaml:line" or "override '...'", for the keys that a file or the command line sets."""
        return self._positions

    @property
    def environment_values(self) -> dict[str, str]:
        """Dotted key -> the text with `${oc.env:...}` that its value was made from, see `config.access.written`."""
        return self._environment

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return False

    def fill_defaults(self) -> None:
        """Values that follow from others, where the file leaves them out."""


class TrainMasterConfig(MasterConfig):
    """What every training run has, whatever its algorithm."""

    loss_fn: ClippedPGLossConfig = section(ClippedPGLossConfig, "loss of the policy")
    policy: PolicyConfig = key(..., "model, training and generation")
    data: DataConfig = section(DataConfig, "data sets")
    env: EnvConfigs = key({}, "environments by name")
    checkpointing: CheckpointingConfig = section(CheckpointingConfig, "checkpoints")
    logger: LoggerConfig = section(LoggerConfig, "logs")
    cluster: ClusterConfig = section(ClusterConfig, "devices")
    reward_penalties: RewardPenaltyConfig | None = section(RewardPenaltyConfig, "penalties of NeMo Gym (not supported)")
    data_plane: DataPlaneConfig | None = section(DataPlaneConfig, "transfer queues between workers, not used here")

    @property
    def algorithm(self) -> str:
        """The name of the training loop's section: "grpo" or "ppo"."""
        raise NotImplementedError

    @property
    def loop(self) -> LoopConfig:
        """The training loop's section."""
        return getattr(self, self.algorithm)

    @property
    def title(self) -> str:
        """The run in three words, for people."""
        return f"{self.algorithm.upper()} {self.policy.model_name}"

    def fill_defaults(self) -> None:
        self.policy.fill_defaults()
        row = exactness_of(self.policy)
        self.loss_fn.fill_correction(row is not None and not row.equal)
        self.loss_fn.fill_scale_factor(self.policy.generation.max_new_tokens)


class GRPOMasterConfig(TrainMasterConfig):
    """A GRPO, DAPO or ProRLv2 run (`run_grpo_math`)."""

    grpo: GRPOConfig = section(GRPOConfig, "training loop")

    @property
    def algorithm(self) -> str:
        return "grpo"


class PPOMasterConfig(TrainMasterConfig):
    """A PPO run (`run_ppo`)."""

    ppo: PPOConfig = section(PPOConfig, "training loop")
    value_loss_fn: MseValueLossConfig = section(MseValueLossConfig, "loss of the critic")
    value: ValueConfig = section(ValueConfig, "critic")

    @property
    def algorithm(self) -> str:
        return "ppo"

    @property
    def has_critic(self) -> bool:
        estimator = self.ppo.adv_estimator
        return estimator.name == "gae" or (is_user_defined(estimator.name) and estimator.uses_critic)

    def fill_defaults(self) -> None:
        super().fill_defaults()
        self.value.fill_from(self.policy)


class EvalMasterConfig(MasterConfig):
    """An evaluation (`run_eval`)."""

    eval: EvalConfig = section(EvalConfig, "what is measured")
    generation: EvalGenerationConfig = key(..., "model, sampling and engine")
    tokenizer: TokenizerConfig = section(TokenizerConfig, "tokenizer and chat template")
    data: EvalDataConfig = key(..., "data set")
    env: EnvConfigs = key({}, "environments by name")
    cluster: ClusterConfig = section(ClusterConfig, "devices")

    def fill_defaults(self) -> None:
        generation = self.generation
        fill(generation.vllm_cfg, max_model_len=2048, precision="bfloat16")
        fill(generation, backend="native")
        fill(generation, max_new_tokens=generation.vllm_cfg.max_model_len, val_temperature=generation.temperature)
        fill(generation, val_top_p=generation.top_p, val_top_k=generation.top_k)
        fill(self.tokenizer, name=generation.model_name)
        if len(self.env) == 1:
            fill(self.data, env_name=next(iter(self.env)))


WholeConfig = GRPOMasterConfig | PPOMasterConfig | EvalMasterConfig
"""The configuration of a run or an evaluation."""
