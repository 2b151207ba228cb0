"""The `ppo` section."""

from .base import Count, Fraction, Int, NonNegative, Positive, Section, key, section
from .estimators import PPOEstimator
from .loop import AsyncConfig, LoopConfig, other_default


class AsyncPPOConfig(AsyncConfig):
    """Rollouts beside the training of PPO."""


class GAEConfig(Section):
    """Generalised advantage estimation, or raw rewards as advantages."""

    name: PPOEstimator = key(
        "gae",
        "gae: uses a value model; raw_reward: uses none, and the reward is the advantage; or a class or function of yours, as "
        "my_module.MyEstimator",
    )
    kwargs: dict[str, object] = key({}, "keyword arguments of an estimator of yours")
    uses_critic: bool = key(True, "whether an estimator of yours gets the values of a critic, which is then trained")
    gae_lambda: Fraction = key(0.95, "lambda: 0 is one-step TD, 1 is Monte Carlo")
    gae_gamma: Fraction = key(1.0, "discount a token")
    normalize_advantages: bool = key(True, "whiten advantages over the batch's valid tokens")
    gae_lambda_value: Fraction | None = key(None, "VAPO: lambda of the returns; null: gae_lambda")
    gae_lambda_policy: Fraction | None = key(None, "VAPO: lambda of the advantages; null: gae_lambda")
    length_adaptive_alpha: NonNegative = key(0.0, "VAPO: policy lambda = 1 - 1/(alpha x response length); 0: off")


class PPOConfig(LoopConfig):
    """The training loop of PPO; keys that GRPO has too mean the same."""

    section_name = "ppo"
    max_num_epochs: Positive = other_default("max_num_epochs", 100000)
    max_num_steps: Count = other_default("max_num_steps", 100000)
    val_period: Int = other_default("val_period", 20)
    val_at_start: bool = other_default("val_at_start", True)
    skip_reference_policy_logprobs_calculation: bool = other_default("skip_reference_policy_logprobs_calculation", True)
    ppo_epochs: Positive = key(
        4, "passes of the actor over each rollout batch; those of the critic too, unless critic_ppo_epochs is set"
    )
    critic_ppo_epochs: Positive | None = key(None, "passes of the critic over each rollout batch; null: ppo_epochs")
    policy_training_start_step: Count = key(0, "number of first steps that train only the critic")
    warm_start_value_checkpoint: str | None = key(
        None,
        "folder step_N of another run: a fresh run begins with its critic's weights, and a new optimizer and schedule; null: none",
    )
    adv_estimator: GAEConfig = section(GAEConfig, "how rewards become advantages")
    async_ppo: AsyncPPOConfig = section(AsyncPPOConfig, "rollouts beside training")

    @property
    def beside_training(self) -> AsyncConfig:
        return self.async_ppo

    @property
    def policy_epochs(self) -> int:
        return self.ppo_epochs

    @property
    def critic_epochs(self) -> int:
        return self.critic_ppo_epochs or self.ppo_epochs

    @property
    def first_policy_step(self) -> int:
        return self.policy_training_start_step
