from functools import partial

import pytest
from nemo_rl_cpp._native import C
from nemo_rl_cpp.serving.model import EngineSizes, Limits, load_model
from served import make_folder


class Runner(C.ModelRunner):
    """A fake model runner whose KV-cache blocks hold 16 tokens in 1000 bytes."""

    def block_size(self):
        return 16

    def bytes_per_block(self):
        return 1000

    def vocab_size(self):
        return 10


def test_computed_maximum_sequence_length_for_the_kv_cache_is_the_engines_actual_limit():
    runner = Runner()

    def make(length, cache):
        return C.ResidentEngine(
            runner, max_batch_size=1, prefill_chunk_tokens=16, max_model_len=length, max_cache_bytes=cache, token_bytes=[]
        )  # fmt: skip

    for cache in (2000, 3999, 17_000):
        longest = runner.longest_sequence(16, cache)
        make(longest, cache)
        with pytest.raises(ValueError, match="cache blocks"):
            make(longest + 1, cache)


def test_smallest_kv_cache_for_the_maximum_sequence_length_accepts_prompts_of_any_length():
    """A prompt that does not end with a block needs a copy of its last block."""
    runner, rule = Runner(), C.SamplingRule(temperature=1.0, top_p=1.0, top_k=0, greedy=False)
    longest = runner.longest_sequence(16, 3000)
    assert longest == 33
    for prompt in range(1, longest):
        engine = C.ResidentEngine(
            runner, max_batch_size=1, prefill_chunk_tokens=16, max_model_len=longest, max_cache_bytes=3000, token_bytes=[]
        )  # fmt: skip
        engine.submit([1] * prompt, rule=rule, max_new_tokens=longest - prompt, stop_token_ids=[], stop_strings=[], samples=2, seed=0,
                      stream=0, draw_id=0, first_sample=0)  # fmt: skip


def test_server_reports_a_maximum_length_limited_by_the_kv_cache_capacity(tmp_path):
    folder = str(make_folder(tmp_path / "m"))
    load = partial(load_model, folder, served_name=None, precision="float32", limits=Limits())
    with pytest.warns(UserWarning, match="512 positions"):
        model = load(sizes=EngineSizes(kv_cache_gb=50e-6, max_batch_size=2))
    model.engine.shut_down()
    assert 2 <= model.max_model_len < 512
    with pytest.raises(ValueError, match="--max-model-len is 400"):
        load(sizes=EngineSizes(max_model_len=400, kv_cache_gb=50e-6))
    with pytest.raises(ValueError, match="--kv-cache-gb: .* hold no sequence of this model"):
        load(sizes=EngineSizes(kv_cache_gb=1e-8))
