"""A user's loss and advantage estimators, which a configuration selects by their dotted names."""

import nemo_rl_cpp


class Reinforce(nemo_rl_cpp.LossFunction):
    """The loss -scale x mean of log-probability x advantage."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, next_token_logprobs, data, global_valid_toks, **counts):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        terms = next_token_logprobs * data["advantages"][:, 1:] * mask
        return -self.scale * terms.sum() / global_valid_toks, {"own_loss_samples": float(data["sample_mask"].sum())}


class Centred(nemo_rl_cpp.AdvantageEstimator):
    """GRPO advantages: the reward minus the mean of the batch, raised to a power."""

    def __init__(self, power=1):
        self.power = power

    def compute_advantage(self, rewards, **batch):
        self.last_metrics = {"advantage/power": float(self.power)}
        centred = rewards - rewards.mean()
        return centred.sign() * centred.abs() ** self.power


def to_go(rewards, values, mask, factor=1.0):
    """Return PPO's advantages, the reward minus the value of each state, and its returns, the reward."""
    returns = factor * rewards[:, None] * mask
    return (returns - values) * mask, returns


def no_critic(rewards, mask):
    """Return PPO's advantages without a critic."""
    return rewards[:, None] * mask
