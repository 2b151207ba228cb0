"""NativeGeneration over a model written in Python, whose cache shows every mistake of the engine."""

import os
import signal

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.models.generation.native import NativeGeneration

VOCABULARY = 29


class PythonModel(C.ModelRunner):
    """Logits are a function of the whole history, which is read back through the block tables."""

    def __init__(self, block=5):
        super().__init__()
        self.block = block
        self.cache = None
        self.steps = []
        self.before_step = lambda step: None

    def vocab_size(self):
        return VOCABULARY

    def block_size(self):
        return self.block

    def bytes_per_block(self):
        return 1000

    def allocate_cache(self, num_blocks):
        self.cache = torch.full((num_blocks, self.block), -1)

    def release_cache(self):
        self.cache = None

    def forward(self, batch):
        self.before_step(len(self.steps))
        self.steps.append([s.query_length for s in batch.slices])
        for copy in batch.copies:
            self.cache[copy.target, : copy.length] = self.cache[copy.source, : copy.length]
        histories = {}
        for s in batch.slices:
            new = batch.token_ids[s.query_start : s.query_start + s.query_length]
            for position, token in enumerate(new, s.context_length):
                self.cache[s.block_table[position // self.block], position % self.block] = token
        for s in batch.slices:
            tokens = self.cache[torch.tensor(s.block_table).long()].flatten()
            for i in range(s.query_length):
                histories[s.query_start + i] = tokens[: s.context_length + i + 1].tolist()
        logits = [logits_after(histories[row]) for row in batch.logits_rows]
        return torch.stack(logits) if logits else torch.empty(0, VOCABULARY)


def logits_after(tokens):
    assert min(tokens) >= 0
    seed = 0
    for token in tokens:
        seed = (seed * 1000003 + token + 1) % (1 << 61)
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5


class Tokenizer:
    pad_token_id = 0
    eos_token_id = 1

    def __len__(self):
        return VOCABULARY

    all_special_ids = [0, 1]

    def decode(self, ids):
        return "".join("" if i < 2 else chr(ord("a") + i % 3) for i in ids)


def make(model=None, **config):
    options = {key: config.pop(key) for key in ("seed", "max_model_len") if key in config}
    config = {"max_new_tokens": 8, "stop_token_ids": [], "max_batch_size": 4, "prefill_chunk_tokens": 7} | config
    return NativeGeneration(model or PythonModel(), config, Tokenizer(), **options)


def batch(rows, **more):
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([len(row) for row in rows]), **more)


def responses(data, out):
    ends = out["unpadded_sequence_lengths"].tolist()
    return [out["output_ids"][r, int(data["input_lengths"][r]) : end].tolist() for r, end in enumerate(ends)]


def alone(prompt, key, new_tokens, rule=None):
    """The definition: row by row from the whole history."""
    tokens, logprobs = list(prompt), []
    for _ in range(new_tokens):
        u = torch.tensor([C.random_uniform(*key, len(tokens))], dtype=torch.float64)
        token, logprob, _ = C.sample_rows(logits_after(tokens).unsqueeze(0), u, rule or C.SamplingRule())
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return tokens[len(prompt) :], logprobs


def test_generation_output_has_the_documented_shapes_dtypes_and_padding():
    rows = [[5, 6, 7], [8], [5, 6, 7], [9] * 11]
    data = batch(rows, draw_ids=torch.tensor([3, 4, 3, 9]), sample_index=torch.tensor([0, 0, 1, 0]))
    out = make(seed=11).generate(data, greedy=False)
    assert out["output_ids"].dtype == torch.int64 and out["logprobs"].dtype == torch.float32
    assert out["truncated"].dtype == torch.bool and out["truncated"].all()
    assert out["generation_lengths"].tolist() == [8] * 4
    assert out["unpadded_sequence_lengths"].tolist() == [11, 9, 11, 19]
    assert out["output_ids"].shape == out["logprobs"].shape == (4, 19)
    assert all(ids[length:].eq(0).all() for ids, length in zip(out["output_ids"], out["unpadded_sequence_lengths"]))
    for r, (draw, sample) in enumerate([(3, 0), (4, 0), (3, 1), (9, 0)]):
        tokens, logprobs = alone(rows[r], (11, 0, draw, sample), 8)
        assert out["output_ids"][r, : len(rows[r])].tolist() == rows[r]
        assert responses(data, out)[r] == tokens
        start = len(rows[r])
        assert out["logprobs"][r, start : start + 8].tolist() == logprobs
        assert out["logprobs"][r, :start].eq(0).all() and out["logprobs"][r, start + 8 :].eq(0).all()


def test_repeated_prompts_without_explicit_draw_ids_get_different_samples():
    generation = make()
    first, second = generation.generate(batch([[3, 4]] * 2)), generation.generate(batch([[3, 4]] * 2))
    texts = responses(batch([[3, 4]] * 2), first) + responses(batch([[3, 4]] * 2), second)
    assert len({tuple(t) for t in texts}) == 4
    assert texts[2] == alone([3, 4], (42, 0, 2, 0), 8)[0]


def test_different_seeds_and_training_and_validation_streams_give_different_samples():
    def text(seed, stream):
        data = batch([[3, 4]], draw_ids=torch.tensor([0]), stream=stream)
        return tuple(responses(data, make(seed=seed).generate(data))[0])

    assert len({text(0, "train"), text(0, "val"), text(0, "eval"), text(1, "train")}) == 4
    assert text(0, ["val"]) == text(0, "val")


def test_validation_samples_with_the_validation_sampling_settings():
    config = {"temperature": 1.0, "val_temperature": 0, "top_k": 3, "val_top_k": None}
    data = batch([[3, 4]], stream="val")
    validated = make(**config).generate(data)
    greedy = make(**config).generate(batch([[3, 4]]), greedy=True)
    assert torch.equal(validated["output_ids"], greedy["output_ids"])
    assert torch.equal(validated["logprobs"], greedy["logprobs"])


def test_greedy_generation_takes_the_token_with_the_largest_logit():
    out = make().generate(batch([[3, 4]]), greedy=True)
    tokens = out["output_ids"][0].tolist()
    for end in range(2, 10):
        assert tokens[end] == int(logits_after(tokens[:end]).argmax())
        expected = torch.log_softmax(logits_after(tokens[:end]), 0).max().item()
        assert out["logprobs"][0, end].item() == pytest.approx(expected, abs=1e-6)


def test_generation_logprobs_include_temperature_top_k_and_top_p():
    rule = {"temperature": 0.8, "top_k": 10, "top_p": 0.9}
    out = make(**rule).generate(batch([[3, 4]], draw_ids=[6]))
    tokens, logprobs = alone([3, 4], (42, 0, 6, 0), 8, C.SamplingRule(**rule))
    assert out["output_ids"][0, 2:].tolist() == tokens
    assert out["logprobs"][0, 2:].tolist() == logprobs


def test_end_token_of_the_tokenizer_is_the_default_stop_token():
    data = batch([[3]] * 40)
    out = make(stop_token_ids=None, max_new_tokens=40).generate(data)
    for text, truncated in zip(responses(data, out), out["truncated"].tolist()):
        assert (text[-1] == 1) != truncated and 1 not in text[:-1]
    assert not out["truncated"].all()


def test_stop_strings_of_the_configuration_and_stop_strings_of_a_sample_both_end_a_response():
    data = batch([[3, 4]] * 12, stop_strings=[None, ["ca"], "bb"] * 4)
    out = make(stop_strings=["cab"], max_new_tokens=20).generate(data)
    for r, text in enumerate(responses(data, out)):
        stops = ["cab"] + {0: [], 1: ["ca"], 2: ["bb"]}[r % 3]
        written = Tokenizer().decode(text)
        assert any(s in written for s in stops) != bool(out["truncated"][r])
        assert not any(s in Tokenizer().decode(text[:-1]) for s in stops)


def test_responses_are_limited_by_max_new_tokens_and_max_model_len():
    data = batch([[3] * 10, [3] * 4, [3] * 12])
    out = make(max_model_len=10).generate(data.select_indices([0, 1]))
    assert out["generation_lengths"].tolist() == [0, 6] and out["truncated"].all()
    assert make(vllm_cfg={"max_model_len": 11}).generate(data)["generation_lengths"].tolist() == [1, 7, 0]
    assert make(max_new_tokens=None, max_model_len=20).generate(data)["generation_lengths"].tolist() == [10, 16, 8]
    with pytest.raises(ValueError, match="max_new_tokens"):
        make(max_new_tokens=None).generate(data)


def test_kv_cache_is_allocated_at_first_use_and_freed_by_finish_generation():
    model = PythonModel()
    generation = make(model)
    assert generation.prepare_for_generation(tags=["weights"]) and model.cache is None
    generation.generate(batch([[3, 4]]))
    assert model.cache is not None
    assert generation.finish_generation() and model.cache is None
    assert generation.shutdown() and generation.shutdown()
    with pytest.raises(ValueError, match="kv_cache_gb"):
        make(kv_cache_gb=2e-6).generate(batch([[3] * 30]))


def test_ctrl_c_ends_generation_within_one_decode_step(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    model = PythonModel()
    generation = make(model)
    model.before_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None
    with pytest.raises(KeyboardInterrupt):
        generation.generate(batch([[3, 4]]))
    assert len(model.steps) <= 3
    model.before_step = lambda step: None
    assert generation.generate(batch([[3, 4]]))["generation_lengths"].tolist() == [8]


def test_error_for_non_finite_logits_names_sample_and_position(monkeypatch):
    monkeypatch.setattr(
        f"{__name__}.logits_after",
        lambda tokens: torch.full((VOCABULARY,), float("nan")) if len(tokens) == 5 else torch.zeros(VOCABULARY),
    )
    with pytest.raises(RuntimeError, match="not finite for request 0 .draw 0, sample 0. at position 5"):
        make().generate(batch([[3, 4]]))


def test_on_finished_callback_receives_each_response_once_before_generation_ends():
    rows = [[2 + i % 5, 3 + i] for i in range(12)]
    data = batch(rows, stop_strings=[["ab"]] * 12)
    model, told = PythonModel(), []
    generation = make(model, max_new_tokens=12, max_batch_size=5)
    out = generation.generate(data, on_finished=lambda ended, ids: told.append((len(model.steps), ended, ids)))
    expected = dict(enumerate(responses(data, out)))
    seen = [(row, ids) for _, ended, all_ids in told for row, ids in zip(ended, all_ids, strict=True)]
    assert len(dict(seen)) == len(seen) >= 6 and all(expected[row] == ids for row, ids in seen)
    assert all(step < len(model.steps) for step, _, _ in told)  # the last step's responses come with the result
    assert responses(data, make(max_new_tokens=12, max_batch_size=5).generate(data)) == list(expected.values())


def test_exception_in_the_on_finished_callback_ends_the_generation():
    generation = make(max_new_tokens=4, max_batch_size=2)

    def refuse(rows, token_ids):
        raise LookupError("no more")

    data = batch([[2], [3], [4], [5]])
    with pytest.raises(LookupError, match="no more"):
        generation.generate(data, on_finished=refuse)
    assert [len(new) for new in responses(data, generation.generate(data))] == [4] * 4
