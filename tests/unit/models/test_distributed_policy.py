import errno
import re

import pytest
import tiny
import torch
from nemo_rl_cpp.config import load_eval_config
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.models.distributed_models import DistributedPolicy
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.policy.train_step import NonFiniteError
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]
B = 16
TEACHERS = {"teacher.model_name": "tiny-random"}


def batch(generation_logprobs=None):
    """Return 16 samples in 4 prompt groups. Each sample has a name, by which `NamedLoss` recognises it."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 12, (B,), generator=generator)
    T = int(lengths.sum())
    made = RaggedBatch(
        offsets_of(lengths),
        {"input_ids": torch.randint(0, 16, (T,), generator=generator), "token_mask": torch.ones(T), "advantages": torch.ones(T)},
        {"sample_mask": torch.ones(B), "group_id": torch.arange(4).repeat_interleave(4), "names": [f"s{i}" for i in range(B)],
         "messages": [[{"role": "user"}] for _ in range(B)]},
    )  # fmt: skip
    if generation_logprobs is not None:
        made.tokens["generation_logprobs"] = generation_logprobs
    return made


class NamedLoss:
    """A policy-gradient loss with advantages of 1, which adds `steepness[name]` to the slope of the named samples
    without changing the loss's value."""

    def __init__(self, steepness):
        self.steepness = steepness

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"][:, 1:]
        ratio = (next_token_logprobs - data["prev_logprobs"][:, 1:]).exp() * mask
        steep = torch.tensor([self.steepness.get(name, 0.0) for name in data["names"]])[:, None]
        turned = steep * ((next_token_logprobs - next_token_logprobs.detach()) * mask)
        return -ratio.sum() / global_valid_toks + turned.sum(), {}


def config(*overrides):
    from nemo_rl_cpp.config import load_grpo_config

    made = load_grpo_config(
        "grpo_tiny.yaml",
        ["policy.gradient_blocks=2", "policy.train_global_batch_size=8", "policy.train_micro_batch_size=4", *overrides],
    )
    return made.policy


@pytest.fixture(scope="module")
def tokenizer():
    from nemo_rl_cpp.algorithms.parts import make_tokenizer

    return make_tokenizer(config())


@pytest.fixture
def overrides():
    """Configuration overrides of both policies; tests set them by parametrisation."""
    return ()


@pytest.fixture
def one(tokenizer, overrides):
    tiny.one_thread()
    return Policy(None, config(*overrides), tokenizer, init_reference_model=False, teachers=TEACHERS)


@pytest.fixture
def two(tokenizer, overrides, forked_workers):
    cluster = Cluster(
        [2],
        use_gpus=False,
        settings=ClusterConfig(executor="processes", cpus_per_worker=1, communication_timeout_s=20.0),
    )
    made = DistributedPolicy(cluster, config(*overrides), tokenizer, init_reference_model=False, teachers=TEACHERS)
    yield made
    cluster.shutdown()


def test_policy_training_in_two_processes_is_bit_identical_to_one_process(one, two):
    data = batch()
    alone, together = one.get_logprobs(data)["logprobs"], two.get_logprobs(data)["logprobs"]
    assert torch.equal(alone, together) and float(alone.abs().sum()) > 0
    taught = [policy.get_teacher_logprobs(data, "tiny-random")["teacher_logprobs"] for policy in (one, two)]
    assert torch.equal(*taught) and not torch.equal(taught[0], alone)
    for asked, teacher in ((data, "tiny-random"), (data, None)):
        alone, together = (policy.get_topk_logprobs(asked, 3, teacher) for policy in (one, two))
        assert torch.equal(alone["ids"], together["ids"]) and torch.equal(alone["logprobs"], together["logprobs"])
    padded = dict(data.items())
    assert torch.equal(one.get_logprobs(padded)["logprobs"], two.get_logprobs(padded)["logprobs"])
    assert {n: t.tolist() for n, t in one.state_dict().items()} == {n: t.tolist() for n, t in two.state_dict().items()}
    assert one.checkpoint_bytes(True) == two.checkpoint_bytes(True) and one.learning_rate == two.learning_rate


