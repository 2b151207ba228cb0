import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, native_config
from nemo_rl_cpp.models.memory import forecast
from nemo_rl_cpp.models.model_sizes import model_sizes
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.weights import initialize_weights
from paired_prompts import to_train
from row_batch import padded_rows
from threads import on_threads
from tiny_layers import LAYERS


def make_policy(precision="float32", overrides=None, **generation):
    config = PolicyConfig(model_name="tiny-random", precision=precision, hf_config_overrides=overrides or {}, max_total_sequence_length=400, sequence_packing={"train_mb_tokens": 900, "logprob_mb_tokens": 700},
                          generation={"max_new_tokens": 40, **generation})  # fmt: skip
    config.fill_defaults()
    return Policy(None, config, tiny_tokenizer(), seed=2, init_reference_model=False)


def prompts(sizes, generations=1, seed=0):
    random = torch.Generator().manual_seed(seed)
    rows = [row for n in sizes for row in [torch.randint(4, 16, (n,), generator=random)] * generations]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "input_lengths": torch.tensor([len(r) for r in rows]),
        "draw_ids": torch.arange(len(sizes)).repeat_interleave(generations),
        "sample_index": torch.arange(generations).repeat(len(sizes)),
    }


def are_equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in ("output_ids", "logprobs"))


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("precision, threads", [("float32", 1), ("bfloat16", 2)])
def test_generation_and_trainer_logprobs_are_bit_identical(family, precision, threads):
    def compare(batch, chunk, generations, share=True):
        overrides = {"model_type": family, **LAYERS[family]}
        engine = dict(max_batch_size=batch, prefill_chunk_tokens=chunk, temperature=0.8)
        policy = make_policy(precision, overrides, **engine)
        policy.config.__dict__["share_prompt_prefix"] = share
        inputs = prompts([1 + (37 * i) % 300 for i in range(6)], generations, seed=batch)
        outputs = policy.create_generation().generate(inputs)
        data = to_train(inputs, outputs, generations)
        scored = policy.get_logprobs(data)["logprobs"]
        assert torch.equal(scored, outputs["logprobs"] * data["token_mask"])
        assert outputs["generation_lengths"].min() >= 1

    for case in ((1, 16, 1), (7, 5, 3), (70, 64, 8), (23, 1000, 4, False)):
        on_threads(lambda: compare(*case), (threads,))


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "lfm2"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_preemption_and_batch_size_do_not_change_results_of_recurrent_layers(family, chunk):
    """A cache of few blocks preempts sequences, whose states are computed again; groups share one prompt and copy its state."""
    inputs, outputs = prompts([40, 33, 1], 4, seed=3), []
    for batch, gigabytes in ((64, 1.0), (3, 1.0), (12, 7.5e-5)):
        engine = dict(max_batch_size=batch, prefill_chunk_tokens=chunk, kv_cache_gb=gigabytes)
        policy = make_policy(
            "float32", {"model_type": family, **LAYERS[family]}, **engine, max_new_tokens=90, stop_token_ids=[]
        )
        generation = policy.create_generation()
        outputs.append(generation.generate(inputs))
    assert generation.get_logger_metrics()["preemptions"] > 0
    assert all(are_equal(output, outputs[0]) for output in outputs[1:])
    data = to_train(inputs, outputs[0], 4)
    assert torch.equal(policy.get_logprobs(data)["logprobs"], outputs[0]["logprobs"] * data["token_mask"])


WINDOWED = {"mistral": {"sliding_window": 20}} | {
    name: LAYERS[name] for name in ("gemma3_text", "gemma4_text", "gpt_oss")
}


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_sliding_window_kv_cache_gives_the_tokens_and_logprobs_of_a_full_kv_cache(family, chunk):
    """The longest sequence has 290 tokens, which are 10 blocks of each layer. Behind the window a step needs at most
    1 + ceil((19 + 64 - 1) / 32) = 4, and one for a copy of a prompt's last block."""
    overrides = {"model_type": family, **WINDOWED[family]}
    sizes = model_sizes("none", TINY_CONFIG | overrides)
    full, windowed = (32 * 4 * sizes.cached_values(kind) for kind in (False, True))  # bytes of a block in these layers
    small = 12 * full + 6 * windowed
    assert small < 10 * (full + windowed), "a cache that keeps all blocks would not fit"
    inputs, outputs = prompts([200, 33, 1], 4, seed=3), []
    for batch, size, threads in ((64, 1e9, 1), (3, 1e9, 2), (12, small, 1), (12, small, 2)):
        engine = dict(max_batch_size=batch, prefill_chunk_tokens=chunk, kv_cache_gb=size / 1e9)
        policy = make_policy("float32", overrides, **engine, max_new_tokens=90, stop_token_ids=[])
        generation = policy.create_generation()
        outputs += on_threads(lambda: generation.generate(inputs), (threads,))
    assert family == "mistral" or generation.get_logger_metrics()["preemptions"] > 0
    assert all(are_equal(output, outputs[0]) for output in outputs[1:])
    data = to_train(inputs, outputs[0], 4)  # training reads the keys of all tokens from its packed rows
    assert torch.equal(policy.get_logprobs(data)["logprobs"], outputs[0]["logprobs"] * data["token_mask"])


