from functools import partial

import forked_workers
import pytest
import slice_players
import torch
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, canonical_config
from nemo_rl_cpp.models.model_folder import ModelFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    made = Cluster([2], use_gpus=False, settings=ClusterConfig(executor="processes", cpus_per_worker=1))
    with pytest.MonkeyPatch.context() as patch:
        forked_workers.in_place(patch)
        assert made.workers
    yield made
    made.shutdown()


def close(a, b, tolerance):
    """Return whether a and b differ by at most `tolerance` times the largest element of b."""
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def both(cluster, model, dtype=torch.float32, value_head=False, **how):
    """Return (results of the whole model, results of each tensor-parallel rank)."""
    torch.set_num_threads(1)
    alone = slice_players.player(model, dtype, 1, value_head, Ranks()).answers(**how)
    group = WorkerGroup(cluster, partial(slice_players.player, model, dtype, 2, value_head))
    return alone, group.call_all("answers", **how)


HOW = [("llama_gqa", {}), ("llama_mha_tied", {"temperature": 0.7}), ("qwen2_biases", {"checkpoint": True}), ("qwen3_head_norms", {}),
       ("gemma2_windows", {}), ("granite_factors", {}), ("gemma2_windows", {"top_p": 0.9}),
       ("llama_all_biases", {}), ("many_blocks", {}), ("llama_gqa", {"top_p": 0.9, "temperature": 0.8}), ("llama_mha_tied", {"top_k": 20})]  # fmt: skip


@pytest.mark.parametrize("model, how", HOW, ids=[f"{m}-{'-'.join(h)}" for m, h in HOW])
def test_two_tensor_parallel_ranks_give_the_logprobs_and_gradients_of_the_whole_model(cluster, model, how):
    alone, (first, second) = both(cluster, model, **how)
    for name in ("logits", "logprobs", "scored", "unfiltered"):
        if alone[name] is None:
            continue
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(torch.isinf(first[name]), torch.isinf(alone[name]))
        kept = ~torch.isinf(alone[name])
        assert close(first[name][kept], alone[name][kept], 1e-5), name
    assert torch.equal(first["logprobs"], first["scored"])  # the bits do not depend on what is kept
    assert first["norm"] == second["norm"] and abs(first["norm"] / alone["norm"] - 1) < 1e-5
    assert second["grads"] is None and first["grads"].keys() == alone["grads"].keys()
    for name, gradient in alone["grads"].items():
        assert close(first["grads"][name], gradient, 1e-5), name
    assert first["digest"] == second["digest"] and first["finite"]
    for name, weights in first["repeated"].items():
        assert torch.equal(weights, second["repeated"][name]), name


@pytest.mark.parametrize(
    "model, dtype, value_head, bounds",
    [("llama_gqa", torch.bfloat16, False, (2e-2, 4e-2)), ("qwen3_head_norms", torch.bfloat16, False, (2e-2, 4e-2)),
     ("qwen3_head_norms", torch.float64, False, (1e-13, 1e-12)), ("qwen2_biases", torch.float32, True, (1e-5, 1e-5))],
    ids=["bfloat16", "bfloat16 with norms of heads", "float64", "critic"],
)  # fmt: skip
def test_tensor_parallel_ranks_of_every_dtype_match_the_model_up_to_rounding(cluster, model, dtype, value_head, bounds):
    alone, (first, second) = both(cluster, model, dtype, value_head)
    assert torch.equal(first["logprobs"], second["logprobs"]) and torch.equal(first["logprobs"], first["scored"])
    assert close(first["logprobs"], alone["logprobs"], bounds[0])
    for name, gradient in alone["grads"].items():
        assert close(first["grads"][name], gradient, bounds[1]), name


def refused(model, count, **overrides):
    config = canonical_config(TINY_CONFIG | slice_players.MODELS[model] | overrides)
    with pytest.raises(ModelFolderError) as caught:
        ModelFolder(config, None).check_slices(count, "policy.dtensor_cfg.tensor_parallel_size")
    return str(caught.value)


def test_heads_of_gemma_4_on_a_gpu_are_an_error_that_names_the_cpu():
    config = canonical_config(TINY_CONFIG | {"model_type": "gemma4_text", "global_head_dim": 512})
    ModelFolder(config, None).check_device("cpu")
    with pytest.raises(ModelFolderError, match="global_head_dim is 512, .* heads of up to 256: take the CPU"):
        ModelFolder(config, None).check_device("cuda")


def test_tensor_parallelism_for_an_indivisible_model_is_an_error_that_states_the_reason():
    key = "policy.dtensor_cfg.tensor_parallel_size is"
    assert refused("llama_gqa", 4).startswith(
        f"{key} 4, but the model has 2 key/value heads (num_key_value_heads), which 4 processes"
    )
    assert refused("llama_gqa", 2, intermediate_size=97).startswith(f"{key} 2, but the model has 97 columns of the MLP")
    assert refused("llama_mha_tied", 4, vocab_size=3).startswith(f"{key} 4, but the vocabulary has 3 entries")
    olmo = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    assert "tensors of the model hold several matrices together (phi3)" in refused(
        "llama_gqa", 2, model_type="phi3", architectures=["Phi3ForCausalLM"]
    )
    assert "has recurrent layers (qwen3_5_text)" in refused("llama_gqa", 2, model_type="qwen3_5_text")
    assert "is a mixture of experts (mixtral)" in refused("llama_gqa", 2, model_type="mixtral")
    assert "normalises all heads of the queries and keys together (olmo2)" in refused("llama_gqa", 2, **olmo)
