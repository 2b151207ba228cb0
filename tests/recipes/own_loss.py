"""A loss and two advantage estimators of the user's, which a configuration names by dotted names."""

import nemo_rl_cpp


class Reinforce(nemo_rl_cpp.LossFunction):
    """-scale x mean of log-probability x advantage."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, next_token_logprobs, data, global_valid_toks, **counts):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        terms = next_token_logprobs * data["advantages"][:, 1:] * mask
        return -self.scale * terms.sum() / global_valid_toks, {"own_loss_samples": float(data["sample_mask"].sum())}


class Centred(nemo_rl_cpp.AdvantageEstimator):
    """GRPO: reward less the mean of the batch, to a power."""

    def __init__(self, power=1):
        self.power = power

    def compute_advantage(self, rewards, **batch):
        self.last_metrics = {"advantage/power": float(self.power)}
        centred = rewards - rewards.mean()
        return centred.sign() * centred.abs() ** self.power


def to_go(rewards, values, mask, factor=1.0):
    """PPO: the reward less the value of each state, and the reward as what the critic learns from."""
    returns = factor * rewards[:, None] * mask
    return (returns - values) * mask, returns


def no_critic(rewards, mask):
    """PPO without a critic."""
    return rewards[:, None] * mask
