import pytest
import torch
from hf_players import FAST, groups, hf_policy, make
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl_cpp.algorithms.step_metrics import training_metrics
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.models.policy import lm_policy
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.policy.train_step import NonFiniteError
from paired_prompts import to_train
from reference import optimizer_state
from safetensors.torch import load_file


def make_policy(precision="float32", **changes):
    paths = {k: changes.pop(k) for k in ("weights_path", "optimizer_path", "init_reference_model") if k in changes}
    return make(Policy, paths=paths, precision=precision, **{"optimizer": FAST, **changes})


def make_data(policy, seed=0, rows=12):
    random = torch.Generator().manual_seed(seed)
    data = groups(random, rows)
    data["advantages"] = torch.randn(rows, 1, generator=random).expand(rows, 9).contiguous()
    data["generation_logprobs"] = policy.get_logprobs(data)["logprobs"]
    return data


LOSS = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))


def pg_loss(next_token_logprobs, data, global_valid_seqs, global_valid_toks):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    ratio = torch.exp(next_token_logprobs - data["prev_logprobs"][:, 1:])
    surrogate = torch.minimum(ratio * data["advantages"][:, 1:], ratio.clamp(0.8, 1.2) * data["advantages"][:, 1:])
    return -(surrogate * mask).sum() / (global_valid_toks + 1e-8), {}


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize("freezes", [True, False])
def test_router_weights_do_not_change_if_freeze_moe_router_is_set(backend, freezes):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    megatron = {"enabled": True, "freeze_moe_router": freezes, "optimizer": {"lr": 1e-2, "weight_decay": 0.1}}
    maker = make_policy if backend == "native" else hf_policy
    policy = maker(hf_config_overrides={"model_type": "qwen3_moe", **sizes}, megatron_cfg=megatron)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    policy.train(make_data(policy), LOSS)
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    kept = [name for name, weight in policy.state_dict().items() if torch.equal(weight, before[name])]
    assert len(routers) == 2 and kept == (routers if freezes else [])


def test_python_loss_trains_the_same_weights_as_the_native_loss():
    native, python = make_policy(), make_policy()
    for step in range(3):
        data = make_data(native, step)
        native.train(data, LOSS)
        python.train({**data, "generation_logprobs": python.get_logprobs(data)["logprobs"]}, pg_loss)
    for name, weight in native.state_dict().items():
        torch.testing.assert_close(python.state_dict()[name], weight, rtol=1e-4, atol=1e-5)


def test_mismatched_generation_logprobs_are_counted_and_old_logprobs_are_recomputed():
    wrong, right = make_policy(), make_policy(reuse_generation_logprobs="never")
    data = make_data(wrong)
    prev = wrong.get_logprobs(data)["logprobs"]
    data["generation_logprobs"] = data["generation_logprobs"].clone()
    data["generation_logprobs"][3, 4] += 0.25
    result = wrong.train(data, LOSS, gbs=6)
    assert result["exactness"].mismatched_tokens == 1
    assert result["exactness"].max_gap == pytest.approx(0.25, rel=1e-5)
    assert sum(result["all_mb_metrics"]["token_mult_prob_error"]) > 1.0
    right.train({**data, "prev_logprobs": prev}, LOSS, gbs=6)
    assert wrong.weight_digest() == right.weight_digest()


def test_old_logprobs_are_recomputed_if_the_first_update_compares_no_token():
    wrong, right = make_policy(), make_policy(reuse_generation_logprobs="never")
    data = make_data(wrong)
    data["sample_mask"] = data["sample_mask"].clone()
    data["sample_mask"][:6] = 0
    prev = wrong.get_logprobs(data)["logprobs"]
    wrong.train({**data, "generation_logprobs": data["generation_logprobs"] + 0.25}, LOSS, gbs=6)
    right.train({**data, "prev_logprobs": prev}, LOSS, gbs=6)
    assert wrong.weight_digest() == right.weight_digest()


