"""NeMo RL's `Policy`: the house's, which also generates by itself and answers the calls that address workers."""

from nemo_rl_cpp.compat.models.policy.interfaces import ColocatablePolicyInterface
from nemo_rl_cpp.compat.models.policy.single_process import SingleProcessPolicy
from nemo_rl_cpp.models.policy import lm_policy as house


class Policy(house.Policy, ColocatablePolicyInterface, SingleProcessPolicy):
    """A language model in training, see `nemo_rl_cpp.models.policy.lm_policy.Policy`."""

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Nothing to do: weights and workspace stay where they are."""