def test_one_mismatched_generation_logprob_makes_all_ranks_recompute_old_logprobs(one, two):
    logprobs = one.get_logprobs(batch())["logprobs"]
    for sample in (0, 8, 15):
        logprobs[int(batch().offsets[sample]) + 2] -= 0.3
    results = [policy.train(batch(logprobs.clone()), NamedLoss({"s9": 3.0})) for policy in (one, two)]
    assert one.weight_digest() == two.weight_digest()
    assert torch.equal(results[0]["prev_logprobs"], results[1]["prev_logprobs"])
    assert results[0]["exactness"] == results[1]["exactness"] and results[0]["exactness"].mismatched_tokens == 1
    assert {k: sorted(v) for k, v in results[0]["all_mb_metrics"].items()} == {
        k: sorted(v) for k, v in results[1]["all_mb_metrics"].items()
    }


EXPERTS = (
    "++policy.hf_config_overrides.model_type=qwen3_moe", "++policy.hf_config_overrides.num_experts=6", "++policy.hf_config_overrides.num_experts_per_tok=2",
    "++policy.hf_config_overrides.moe_intermediate_size=32", "policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true",
)  # fmt: skip


SMALL_STATE = tuple(
    f"++policy.optimizer.kwargs.{setting}"
    for setting in ("exp_avg_dtype=uint8", "exp_avg_sq_dtype=uint8", "store_param_remainders=true")
)


@pytest.mark.parametrize("overrides", [("policy.precision=bfloat16", *SMALL_STATE)], ids=["small state"])
def test_checkpoint_with_8_bit_optimizer_state_is_equal_from_one_and_two_processes(one, two, tmp_path):
    policies = {"one": one, "two": two}
    for name, policy in policies.items():
        for _ in range(2):
            policy.train(batch(policy.get_logprobs(batch())["logprobs"]), NamedLoss({"s9": 3.0}))
        policy.save_checkpoint(tmp_path / name / "weights", tmp_path / name / "optimizer")
    assert one.weight_digest() == two.weight_digest()
    files = [load_file(tmp_path / name / "optimizer" / "optimizer.safetensors") for name in policies]
    assert {name: tensor.dtype for name, tensor in files[0].items()} == {
        "exp_avg": torch.uint8, "exp_avg_sq": torch.uint8, "remainders": torch.int16,
    }  # fmt: skip
    assert all(torch.equal(files[0][name], tensor) and tensor.any() for name, tensor in files[1].items())


@pytest.mark.parametrize(
    "overrides",
    [(*EXPERTS, "policy.megatron_cfg.moe_router_load_balancing_type=seq_aux_loss", "policy.megatron_cfg.moe_aux_loss_coeff=0.5")],
    ids=["balanced experts"],
)  # fmt: skip
def test_moe_load_balancing_loss_has_the_same_gradient_in_one_and_two_processes(one, two):
    results = [policy.train(batch(policy.get_logprobs(batch())["logprobs"]), NamedLoss({})) for policy in (one, two)]
    assert one.weight_digest() == two.weight_digest()
    losses = [sorted(result["all_mb_metrics"]["moe/load_balancing_loss"]) for result in results]
    assert losses[0] == losses[1] and sum(losses[0]) > 1


BESIDE, SHARDED = "policy.overlap_grad_reduce=true", "policy.data_parallel_sharding_strategy=optim_grads"


