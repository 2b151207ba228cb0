import pytest
from nemo_rl_cpp.weight_sync import create_weight_synchronizer


class Role:
    def __init__(self, digest="aa"):
        self.digest, self.asked, self.invalidated = digest, 0, 0

    def weight_digest(self):
        self.asked += 1
        return self.digest

    def invalidate_kv_cache(self):
        self.invalidated += 1


def test_refit_with_shared_weights_copies_no_bytes_and_logs_the_weight_digest():
    policy, engine = Role(), Role()
    refit = create_weight_synchronizer(policy, engine, True)
    assert refit.sync_weights() == {"refit/bytes": 0, "weights/digest": "aa"}
    assert engine.invalidated == 1
    refit.sync_weights()  # not stale: nothing is done again
    assert (policy.asked, engine.asked, engine.invalidated) == (1, 1, 1)
    refit.mark_stale()
    policy.digest = engine.digest = "bb"
    assert refit.sync_weights()["weights/digest"] == "bb"


def test_run_ends_with_an_error_if_generation_engine_and_trainer_weights_differ():
    with pytest.raises(RuntimeError, match="the engine's weights are not the policy's: digest ff against aa"):
        create_weight_synchronizer(Role(), Role("ff"), True).sync_weights()


def test_run_ends_with_an_error_if_weights_change_between_generation_and_training():
    policy, engine = Role(), Role()
    refit = create_weight_synchronizer(policy, engine, True)
    refit.sync_weights()
    refit.verify_before_training()
    policy.digest = "ab"
    with pytest.raises(RuntimeError, match=r"changed between generation \(digest aa\) and training \(digest ab\)"):
        refit.verify_before_training()
