"""What NeMo RL's code asks of a generation engine and of its configuration."""

import pytest
import torch
from fakes import ByteTokenizer, FakeGeneration
from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.compat.models.generation import configure_generation_config
from nemo_rl_cpp.compat.models.generation.interfaces import (
    GenerationInterface,
    GenerationSamplingParams,
    should_use_async_rollouts,
    verify_right_padding,
)
from nemo_rl_cpp.compat.models.policy.interfaces import ColocatablePolicyInterface
from nemo_rl_cpp.compat.models.value.interfaces import ValueInterface
from nemo_rl_cpp.compat.weight_sync.interfaces import WeightSynchronizer


def test_right_padding():
    good = BatchedDataDict(input_ids=torch.tensor([[5, 0, 0], [5, 6, 7]]), input_lengths=torch.tensor([1, 3]))
    assert verify_right_padding(good) == (True, None)
    left = BatchedDataDict(input_ids=torch.tensor([[5, 6, 7], [0, 0, 5]]), input_lengths=torch.tensor([3, 1]))
    with pytest.raises(ValueError, match="row 1 is not padded on the right.*position 2 holds 5 instead of 0"):
        verify_right_padding(left)
    assert not verify_right_padding(left, raise_error=False)[0]
    assert not verify_right_padding(good, pad_value=9, raise_error=False)[0]
    long = BatchedDataDict(input_ids=torch.zeros(1, 2), input_lengths=torch.tensor([3]))
    assert "claims 3 tokens" in verify_right_padding(long, raise_error=False)[1]
    with pytest.raises(ValueError, match="keys are"):
        verify_right_padding(BatchedDataDict(input_ids=torch.zeros(1, 2)))
    with pytest.raises(ValueError, match="shape"):
        verify_right_padding(BatchedDataDict(input_ids=torch.zeros(2), input_lengths=torch.ones(2)))


def test_what_a_fake_engine_gives_is_padded_on_the_right():
    data = BatchedDataDict(
        input_ids=torch.tensor([[50, 51], [52, 256]]), input_lengths=torch.tensor([2, 1]), stop_strings=[["\n"], None]
    )
    output = FakeGeneration().generate(data)
    assert verify_right_padding(output, pad_value=256) == (True, None)


def base_config(**changes):
    return {
        "backend": "native",
        "max_new_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop_token_ids": None,
        "stop_strings": None,
    } | changes


def test_configure_fills_in_what_the_tokenizer_knows():
    config = configure_generation_config(base_config(), ByteTokenizer())
    assert config["_pad_token_id"] == 256 and config["stop_token_ids"] == [257]
    assert configure_generation_config(base_config(stop_token_ids=[3]), ByteTokenizer())["stop_token_ids"] == [3]
    for is_eval, stop, load, skip in [
        (False, None, "dummy", True),
        (False, ["x"], "dummy", False),
        (True, None, "auto", False),
    ]:
        config = base_config(backend="vllm", vllm_cfg={}, stop_strings=stop)
        engine = configure_generation_config(config, ByteTokenizer(), is_eval=is_eval)["vllm_cfg"]
        assert engine == {"load_format": load, "skip_tokenizer_init": skip}

    class NoPad(ByteTokenizer):
        pad_token_id = None

    with pytest.raises(ValueError, match="pad token"):
        configure_generation_config(base_config(), NoPad())
    with pytest.raises(ValueError, match="draft"):
        configure_generation_config(base_config(), ByteTokenizer(), trains_mtp=True)


def test_sampling_and_async_choice():
    assert GenerationSamplingParams.from_generation_config(base_config()) == GenerationSamplingParams(0.7, 0.9, 5)
    assert not should_use_async_rollouts(None) and not should_use_async_rollouts(base_config())
    assert should_use_async_rollouts(base_config(use_async_rollouts=True))
    assert should_use_async_rollouts(base_config(backend="vllm", vllm_cfg={"async_engine": True}))


def test_what_an_engine_cannot_do_it_says():
    class Engine(FakeGeneration, GenerationInterface):
        pass

    engine = Engine()
    assert engine.shutdown() and not engine.requires_kv_scale_sync and engine.get_logger_metrics() == {}
    with pytest.raises(NotImplementedError, match="Engine has no update_weights_from_collective"):
        engine.update_weights_from_collective()
    for interface in (ColocatablePolicyInterface, ValueInterface, WeightSynchronizer):
        with pytest.raises(TypeError, match="abstract"):
            interface()