@pytest.mark.parametrize("weight, said", [(float("inf"), "gradient of the loss is"), (3e38, "gradient norm is")])
@pytest.mark.parametrize(
    "sample, overrides", [(0, ()), (6, (BESIDE,)), (0, (SHARDED, "policy.gradient_blocks=4"))], ids=["after", "beside", "sharded"]
)  # fmt: skip
def test_non_finite_gradient_is_reported_with_its_sample_and_batch_is_saved(one, two, tmp_path, sample, weight, said):
    before, messages = one.weight_digest(), []
    for policy, folder in ((one, tmp_path / "one"), (two, tmp_path / "two")):
        policy.keep_bad_batches(folder)
        # a gradient that overflows in the backward pass is traced to parameters, in one process
        names = (
            f"sample {sample}, token"
            if "of the loss" in said
            else "first bad parameters: model."
            if policy is one
            else ""
        )
        with pytest.raises(NonFiniteError, match=f"{said}.*{names}") as caught:
            policy.train(batch(), NamedLoss({f"s{sample}": weight}))
        message = str(caught.value).partition("; the batch was written")[0]
        messages.append(re.sub("; first bad parameters: [^;]*", "", message))
        (kept,) = folder.iterdir()
        assert set(torch.load(kept, weights_only=True)) >= {"input_ids", "token_mask"}
    assert messages[0] == messages[1] and one.weight_digest() == two.weight_digest() == before
    for policy in (one, two):
        policy.train(batch(), NamedLoss({}))
    assert one.weight_digest() == two.weight_digest() != before


@pytest.mark.parametrize(
    "overrides", [(BESIDE,), (SHARDED,), (SHARDED, "policy.gradient_blocks=4")], ids=["beside", "one block", "in turns"]
)
def test_all_ranks_can_train_after_an_error_on_one_rank_even_if_the_other_had_no_backward_pass(one, two, overrides):
    """The failed rank has joined the sum of gradients; the other rank has not."""
    data = batch()
    count, in_turns = two.config.gradient_blocks, two.config.shards_gradients
    first, second = (Ranks(rank, 2).blocks(data, 0, 8, count, in_turns) for rank in range(2))
    for rows in second:
        data.samples["sample_mask"][rows] = 0
    with pytest.raises(NonFiniteError, match="gradient of the loss is inf"):
        two.train(data, NamedLoss({f"s{first[0][0]}": float("inf")}))
    for policy in (one, two):
        policy.train(batch(), NamedLoss({}))
    assert one.weight_digest() == two.weight_digest()


class FailsBefore(NamedLoss):
    """A loss that raises an error before the first micro-batch, on the first rank that creates `folder`."""

    def __init__(self, folder):
        super().__init__({})
        self.folder = folder

    def zero_gradient_rows(self, data):
        try:
            self.folder.mkdir()
        except FileExistsError:
            return None
        raise ValueError("this rank cannot say")


@pytest.mark.parametrize(
    "overrides", [(SHARDED,), (SHARDED, "policy.gradient_blocks=4")], ids=["one block", "in turns"]
)
def test_all_ranks_can_train_after_one_rank_fails_before_its_first_micro_batch(one, two, tmp_path, overrides):
    with pytest.raises(ValueError, match="this rank cannot say"):
        two.train(batch(), FailsBefore(tmp_path / "claimed"))
    for policy in (one, two):
        policy.train(batch(), NamedLoss({}))
    assert one.weight_digest() == two.weight_digest()


def test_failed_checkpoint_write_on_one_rank_raises_and_all_ranks_stay_usable(two, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:
        two.save_checkpoint(tmp_path / "file" / "weights", tmp_path / "optimizer")
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    two.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    assert (tmp_path / "weights" / "model.safetensors").is_file() and (
        tmp_path / "optimizer" / "optimizer.json"
    ).is_file()


def test_evaluation_with_engines_on_two_ranks_gives_the_score_of_one_process(tmp_path):
    results = []
    for more in ((), ("cluster.executor=processes", "cluster.gpus_per_node=2", "cluster.cpus_per_worker=1")):
        with tiny.make(tmp_path / str(len(results)), *tiny.SMALL, *more) as run:
            evaluation = load_eval_config("evals/reverse_digits.yaml", ["++data.num_samples=8"])
            results.append(run.evaluate(evaluation))
    assert results[0].score == results[1].score
