"""An environment whose reward is the share of even digits in a response.

Selected by `env_name: even_digits` and a section `env.even_digits`."""

from nemo_rl_cpp.config.base import Real, Section, as_model, key
from nemo_rl_cpp.environments.loading import register_env
from nemo_rl_cpp.environments.single_turn import SingleTurnEnvironment, assistant_text


class EvenDigitsConfig(Section):
    """The keys of `env.even_digits`."""

    weight: Real = key(1.0, "reward of a response of even digits only")


class EvenDigits(SingleTurnEnvironment):
    scores_rows_alone = True

    def __init__(self, cfg):
        self.cfg = as_model(cfg, EvenDigitsConfig, "env.even_digits")
        self.steps = 0

    def step(self, message_log_batch, metadata):
        self.steps += 1
        texts = [assistant_text(log) for log in message_log_batch]
        return self._finish([self.cfg.weight * sum(c in "02468" for c in t) / max(len(t), 1) for t in texts], metadata)

    def pop_metrics(self):
        steps, self.steps = self.steps, 0
        return {"calls_of_even_digits": steps}


register_env("even_digits", "recipes.even_digits.EvenDigits", EvenDigitsConfig)
