import importlib
import json
from pathlib import Path

import forked_workers
import pytest
import torch
from hf_players import batch, hf_policy, make, relative
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster
from nemo_rl_cpp.models.distributed_models import DistributedPolicy
from nemo_rl_cpp.models.policy.train_step import NonFiniteError
from safetensors.torch import load_file

pytestmark = pytest.mark.slow  # processes, and transformers is imported
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def cluster():
    torch.set_num_threads(1)  # as each rank has
    made = Cluster([2], use_gpus=False, settings=ClusterConfig(executor="processes", cpus_per_worker=1))
    importlib.import_module("transformers")
    with pytest.MonkeyPatch.context() as patch:
        forked_workers.in_place(patch)
        assert made.workers
    yield made
    made.shutdown()


def loss():
    return ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))


def uneven(seed=0):
    """Return a batch whose ranks have different numbers of micro-batches, because its prompt groups have very different
    lengths. No token of the second group has a gradient."""
    data = batch(seed)
    data["input_lengths"][:8] = torch.tensor([9, 9, 9, 9, 5, 5, 5, 5])
    data["token_mask"] = ((torch.arange(9) >= 4) & (torch.arange(9) < data["input_lengths"][:, None])).float()
    data["advantages"][4:8] = 0.0
    return data


def both(cluster, model_type, paths=None, **changes):
    """Return (the policy in one process, the policy in the two processes of `cluster`)."""
    changes = {"train_micro_batch_size": 2, "logprob_batch_size": 2, **changes}
    return (
        hf_policy(model_type, paths, **changes),
        make(DistributedPolicy, model_type=model_type, paths=paths, cluster=cluster, backend="hf", **changes),
    )


def close(one, two, tolerance):
    ours, theirs = two.state_dict(), one.state_dict()
    assert set(ours) == set(theirs)
    whole = [torch.cat([tensors[name].flatten().double() for name in sorted(theirs)]) for tensors in (ours, theirs)]
    return relative(*whole) <= tolerance


WAYS = {
    "llama packed": ("llama", {"sequence_packing": {"enabled": True}}),
    "gemma tied, recomputed": ("gemma", {"dtensor_cfg": {"activation_checkpointing": True}, "sequence_packing": {"enabled": False}}),
    "mixtral padded": ("mixtral", {"sequence_packing": {"enabled": False}}),
    # without biases: a key's bias has a gradient of 0 but for rounding, which AdamW makes as large as any other
    "gpt_neox filtered": (
        "gpt_neox",
        {"generation": {"temperature": 0.7, "top_k": 9, "top_p": 0.8}, "hf_config_overrides": {"attention_bias": False}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_two_fsdp_ranks_train_the_same_weights_as_one_process(way, cluster, tmp_path):
    model_type, changes = WAYS[way]
    one, two = both(cluster, model_type, **changes)
    assert two.weight_digest() == one.weight_digest()
    data = uneven(9)
    for method in ("get_logprobs", "get_reference_policy_logprobs"):
        (expected,), (got,) = (getattr(policy, method)(data).values() for policy in (one, two))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for step in range(3):
        data = uneven(step)
        expected, got = one.train(data, loss()), two.train(data, loss())
        assert relative(got["loss"], expected["loss"]) <= 1e-5
        assert relative(got["grad_norm"], expected["grad_norm"]) <= 1e-5
        assert two.performance() == one.performance() and 0 < one.performance()["zero_gradient_share"] < 1
    few = {name: value[:2] for name, value in batch(4).items()}  # with gbs=1 one rank has no sample
    assert relative(two.train(few, loss(), gbs=1)["loss"], one.train(few, loss(), gbs=1)["loss"]) <= 1e-5
    assert close(one, two, 1e-6) and two.non_finite_parameters() == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_checkpoint_of_two_fsdp_ranks_loads_in_one_process_and_in_two(precision, cluster, tmp_path):
    one, two = both(cluster, "olmo", precision=precision)
    two.train(batch(0), loss())
    two.save_checkpoint(tmp_path / "two", tmp_path / "optimizer")
    paths = {"weights_path": tmp_path / "two", "optimizer_path": tmp_path / "optimizer"}
    alone, again = both(cluster, "olmo", paths, precision=precision)
    assert alone.weight_digest() == again.weight_digest() == two.weight_digest() != one.weight_digest()
    alone.save_checkpoint(tmp_path / "one", tmp_path / "alone")
    again.save_checkpoint(tmp_path / "three", tmp_path / "again")
    for other in ("alone", "again"):
        saved, here = (load_file(tmp_path / f / "optimizer.safetensors") for f in ("optimizer", other))
        assert saved.keys() == here.keys() and all(torch.equal(here[name], saved[name]) for name in saved)
        assert (tmp_path / other / "optimizer.json").read_text() == (
            tmp_path / "optimizer" / "optimizer.json"
        ).read_text()
    for other in ("one", "three"):
        assert files_of(tmp_path / other) == files_of(tmp_path / "two")
    for step in (1, 2):
        expected, got = alone.train(batch(step), loss()), again.train(batch(step), loss())
        assert relative(got["loss"], expected["loss"]) <= (1e-5 if precision == "float32" else 2e-2)
    assert close(alone, again, 1e-6 if precision == "float32" else 1e-3)


def files_of(folder: Path):
    """Return {file name: content}; the content of a tensor file is {tensor name: values}."""
    read = {
        ".json": lambda path: json.loads(path.read_text()),
        ".safetensors": lambda path: {k: v.tolist() for k, v in load_file(path).items()},
    }
    return {path.name: read.get(path.suffix, Path.read_bytes)(path) for path in folder.iterdir()}


def test_generated_responses_do_not_depend_on_the_number_of_fsdp_ranks(cluster):
    one, two = both(cluster, "gemma", generation={"max_new_tokens": 6})
    ids = batch(3)["input_ids"]
    prompts = {
        "input_ids": ids, "input_lengths": torch.tensor([3, 3, 9, 9, 4, 4, 5, 5, 9, 9, 2, 2]), "draw_ids": torch.arange(12) // 2,
        "sample_index": torch.arange(12) % 2, "stream": "train",
    }  # fmt: skip
    engines = [policy.create_generation(policy.config.generation, seed=3) for policy in (one, two)]
    for step in range(2):
        for greedy in (False, True):
            expected, got = (engine.generate(prompts, greedy=greedy) for engine in engines)
            assert torch.equal(got["output_ids"], expected["output_ids"])
            torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=1e-5, atol=1e-5)
        assert engines[1].weight_digest() == two.weight_digest()
        few = engines[1].generate(
            {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in prompts.items()}
        )
        assert few["output_ids"].shape[0] == 1  # one rank has no prompt at all
        for policy in (one, two):
            policy.train(batch(step), loss())


def test_error_for_a_nan_advantage_names_its_sample_and_all_fsdp_ranks_stay_usable(cluster, tmp_path):
    _, two = both(cluster, "llama")
    two.keep_bad_batches(tmp_path)
    before, data = two.weight_digest(), uneven()
    data["advantages"][2, 4] = float("nan")
    with pytest.raises(NonFiniteError, match="sample 2, token"):
        two.train(data, loss())
    assert list(tmp_path.glob("nonfinite_policy_batch*.pt")) and two.weight_digest() == before
    assert two.train(uneven(), loss())["grad_norm"].isfinite().all()  # the ranks are still in step
