import pytest
import torch
from hf_players import FAST, groups, make
from nemo_rl_cpp.algorithms.loss import MseValueLossConfig, MseValueLossFn
from nemo_rl_cpp.config.policy import ValueConfig
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.policy.train_step import NonFiniteError

LOSS = MseValueLossFn(MseValueLossConfig(scale=0.5, cliprange=0.2))


def make_value(precision="float32", **changes):
    paths = {k: changes.pop(k) for k in ("weights_path", "optimizer_path") if k in changes}
    return make(Value, ValueConfig, paths=paths, precision=precision, **{"optimizer": FAST, **changes})


def with_a_head(value):
    value.state_dict()["score.weight"].copy_(torch.randn(1, 64, generator=torch.Generator().manual_seed(4)) * 0.2)
    if value.model.masters.data_ptr() != value.model.compute.data_ptr():
        value.model.masters.copy_(value.model.compute)
    return value


def make_data(value, seed=0):
    random = torch.Generator().manual_seed(seed)
    data = groups(random)
    data["values"] = value.get_values(data)["values"]
    data["returns"] = torch.randn(data["input_ids"].shape, generator=random)
    return data


def test_critic_value_of_a_token_depends_only_on_earlier_tokens():
    value = with_a_head(make_value())
    data = {"input_ids": torch.tensor([[1, 5, 6, 7, 8]]), "input_lengths": torch.tensor([5])}
    before = value.get_values(data)["values"]
    assert before[0, 0] == 0 and before[0, 1:].all()
    data["input_ids"][0, 3] = 9
    after = value.get_values(data)["values"]
    assert torch.equal(before[0, :4], after[0, :4]) and before[0, 4] != after[0, 4]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_critic_values_do_not_depend_on_batch_size_packing_or_shared_prompts(precision):
    value = with_a_head(make_value(precision))
    data = make_data(value)
    for size in (1, 5):
        value.config = value.config.model_copy(update={"logprob_batch_size": size})
        assert torch.equal(value.get_values(data)["values"], data["values"])
    for row in range(12):
        length = int(data["input_lengths"][row])
        alone = value.get_values(
            {k: v[row : row + 1, :length] if v.dim() > 1 else v[row : row + 1] for k, v in data.items()}
        )["values"]
        assert torch.equal(alone[0], data["values"][row, :length])


def test_critic_gradients_do_not_depend_on_micro_batch_size_or_sequence_packing():
    gradients = {}
    for name, changes in {
        "whole": {}, "ones": dict(train_micro_batch_size=1), "fives": dict(train_micro_batch_size=5),
        "packed": dict(sequence_packing={"enabled": True, "train_mb_tokens": 30, "logprob_mb_tokens": 30}),
        "own prompts": dict(share_prompt_prefix=False), "recomputed": dict(dtensor_cfg={"activation_checkpointing": True}),
    }.items():  # fmt: skip
        value = with_a_head(make_value(**changes))
        value.train(make_data(value), LOSS)
        gradients[name] = value.trainer.grads.double().clone()
    reference = gradients.pop("whole")
    assert reference.norm() > 0
    assert torch.equal(gradients["recomputed"], reference)
    for name, grads in gradients.items():
        assert (grads - reference).norm() <= 1e-6 * reference.norm(), name


def test_critic_performs_one_optimizer_step_per_global_batch_and_one_schedule_step_per_call():
    stages = [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 5}}]
    value = make_value(scheduler=stages)
    result = value.train(make_data(value), LOSS, gbs=4)
    assert len(result["loss"]) == len(result["grad_norm"]) == 3 and value.trainer.optimizer_steps == 3
    assert value.learning_rate == pytest.approx(1e-2 * (0.1 + 0.9 / 5))
    assert result["all_mb_metrics"]["lr"] == [pytest.approx(1e-3)] * 3
    with pytest.raises(ValueError, match="value.train_global_batch_size=5"):
        value.train(make_data(value), LOSS, gbs=5)


def test_python_value_loss_has_the_same_gradient_as_the_native_value_loss():
    def squares(values, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"][:, None]
        loss = 0.5 * ((values - data["returns"]) ** 2 * mask).sum() / (global_valid_toks + 1e-8)
        return loss, {"loss": float(loss.detach()), "num_valid_samples": 1.0}

    native, python = with_a_head(make_value()), with_a_head(make_value())
    data = make_data(native)
    native.train(data, MseValueLossFn(MseValueLossConfig()))
    python.train(data, squares)
    torch.testing.assert_close(python.trainer.grads, native.trainer.grads, rtol=1e-4, atol=1e-7)


def test_infinite_return_is_an_error_before_the_update_that_names_sample_and_token(tmp_path):
    value = make_value()
    value.replay_dir = tmp_path
    data = make_data(value)
    data["returns"][5, 4] = float("inf")
    before = value.weight_digest()
    with pytest.raises(NonFiniteError, match=r"value: .* sample 5, token 4 .*nonfinite_value_batch.pt"):
        value.train(data, LOSS)
    assert value.weight_digest() == before