def test_generation_activations_are_reused_only_after_a_step_with_equal_logprobs():
    policy = make_policy(kept_activations_gb=0.001)
    assert policy.model.max_kept_bytes == 0
    policy.train(make_data(policy), LOSS)
    assert 0.9e6 < policy.model.max_kept_bytes <= 1e6
    data = make_data(policy)
    data["generation_logprobs"][3, 4] += 0.25
    policy.train(data, LOSS)
    assert policy.model.max_kept_bytes == 0
    for saving in ({"kept_activations_gb": 0}, {"dtensor_cfg": {"activation_checkpointing": True}}):
        policy = make_policy(**saving)
        policy.train(make_data(policy), LOSS)
        assert policy.model.max_kept_bytes == 0
    policy = make_policy(reuse_generation_logprobs="never")
    policy.train({**make_data(policy), "prev_logprobs": torch.zeros(12, 9)}, LOSS)
    assert policy.model.max_kept_bytes == 0
    policy = make_policy()
    policy.train(make_data(policy), LOSS)
    assert policy.model.max_kept_bytes > 1e6  # a quarter of what is free


def test_generation_activations_are_kept_only_if_they_fit_in_a_quarter_of_free_memory(monkeypatch):
    policy = make_policy()
    data = make_data(policy)
    groups = [
        int((data["input_lengths"][g : g + 4] - 5).sum()) + 4 for g in (0, 4, 8)
    ]  # a group's prompt of 4 tokens counts once, a last token never
    needed = sum(groups) * policy.model.kept_bytes_per_token
    for available, kept in ((4 * needed - 4, 0), (4 * needed, needed)):
        policy = make_policy()
        monkeypatch.setattr(lm_policy, "available_bytes", lambda n=available: n)
        policy.train(make_data(policy), LOSS, gbs=12)
        assert policy.model.max_kept_bytes == kept
    data = make_data(policy)
    data["group_id"] = torch.arange(12)  # more tokens than the memory that was found
    policy.train(data, LOSS)
    assert policy.model.max_kept_bytes == 0


def rollouts(policy, seed):
    prompts = torch.randint(4, 14, (3, 4), generator=torch.Generator().manual_seed(seed)).repeat_interleave(4, 0)
    if not hasattr(policy, "engine"):  # one engine a policy: it counts the prompts
        policy.engine = policy.create_generation()
    data = BatchedDataDict(input_ids=prompts, input_lengths=torch.full((12,), 4))
    made = to_train(data, policy.engine.generate(data), 4)
    return made | {"advantages": torch.linspace(-1, 1, 12)[:, None].expand_as(made["input_ids"]).contiguous()}


@pytest.mark.parametrize("period", [0, 1, 3])
def test_reused_generation_activations_are_verified_by_a_periodic_full_forward_pass(period):
    policy, same = (make_policy("bfloat16", kept_activations_check_period=p) for p in (period, 20))
    compared = []
    for step in range(8):
        result = policy.train(rollouts(policy, step), LOSS)
        assert result["exactness"].mismatched_tokens == 0
        assert policy.reused_forward_share in (0, 1)
        compared.append(policy.reused_forward_share == 0)
        same.train(rollouts(same, step), LOSS)
    assert compared == [step == 0 or (period > 0 and step % period == 0) for step in range(8)]
    assert policy.weight_digest() == same.weight_digest()


def test_bit_flip_in_a_weight_is_detected_by_the_periodic_full_forward_pass():
    """If activations of generation are reused, only the LM head is compared, which a flipped bit in a layer does not
    change."""
    policy = make_policy("bfloat16", kept_activations_check_period=2)
    mismatched = []
    for step in range(4):
        data = rollouts(policy, step)
        bits = policy.state_dict()["model.layers.0.mlp.down_proj.weight"].view(torch.int16)
        bits[0, 0] ^= (1 << 13) if step else 0  # behind the model's back, until the optimizer writes the weight again
        mismatched.append(policy.train(data, LOSS)["exactness"].mismatched_tokens > 0)
    assert mismatched == [False, False, True, True]  # what did not agree is not kept: the step after it compares too