@pytest.mark.parametrize("family, std", [("llama", 0.1), ("deepseek_v3", 0.1), ("gemma4_text", 0.3), ("gpt_oss", 0.1)])
def test_drafts_change_the_number_of_steps_but_no_token_and_no_logprob(family, std):
    overrides = {"model_type": family, **LAYERS.get(family, {}), "initializer_range": std}
    inputs, outputs, metrics = prompts([40], 2, seed=3), [], []
    for rows in (0, 24):
        policy = make_policy("bfloat16", overrides, max_new_tokens=90, stop_token_ids=[], temperature=0.01)
        generation = policy.create_generation()
        generation._runner.draft_rows = rows
        outputs.append(generation.generate(inputs))
        metrics.append(generation.get_logger_metrics())
    assert are_equal(*outputs)
    without, drafted = metrics
    assert without["draft_tokens"] == 0 and without["decode_tokens"] == drafted["decode_tokens"] == 2 * 89
    assert 10 < drafted["accepted_draft_tokens"] < drafted["draft_tokens"] and drafted["steps"] < without["steps"]
    data = to_train(inputs, outputs[1], 2)
    assert torch.equal(policy.get_logprobs(data)["logprobs"], outputs[1]["logprobs"] * data["token_mask"])


@pytest.mark.parametrize("family, rows", [("llama", 8), ("olmoe", 0), ("qwen3_5_text", 0)])
def test_only_dense_models_without_recurrent_layers_use_drafts(family, rows):
    runner = make_policy("float32", {"model_type": family, **LAYERS.get(family, {})}).create_generation()._runner
    assert runner.draft_rows == rows
    if family == "qwen3_5_text":
        with pytest.raises(ValueError, match="recurrent states"):
            runner.draft_rows = 8


@pytest.mark.parametrize("window", [20, 200])
def test_estimated_kv_cache_size_with_sliding_windows_equals_the_allocated_size(tmp_path, window):
    """Four prompts of 300 tokens with four responses of 100 each. The layer without a window holds 4 * 9 shared and
    16 * 4 other blocks, the layer with a window of 20 at most 2 of each response, and that with a window of 200 at
    most 4 of each response and 7 of each prompt."""
    overrides = {"model_type": "gemma3_text", **LAYERS["gemma3_text"], "sliding_window": window}
    (tmp_path / "c.yaml").write_text(
        "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}\nloss_fn: {reference_policy_kl_penalty: 0}\n"
        f"policy: {{model_name: m, hf_config_overrides: {TINY_CONFIG | overrides!r}, max_total_sequence_length: 400, train_global_batch_size: 16,"
        " precision: float32, generation: {max_new_tokens: 100}}\n"
        "data: {max_input_seq_length: 300, train: {dataset_name: arithmetic}}\n".replace("False", "false")
    )
    (phase,) = (each for each in forecast(load_grpo_config(tmp_path / "c.yaml")) if each.name == "generation")
    generation = make_policy("float32", overrides, max_new_tokens=100, stop_token_ids=[]).create_generation()
    generation.generate(prompts([300] * 4, 4))
    sizes = model_sizes("m", TINY_CONFIG | overrides)
    assert sizes.num_hidden_layers == 2 and sizes.windowed_layers == 1
    used = generation.get_logger_metrics()["peak_blocks"] * 32 * 4 * sizes.cached_values(False)
    assert dict(phase.parts)["KV cache"] == pytest.approx(used, rel=0.1)


WIDE = dict(model_type="llama", vocab_size=2000, hidden_size=256, intermediate_size=800, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True)  # fmt: skip


