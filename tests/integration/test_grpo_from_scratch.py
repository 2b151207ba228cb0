import runpy
from pathlib import Path

import nemo_rl_cpp
import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_from_scratch.py"


def test_grpo_from_scratch_example_learns_and_its_model_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, rewards, gap = runpy.run_path(str(EXAMPLE))["train"]()
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
    assert gap == 0
    model.save(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    asked = torch.tensor([model.tokenizer(text)["input_ids"] for text in ("71=", "38=", "05=")])
    answered = theirs.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=3, do_sample=False)
    assert [tokenizer.decode(row) for row in answered] == ["71=777", "38=333", "05=000"]
    ours = nemo_rl_cpp.Engine(nemo_rl_cpp.Model(str(tmp_path)), max_new_tokens=3).sample(asked.tolist(), greedy=True)
    assert ours["input_ids"].tolist() == answered.tolist()


def test_engine_sample_returns_sequences_that_begin_with_their_prompts():
    model = nemo_rl_cpp.Model("tiny-random")
    prompts = [[4, 5, 15], [6]]
    batch = nemo_rl_cpp.Engine(model, max_new_tokens=4).sample(prompts, n=3)
    assert batch.samples["group_id"].tolist() == [0, 0, 0, 1, 1, 1]
    rows = batch.rows(batch.tokens["input_ids"]), batch.rows(batch.tokens["token_mask"])
    for i, (ids, mask) in enumerate(zip(*rows)):
        prompt = prompts[i // 3]
        assert ids[: len(prompt)].tolist() == prompt
        assert mask.tolist() == [0.0] * len(prompt) + [1.0] * (len(ids) - len(prompt))


def test_trainer_and_engine_logprobs_are_equal_with_top_p_and_top_k():
    rule = {"temperature": 1.3, "top_p": 0.7, "top_k": 6}
    model = nemo_rl_cpp.Model("tiny-random", initializer_range=0.5)
    engine, trainer = nemo_rl_cpp.Engine(model, max_new_tokens=6, **rule), nemo_rl_cpp.Trainer(model, **rule)
    batch = engine.sample([[4, 5, 15]], n=16)
    sampled = batch.tokens["generation_logprobs"]
    _, logprobs = trainer.forward_backward(batch, lambda logprobs: -logprobs.sum())
    assert torch.equal(logprobs, sampled) and sampled.min() < -0.5
    trainer.step(0.3)
    batch.tokens["input_ids"][-1] = (batch.tokens["input_ids"][-1] + 1) % 14
    _, logprobs = trainer.forward_backward(batch, lambda logprobs: -logprobs.exp().sum())
    removed = (logprobs == 0) & (sampled < 0)
    assert removed.any() and torch.isfinite(logprobs).all() and trainer.step(0.0) > 0


@pytest.mark.parametrize("given", [None, {"input_ids": [[4, 5]]}])
def test_trainer_rejects_a_batch_that_no_engine_returned(given):
    trainer = nemo_rl_cpp.Trainer(nemo_rl_cpp.Model("tiny-random"))
    with pytest.raises(ValueError, match="expected a RaggedBatch, such as Engine.sample returns"):
        trainer.forward_backward(given, lambda logprobs: -logprobs.sum())


def test_trainer_and_engine_accept_and_reject_the_same_sampling_settings():
    model = nemo_rl_cpp.Model("tiny-random", initializer_range=0.5)
    for rule in ({"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.5}, {"top_k": -1}, {"top_k": None}):
        batch = nemo_rl_cpp.Engine(model, max_new_tokens=6, **rule).sample([[4, 5, 15]])
        trainer = nemo_rl_cpp.Trainer(model, **rule)
        _, logprobs = trainer.forward_backward(batch, lambda logprobs: -logprobs.sum())
        assert torch.equal(logprobs, batch.tokens["generation_logprobs"]), rule
    for make in (nemo_rl_cpp.Engine, nemo_rl_cpp.Trainer):
        with pytest.raises(ValueError, match="temperature must be at least 0, not -1"):
            make(model, temperature=-1)


@pytest.mark.parametrize(("settings", "said"), [
    ({"learning_rate": float("nan")}, "lr must be a finite number"), ({"learning_rate": -1.0}, "lr must be at least 0, not -1.0"),
    ({"betas": (1.0, 0.9)}, "betas.0 must be less than 1, not 1.0"), ({"eps": -1e-8}, "eps must be at least 0"),
    ({"betas": 0.9}, "betas must be a list"), ({"max_grad_norm": -1}, "max_grad_norm = -1: expected a number from 0"),
])  # fmt: skip
def test_optimizer_step_with_invalid_settings_raises_and_leaves_the_weights_unchanged(settings, said):
    model = nemo_rl_cpp.Model("tiny-random")
    trainer, before = nemo_rl_cpp.Trainer(model), model.native.digest()
    with pytest.raises(ValueError, match=said):
        trainer.step(**{"learning_rate": 0.1} | settings)
    assert model.native.digest() == before


def test_gradients_accumulate_over_backward_passes_until_the_optimizer_step():
    norms = []
    for passes in (1, 2):
        model = nemo_rl_cpp.Model("tiny-random", seed=1)
        trainer = nemo_rl_cpp.Trainer(model)
        batch = nemo_rl_cpp.Engine(model, max_new_tokens=4).sample([[4, 5, 15]], n=4)
        for _ in range(passes):
            trainer.forward_backward(batch, lambda logprobs: -logprobs.sum())
        norms.append(trainer.step(0.0))
        assert trainer.step(0.0) == 0
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5)


@pytest.mark.parametrize(("loss_fn", "message"), [
    (lambda logprobs: logprobs.sum() * float("nan"), "the loss is nan"),
    (lambda logprobs: logprobs, "expected a scalar"),
    (lambda logprobs: torch.tensor(1.0), "expected a scalar"),
    (lambda logprobs: 1.0, "loss_fn gave 1.0"),
    (lambda logprobs: torch.ones((), requires_grad=True), "computed from its log-probabilities"),
])  # fmt: skip
def test_non_finite_or_non_scalar_loss_raises_and_leaves_the_gradient_unchanged(loss_fn, message):
    model = nemo_rl_cpp.Model("tiny-random")
    trainer = nemo_rl_cpp.Trainer(model)
    batch = nemo_rl_cpp.Engine(model, max_new_tokens=4).sample([[4, 5, 15]])
    with pytest.raises(ValueError, match=message):
        trainer.forward_backward(batch, loss_fn)
    assert trainer.step(0.1) == 0


def test_engine_sample_raises_for_zero_prompts_or_zero_responses():
    engine = nemo_rl_cpp.Engine(nemo_rl_cpp.Model("tiny-random"), max_new_tokens=4)
    with pytest.raises(ValueError, match="0 prompts"):
        engine.sample([])
    for n in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"n = {n}: expected a whole number"):
            engine.sample([[4]], n)


@pytest.mark.parametrize(("prompts", "message"), [
    (["47="], "prompt 0 is '47=': expected a list of token ids"), ("47=", "prompt 0 is '4': expected a list"),
    ([4, 5], "prompt 0 is 4: expected a list"), (4, "prompts is 4: expected a list of lists"),
    ([[4], [5.0, 1.5]], "token 1 of prompt 1 = 1.5: expected a whole number"), ([torch.tensor([0.5])], "token 0 of prompt 0 = 0.5"),
    ([[True]], "token 0 of prompt 0 = True"), ([[[4, 5]]], r"token 0 of prompt 0 = \[4, 5\]"),
    ([[4]] * 2 + [[4] * 16], "a prompt has 16 tokens, but sequences at most 16"),
])  # fmt: skip
def test_engine_sample_raises_for_prompts_that_are_not_short_lists_of_token_ids(prompts, message):
    engine = nemo_rl_cpp.Engine(nemo_rl_cpp.Model("tiny-random"), max_new_tokens=4, max_model_len=16)
    with pytest.raises(ValueError, match=message):
        engine.sample(prompts)


def test_engine_samples_equally_for_token_ids_in_lists_arrays_and_tensors():
    model = nemo_rl_cpp.Model("tiny-random")
    kinds = [
        [[4, 5], [6, 7]],
        np.array([[4, 5], [6, 7]], np.uint8),
        torch.tensor([[4, 6], [5, 7]]).t(),
        [[4.0, 5.0], range(6, 8)],
    ]
    sampled = [nemo_rl_cpp.Engine(model, max_new_tokens=4).sample(prompts)["input_ids"].tolist() for prompts in kinds]
    assert sampled == sampled[:1] * len(kinds) and [row[:2] for row in sampled[0]] == [[4, 5], [6, 7]]


def test_engine_setting_max_model_len_limits_the_length_of_prompt_and_response():
    engine = nemo_rl_cpp.Engine(
        nemo_rl_cpp.Model("tiny-random"), max_new_tokens=40, max_model_len=16, stop_token_ids=[]
    )
    assert engine.sample([[4, 5, 6]], n=4).lengths.tolist() == [16] * 4
