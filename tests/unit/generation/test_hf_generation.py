import pytest
import torch
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.models.policy.lm_policy import Policy
from paired_prompts import prompts, texts

pytestmark = pytest.mark.slow  # transformers is imported
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def one_thread():
    """Models of this size are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


KINDS = ("gemma", "phi", "olmo", "gpt_neox", "mixtral", "gemma2", "gpt2", "bloom", "mamba")
"""gemma2 with a window of 3 tokens; gpt2 has a table of positions, bloom none; mamba keeps a state instead of keys and values"""


def policy_of(kind, cls=None, **generation):
    from nemo_rl_cpp.models.hf.trained import HfPolicy

    overrides = {"model_type": kind, "initializer_range": 0.1, "max_position_embeddings": 24}
    overrides |= {"sliding_window": 3} if kind == "gemma2" else {"n_positions": 24} if kind == "gpt2" else {}
    config = PolicyConfig(
        model_name="tiny-random", precision="float32", max_total_sequence_length=24, backend="hf", hf_config_overrides=overrides,
        generation={"max_new_tokens": 12, "stop_token_ids": [2], **generation},
    )  # fmt: skip
    config.fill_defaults()
    return (cls or HfPolicy)(None, config, tiny_tokenizer(), seed=1)


def some(data, rows):
    return {name: value if isinstance(value, str) else value[rows] for name, value in data.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_response_generated_with_transformers_does_not_depend_on_other_samples_in_the_batch(kind):
    settings = {"temperature": 0.9, "top_k": 11, "top_p": 0.95, "stop_token_ids": [2, 5, 9]}
    policy = policy_of(kind, **settings)
    engine, data = policy.create_generation(seed=5), prompts()
    out = engine.generate(data)
    expected = texts(out, data)
    assert len({tuple(text) for text in expected}) > 6 and len({len(text) for text in expected}) > 1
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = engine.generate(some(data, order))
    assert [expected[i] for i in order] == texts(shuffled, some(data, order))
    for small in ({"max_batch_size": 2}, {"prefill_chunk_tokens": 3}, {"kv_cache_gb": 1e-9}):
        other = policy_of(kind, **settings, **small).create_generation(seed=5).generate(data)
        assert texts(other, data) == expected
        torch.testing.assert_close(other["logprobs"], out["logprobs"], rtol=0, atol=1e-5)
    scored = {"input_ids": out["output_ids"], "input_lengths": out["unpadded_sequence_lengths"]}
    scored |= {"token_mask": (out["logprobs"] != 0).float(), "sample_mask": torch.ones(12)}
    torch.testing.assert_close(policy.get_logprobs(scored)["logprobs"], out["logprobs"], rtol=0, atol=1e-5)


def test_samples_generated_with_transformers_depend_on_every_part_of_the_sampling_seed(kind="gemma"):
    policy, data = policy_of(kind), prompts()

    def sampled(seed=5, greedy=False, **changes):
        return texts(policy.create_generation(seed=seed).generate({**data, **changes}, greedy=greedy), data)

    others = sampled(seed=6), sampled(stream="val"), sampled(draw_ids=data["draw_ids"] + 6)
    assert sampled() not in others
    greedy = sampled(greedy=True)
    assert greedy[0::2] == greedy[1::2] == sampled(seed=6, greedy=True)[0::2]


def test_transformers_and_native_generation_sample_the_same_responses(tmp_path):
    from nemo_rl_cpp.models.hf.trained import HfPolicy

    values = dict(precision="float32", max_total_sequence_length=24, generation={"max_new_tokens": 12, "top_p": 0.9})
    made = []
    for cls, backend, name in ((Policy, "native", "tiny-random"), (HfPolicy, "hf", str(tmp_path / "model"))):
        config = PolicyConfig(
            model_name=name, backend=backend, hf_config_overrides={"initializer_range": 0.1}, **values
        )
        config.fill_defaults()
        made.append(cls(None, config, tiny_tokenizer(), seed=1))
        if backend == "native":
            made[0].save_checkpoint(tmp_path / "model")
    native, ours = (policy.create_generation(seed=9).generate(prompts()) for policy in made)
    assert texts(native, prompts()) == texts(ours, prompts())
    torch.testing.assert_close(native["logprobs"], ours["logprobs"], rtol=0, atol=1e-5)
    assert torch.equal(native["truncated"], ours["truncated"])


@pytest.mark.parametrize("kind", ["gemma", "mamba"])
def test_responses_generated_with_transformers_end_at_stop_strings(kind):
    policy, data = policy_of(kind, stop_token_ids=[]), prompts()
    tokenizer = tiny_tokenizer()
    whole = texts(policy.create_generation(seed=5).generate(data), data)
    assert {len(text) for text in whole} == {12}
    written = [tokenizer.decode(text, skip_special_tokens=True) for text in whole]
    stop = written[0][2:5]  # across tokens
    told = []
    engine = policy.create_generation(seed=5)
    stopping = {**data, "stop_strings": [stop] * 12}
    out = engine.generate(stopping, on_finished=lambda rows, ids: told.extend(zip(rows, ids)))
    for row, (text, end) in enumerate(zip(texts(out, data), whole)):
        assert text == end[: len(text)]
        said = tokenizer.decode(text, skip_special_tokens=True)
        assert said.endswith(stop) and said.count(stop) == 1 if stop in written[row] else len(text) == 12
        assert bool(out["truncated"][row]) == (stop not in written[row])
    assert told and all(texts(out, data)[row] == ids for row, ids in told)
    assert len({row for row, _ in told}) == len(told)
    ended = whole[3][4]
    by_id = texts(policy_of(kind, stop_token_ids=[ended]).create_generation(seed=5).generate(data), data)
    assert all(text == end[: end.index(ended) + 1] if ended in end else text == end for text, end in zip(by_id, whole))
    short = policy.create_generation(seed=5, max_model_len=8).generate(data)
    assert short["generation_lengths"].tolist() == [min(12, 8 - n) for n in data["input_lengths"].tolist()]
    assert short["truncated"].all()
