"""The environments of a run, and the end of their processes."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.environments.remote import shut_down
from nemo_rl_cpp.user_code import serve


@dataclass
class Environments:
    """Environments by task name.

    Attributes:
        train: score the answers that are trained on.
        validation: score those of validations.
        owned: whether `close` ends them; those that a caller brought go on.
    """

    train: Mapping[str, Environment]
    validation: Mapping[str, Environment] = field(default_factory=dict)
    owned: bool = True

    def close(self, patience: float | None = None) -> None:
        """Ends the processes of every environment once. An environment that does not answer for `patience` seconds is left behind."""
        if not self.owned:
            return
        self.owned = False
        different = {id(env): env for group in (self.train, self.validation) for env in group.values()}
        for environment in different.values():
            end = partial(shut_down, environment, patience)
            try:
                # where the run's calls were made, if there is time: a client belongs to the event loop that has used it
                serve(end) if patience is None else end()
            except TimeoutError:
                print("an environment hangs and is left behind", file=sys.stderr)
