"""NeMo RL's calls on a policy: its own engine, the calls on workers, and what one process cannot do."""

import pytest
import torch
from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.compat.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.compat.models.policy.lm_policy import Policy
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer


def make_policy(precision="float32", **changes):
    values = dict(model_name="tiny-random", precision=precision, train_global_batch_size=12, train_micro_batch_size=12, max_total_sequence_length=16,
                  optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.1}})  # fmt: skip
    paths = {k: changes.pop(k) for k in ("weights_path", "optimizer_path", "init_reference_model") if k in changes}
    config = PolicyConfig(**{**values, **changes})
    config.fill_defaults()
    return Policy(None, config, tiny_tokenizer(), seed=1, **paths)


def test_a_policy_generates_with_an_engine_on_its_own_weights():
    policy = make_policy(init_reference_model=False)
    assert policy.prepare_for_generation() is True and policy.finish_generation() is True
    prompts = BatchedDataDict(input_ids=torch.tensor([[4, 5, 6], [7, 8, 0]]), input_lengths=torch.tensor([3, 2]))
    out = policy.generate(prompts, greedy=True)
    assert out["output_ids"][0, :3].tolist() == [4, 5, 6] and (out["generation_lengths"] > 0).all()
    length = int(out["unpadded_sequence_lengths"][0])
    mask = torch.zeros_like(out["output_ids"], dtype=torch.float32)
    mask[0, 3:length] = 1.0
    data = {
        "input_ids": out["output_ids"],
        "input_lengths": out["unpadded_sequence_lengths"],
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 0.0]),
    }
    assert torch.equal(policy.get_logprobs(data)["logprobs"][0, 3:length], out["logprobs"][0, 3:length])
    assert policy.finish_generation() is True and isinstance(policy, GenerationInterface)


def test_calls_on_workers_reach_the_one_there_is():
    policy = make_policy(init_reference_model=False)
    assert policy.run_all_workers_single_data("weight_digest") == [policy.weight_digest()]
    assert policy.run_all_workers_multiple_data("prepare_for_lp_inference", keep_train_buffers=[True]) == [None]
    with pytest.raises(ValueError, match="2 entries for one worker"):
        policy.run_all_workers_multiple_data("weight_digest", [1, 2])
    assert policy.print_node_ip_and_gpu_id() == [("127.0.0.1", 0)] and policy.get_free_memory_bytes() > 0


@pytest.mark.parametrize("method, arguments", [
    ("score", ({},)), ("get_full_logits_ipc", ({},)), ("release_ipc_buffer", ()), ("preinit_nvshmem", ()),
    ("stream_weights_via_ipc_zmq", (1,)), ("init_collective_mcore_generation", ("", 0, 1)),
])  # fmt: skip
def test_what_one_process_cannot_do_says_why(method, arguments):
    policy = make_policy(init_reference_model=False)
    options = {"rank_offset": 0} if method == "init_collective_mcore_generation" else {}
    with pytest.raises(NotImplementedError, match=f"has no {method}: "):
        getattr(policy, method)(*arguments, **options)