def wide_model(dtype=torch.bfloat16, seed=3, **overrides):
    model = C.DecoderModel(native_config(WIDE | overrides), dtype, True)
    initialize_weights(model, seed, std=0.1)
    model.masters_changed()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["off", "on"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("texts", [1, 6, 11, 16, 18])
def test_decode_steps_are_bit_identical_for_any_number_of_threads(texts, dtype, packed):
    """Up to 16 rows a step's threads stay together (runtime/team.h), up to 12 may read packed weights (ops/packed_weights.h)."""
    model = wide_model(dtype)
    inputs = prompts([3 + i for i in range(texts)])
    settings = dict(max_new_tokens=9, stop_token_ids=[], kv_cache_gb=0.02, max_batch_size=32, packed_weights=packed)
    outputs = on_threads(
        lambda: NativeGeneration(native_runner(model, settings), settings, None, seed=7).generate(inputs)
    )
    data, logprobs = to_train(inputs, outputs[0], 1), torch.zeros(outputs[0]["logprobs"].shape)
    mask = data["token_mask"].bool()
    batch = padded_rows(data["input_ids"].contiguous(), data["input_lengths"], mask, data["group_id"])
    C.Trainer(model).forward(batch, list(range(texts)), 1.0, True, False, False, logprobs)
    for output in outputs:
        assert torch.equal(output["output_ids"], outputs[0]["output_ids"])
        assert torch.equal(output["logprobs"][mask], logprobs[mask])


PACKS = pytest.mark.skipif(
    C.PackedWeights.most_rows() == 0, reason="weights are packed on processors with AVX2 or AVX-512 only"
)


def generation_of(model, packed, **settings):
    settings = dict(max_new_tokens=12, stop_token_ids=[], kv_cache_gb=0.02, packed_weights=packed) | settings
    return NativeGeneration(native_runner(model, settings), settings, None, seed=7)


@PACKS
def test_packed_weights_auto_packs_weights_after_enough_decode_steps_with_small_batches():
    inputs = prompts([5])
    for packed, when in (("off", [False, False]), ("auto", [False, True]), ("on", [True, True])):
        model = wide_model()
        generation = generation_of(model, packed)
        for expected in when:  # 12 steps each
            generation.generate(inputs)
            assert (model.packed_bytes > 0) == expected, packed
    texts = C.PackedWeights.most_rows() + 8
    many, model = prompts([5] * texts), wide_model()
    generation_of(model, "on", max_batch_size=texts).generate(many)
    assert model.packed_bytes == 0  # no step was of few


@PACKS
def test_expert_weights_are_packed_for_large_batches_of_which_each_expert_gets_few_sequences():
    texts = C.PackedWeights.most_rows() + 8
    inputs = prompts([5 + i for i in range(texts)])
    experts = dict(model_type="olmoe", num_experts=8, num_experts_per_tok=2, intermediate_size=64)
    models = [wide_model(**experts) for _ in range(2)]
    results = [
        generation_of(model, packed, max_batch_size=texts).generate(inputs)
        for model, packed in zip(models, ("on", "off"), strict=True)
    ]
    assert [model.packed_bytes > 0 for model in models] == [True, False]
    assert are_equal(*results)


def copy_other_weights(model):
    model.masters.copy_(wide_model(seed=4).masters)
    model.masters_changed()


def take_a_step(model):
    trainer = C.Trainer(model)
    trainer.grads.copy_(model.masters)  # some gradient
    trainer.step(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=0.0)


@PACKS
@pytest.mark.parametrize("change", [copy_other_weights, take_a_step])
def test_generation_is_equal_with_and_without_packed_weights_after_a_weight_update(change):
    inputs, outputs, digests = prompts([5, 9]), [], set()
    for packed in ("on", "off"):
        model = wide_model()
        generation = generation_of(model, packed)
        before = generation.generate(inputs)
        change(model)
        generation._next_draw_id = 0
        outputs.append(generation.generate(inputs))
        digests.add(model.digest())
        assert not torch.equal(outputs[-1]["logprobs"], before["logprobs"])
    assert len(digests) == 1 and are_equal(*outputs)


def test_response_depends_only_on_prompt_and_sampling_seed_and_not_on_the_batch():
    inputs = prompts([5, 17, 40], generations=4)
    whole = make_policy(max_batch_size=64).create_generation().generate(inputs)
    for batch, chunk in ((1, 3), (5, 16)):
        other = make_policy(max_batch_size=batch, prefill_chunk_tokens=chunk).create_generation()
        assert torch.equal(other.generate(inputs)["output_ids"], whole["output_ids"])
    alone = {k: v[6:7] for k, v in inputs.items()}
    row = make_policy().create_generation().generate(alone)["output_ids"][0]
    assert torch.equal(row, whole["output_ids"][6, : len(row)])
    val = make_policy().create_generation().generate({**inputs, "stream": "val"})
    assert val["output_ids"].tolist() != whole["output_ids"].tolist()


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_enforce_eager_is_passed_to_the_native_engine_and_does_not_change_results(monkeypatch, enforce_eager):
    asked, runner = [], C.NativeModelRunner

    def watched(model, **options):
        asked.append(options)
        return runner(model, **options)

    expected = make_policy().create_generation().generate(prompts([5, 9]))["output_ids"]
    monkeypatch.setattr(C, "NativeModelRunner", watched)
    policy = make_policy(vllm_cfg={"enforce_eager": enforce_eager})
    assert torch.equal(policy.create_generation().generate(prompts([5, 9]))["output_ids"], expected)
    assert asked == [{"enforce_eager": enforce_eager, "packed_weights": "auto"}]


def test_generation_engine_reads_the_weights_of_the_trainer_without_a_copy():
    policy = make_policy("bfloat16")
    generation = policy.create_generation()
    before = generation.generate(prompts([8]), greedy=True)["logprobs"]
    policy.state_dict()["model.norm.weight"].mul_(0.5)
    assert generation.weight_digest() == policy.weight_digest()
    assert not torch.equal(generation.generate(prompts([8]), greedy=True)["logprobs"], before)