@pytest.mark.parametrize("gbs", [12, 4])
@pytest.mark.parametrize("error", [0.0, 0.25])
def test_second_epoch_over_a_batch_uses_old_logprobs_from_before_the_first_update(gbs, error):
    first, right = make_policy(), make_policy(reuse_generation_logprobs="never")
    data = make_data(first)
    prev = first.get_logprobs(data)["logprobs"]
    data["generation_logprobs"] = data["generation_logprobs"] + error * data["token_mask"]
    old = first.train(data, LOSS, gbs=gbs)["prev_logprobs"]
    assert torch.equal(old, prev)
    first.train({**data, "prev_logprobs": old}, LOSS, gbs=gbs)
    for _ in range(2):
        right.train({**data, "prev_logprobs": prev}, LOSS, gbs=gbs)
    assert first.weight_digest() == right.weight_digest()


def test_training_metrics_do_not_depend_on_the_micro_batch_size():
    """The global batches have different numbers of tokens, one sample is masked, and generation's log-probabilities
    differ."""

    def metrics(size):
        policy = make_policy(train_micro_batch_size=size)
        data = make_data(policy, rows=48)
        data["sample_mask"][5] = 0.0
        data["generation_logprobs"] = data["generation_logprobs"] + 0.01 * torch.arange(9) / 9
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum(1).view(3, 16).sum(1)
        assert len(set(tokens.tolist())) > 1
        return training_metrics(policy.train(data, LOSS, gbs=16)), float(tokens.mean())

    whole, tokens = metrics(16)
    assert whole["global_valid_toks"] == pytest.approx(tokens, abs=1e-12)
    assert whole["global_valid_seqs"] == pytest.approx(47 / 3, abs=1e-12)
    counts = {"global_valid_toks", "global_valid_seqs", "num_valid_samples", "lr", "wd"}
    for size in (4, 1):
        got, _ = metrics(size)
        assert got.keys() == whole.keys()
        assert {name: got[name] for name in counts} == {name: whole[name] for name in counts}
        for name, value in whole.items():
            assert got[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


def test_gradient_norm_is_the_mean_over_updates_with_a_valid_sample():
    policy = make_policy()
    data = make_data(policy, rows=48)
    data["sample_mask"][16:32] = 0
    result = policy.train(data, LOSS, gbs=16)
    first, masked, last = result["grad_norm"].tolist()
    assert masked == 0 < min(first, last)
    assert training_metrics(result)["grad_norm"] == pytest.approx((first + last) / 2, rel=1e-6)


def adamw(moments, remainders):
    """Return the section `optimizer`: AdamW with moments of the dtype `moments`, and with master weights stored as
    remainders if `remainders`."""
    state = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments, "store_param_remainders": remainders}
    return {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.1} | state}


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_policy_checkpoint_resumes_bit_identically(precision, moments, tmp_path):
    stage = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 5}}
    settings = dict(scheduler=[stage], optimizer=adamw(moments, remainders=moments == "uint8"))
    policy = make_policy(precision, **settings)
    policy.train(make_data(policy, 0), LOSS)
    policy.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    saved = load_file(tmp_path / "optimizer" / "optimizer.safetensors")
    assert saved["exp_avg"].dtype == getattr(torch, moments)
    masters = {"remainders"} if moments == "uint8" else {"masters"}
    assert saved.keys() - {"exp_avg", "exp_avg_sq"} == (masters if precision == "bfloat16" else set())
    assert sum(t.nbytes for t in saved.values()) + policy.model.compute.nbytes == policy.checkpoint_bytes(True)
    again = make_policy(precision, **settings, weights_path=tmp_path / "weights", optimizer_path=tmp_path / "optimizer")
    for step in (1, 2):
        data = make_data(policy, step)
        policy.train(data, LOSS)
        again.train(data, LOSS)
        assert policy.weight_digest() == again.weight_digest()
        assert policy.learning_rate == again.learning_rate


def masters_of(policy):
    """Return the float32 master weights."""
    if policy.model.masters is not None:
        return policy.model.masters
    return optimizer_state.joined(policy.model.compute, policy.model.remainders)


@pytest.mark.parametrize("first", [False, True], ids=["masters, then remainders", "remainders, then masters"])
def test_checkpoint_loads_with_and_without_master_weights_stored_as_remainders(first, tmp_path):
    def policy_with(remainders, **paths):
        return make_policy("bfloat16", optimizer=adamw("bfloat16", remainders), **paths)

    saved = policy_with(first)
    assert (saved.model.masters is None) == first
    assert torch.equal(masters_of(saved), masters_of(policy_with(not first)))
    saved.train(make_data(saved, 0), LOSS)
    saved.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    read = policy_with(not first, weights_path=tmp_path / "weights", optimizer_path=tmp_path / "optimizer")
    assert torch.equal(masters_of(read), masters_of(saved)) and torch.equal(read.trainer.exp_avg, saved.trainer.exp_avg)


@pytest.mark.parametrize("other", ["float32", "bfloat16"])
def test_checkpoint_with_moments_in_eight_bits_loads_with_moments_in_numbers_and_back(other, tmp_path):
    def save(policy, name):
        policy.save_checkpoint(tmp_path / name / "weights", tmp_path / name / "optimizer")
        return load_file(tmp_path / name / "optimizer" / "optimizer.safetensors")

    def resumed(moments, name):
        paths = {"weights_path": tmp_path / name / "weights", "optimizer_path": tmp_path / name / "optimizer"}
        return make_policy(optimizer=adamw(moments, False), **paths)

    policy = make_policy(optimizer=adamw("uint8", False))
    policy.train(make_data(policy, 0), LOSS)
    codes = save(policy, "codes")
    numbers = save(resumed(other, "codes"), "numbers")
    expected = optimizer_state.moments(codes["exp_avg"].numpy(), codes["exp_avg_sq"].numpy())
    for value, right in zip((numbers["exp_avg"], numbers["exp_avg_sq"]), expected):
        assert value.any()
        torch.testing.assert_close(value.double(), torch.from_numpy(right), rtol=5e-3, atol=1e-17, check_dtype=False)
    again = save(resumed("uint8", "numbers"), "again")
    assert torch.equal(again["exp_avg_sq"], codes["exp_avg_sq"])
    assert torch.equal(again["exp_avg"] % 128, codes["exp_avg"] % 128)


def test_saving_a_policy_without_lora_removes_the_adapter_of_an_earlier_save(tmp_path):
    make_policy(dtensor_cfg={"lora_cfg": {"enabled": True, "dim": 4}}).save_checkpoint(tmp_path)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    make_policy().save_checkpoint(tmp_path)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_saving_non_finite_weights_is_an_error_and_writes_no_file(precision, bad, tmp_path):
    policy = make_policy(precision)
    policy.state_dict()["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    with pytest.raises(
        NonFiniteError,
        match="^policy: 1 parameters are not finite, first model.layers.1.mlp.up_proj.weight, so nothing was saved",
    ):
        policy.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    assert list(tmp_path.iterdir()) == []


def test_policy_accepts_its_configuration_section_as_a_dictionary():
    section = {
        "model_name": "tiny-random", "precision": "float32", "train_global_batch_size": 12,
        "train_micro_batch_size": 12, "max_total_sequence_length": 16, "generation": {"temperature": 1.0},
    }  # fmt: skip
    policy = Policy(None, section, tiny_tokenizer(), seed=1, init_reference_model=False)
    assert policy.weight_digest() == make_policy(init_reference_model=False).weight_digest()
    assert policy.config.generation.max_new_tokens == 16
    with pytest.raises(ValueError, match="train_global_batch"):
        Policy(None, section | {"train_global_batch": 1}, tiny_tokenizer())
