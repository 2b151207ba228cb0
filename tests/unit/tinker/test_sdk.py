from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest
import tinker
import torch
from nemo_rl_cpp import Trainer
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.tinker.adapters import Shape
from nemo_rl_cpp.tinker.service import Service
from safetensors.torch import load, load_file
from tinker import types
from tinker_server import KEY, serving, tiny_base

Client = tinker.TrainingClient
ADAM = types.AdamParams(learning_rate=3e-3, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("tinker")) as found:
        yield found


@pytest.fixture(scope="module")
def sdk(served):
    return tinker.ServiceClient(base_url=served[0], api_key=KEY)


def new_client(sdk: tinker.ServiceClient, seed: int = 1, rank: int = 4) -> Client:
    return sdk.create_lora_training_client("tiny", rank=rank, seed=seed).result()


def datum(tokens: list[int], prompt: int, **inputs: list[float]) -> types.Datum:
    """Return a sequence whose loss counts the tokens after the first `prompt` tokens."""
    weights = [0.0] * (prompt - 1) + [1.0] * (len(tokens) - prompt)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **(inputs or {"weights": weights})},
    )


def of_samples(prompt: list[int], sequences: list, advantages: list[float]) -> list[types.Datum]:
    """Return the training data of an RL loop: the sampled sequences with their log-probabilities and advantages."""
    empty = [0.0] * (len(prompt) - 1)
    data = []
    for s, a in zip(sequences, advantages):
        inputs = {"logprobs": empty + s.logprobs, "advantages": empty + [a] * len(s.tokens)}
        data.append(datum(prompt + s.tokens, len(prompt), **inputs))
    return data


def adapter_of(served: tuple[str, Service], client: Client) -> torch.Tensor:
    return served[1].models[client.model_id].state.adapter


def test_supervised_training_with_the_tinker_sdk_lowers_the_loss(sdk):
    """The code block of docs/tinker.md, with a tiny model."""
    client = new_client(sdk)
    data = [datum([3, 4, 5, 3, 4, 5, 3], 2), datum([7, 8, 7, 8], 1)]
    losses = []
    for _ in range(30):
        forward, step = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        losses.append(forward.result().metrics["loss:sum"])
        assert step.result().metrics["unclipped_grad_l2:mean"] > 0
    assert losses[-1] < 0.05 * losses[0]
    assert client.forward(data, "cross_entropy").result().metrics["loss:sum"] < 0.05 * losses[0]


@pytest.mark.parametrize("how", [{}, {"temperature": 0.6}, {"top_p": 0.8, "top_k": 5}, {"temperature": 0.0}])
def test_training_and_sampling_logprobs_of_a_tinker_model_are_equal(sdk, how):
    client = new_client(sdk, seed=2)
    client.forward_backward([datum([3, 4, 5, 3], 1)], "cross_entropy").result()
    client.optim_step(ADAM).result()
    sampler, prompt = client.save_weights_and_get_sampling_client().result(), [3, 4, 5]
    params = types.SamplingParams(max_tokens=12, stop=[], **how)
    answer = sampler.sample(types.ModelInput.from_ints(prompt), 4, params).result()
    data = of_samples(prompt, answer.sequences, [1.0] * 4)
    outputs = client.forward(data, "importance_sampling").result().loss_fn_outputs
    for sequence, output in zip(answer.sequences, outputs):
        assert output["logprobs"].tolist()[len(prompt) - 1 :] == sequence.logprobs
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(prompt + sequence.tokens)).result()
        assert scored[0] is None and scored[len(prompt) :] == sequence.logprobs


def rl_loop(client: Client, steps: int) -> list[float]:
    """Train a model to sample tokens below 100, and return the mean reward of each step."""
    prompt, rewards = [3, 4, 5], []
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, seed=step, stop=[])
        found = sampler.sample(types.ModelInput.from_ints(prompt), 16, params).result().sequences
        scores = np.array([np.mean([token < 100 for token in s.tokens]) for s in found])
        data = of_samples(prompt, found, (scores - scores.mean()).tolist())
        client.forward_backward(data, "ppo")
        client.optim_step(ADAM).result()
        rewards.append(scores.mean())
    return rewards


def test_rl_loop_gives_identical_weights_with_the_tinker_sdk_and_in_process(sdk, served):
    client = new_client(sdk, seed=5)
    rl_loop(client, 4)
    adapted = tiny_base(served[1].base.folder.path).adapted(Shape(4))
    adapted.new_adapter(5)
    trainer, prompt = Trainer(SimpleNamespace(native=adapted.native)), [3, 4, 5]
    from nemo_rl_cpp._native import C

    for step in range(4):
        engine = adapted.engine()
        engine.submit(
            prompt, rule=C.SamplingRule(temperature=1.0, top_p=1.0, top_k=0, greedy=False), max_new_tokens=4, stop_token_ids=[],
            stop_strings=[], samples=16, seed=step, stream=2, draw_id=0, first_sample=0,
        )  # fmt: skip
        answers, old = [[] for _ in range(16)], [[] for _ in range(16)]
        while engine.has_work:
            for number, token, logprob, *_ in zip(*engine.step()):
                answers[number].append(token)
                old[number].append(logprob)
        scores = torch.tensor([np.mean([token < 100 for token in answer]) for answer in answers], dtype=torch.float64)
        advantage = (scores - scores.mean()).float()
        lengths = torch.tensor([len(prompt) + len(answer) for answer in answers])
        tokens = {"input_ids": torch.tensor([token for answer in answers for token in prompt + answer])}
        tokens["token_mask"] = torch.arange(len(tokens["input_ids"])) % 7 >= len(prompt)
        batch = RaggedBatch(offsets_of(lengths), tokens, {"group_id": torch.zeros(16, dtype=torch.int64)})
        before = torch.tensor([x for row in old for x in [0.0] * len(prompt) + row])
        of_token = batch.by_token(advantage) * tokens["token_mask"]

        def loss(logprobs: torch.Tensor, before=before, of_token=of_token) -> torch.Tensor:
            ratio = torch.exp(logprobs - before)
            return -torch.minimum(ratio * of_token, ratio.clamp(0.8, 1.2) * of_token).sum()

        trainer.forward_backward(batch, loss)
        trainer.step(3e-3, betas=(0.9, 0.95), eps=1e-12, max_grad_norm=1.0)
    assert torch.equal(adapted.native.masters, adapter_of(served, client))


def test_tinker_training_resumes_from_a_saved_state(sdk, served):
    client = new_client(sdk, seed=6)
    data = [datum([3, 4, 5, 6, 3], 1)]

    def train(client: Client) -> None:
        client.forward_backward(data, "cross_entropy")
        client.optim_step(ADAM).result()

    train(client)
    path = client.save_state("first").result().path
    train(client)
    again = sdk.create_training_client_from_state_with_optimizer(path).result()
    assert again.get_info().lora_rank == 4
    train(again)
    assert torch.equal(adapter_of(served, client), adapter_of(served, again))
    fresh = sdk.create_training_client_from_state(path).result()  # without the moments
    assert served[1].models[fresh.model_id].state.optimizer_steps == 0
    train(fresh)
    assert not torch.equal(adapter_of(served, client), adapter_of(served, fresh))
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        client.save_state("first").result()
    assert client.save_state("first", overwrite=True).result().path == path


def test_tinker_checkpoints_are_listed_downloaded_as_peft_adapters_and_deleted(sdk, served):
    client, rest = new_client(sdk, seed=7), tinker.RestClient(base_url=served[0], api_key=KEY)
    for save, name in (
        (client.save_state, "a"),
        (client.save_weights_for_sampler, "b"),
        (client.save_weights_external, "c"),
    ):
        assert rest.get_weights_info_by_tinker_path(save(name).result().path).result().lora_rank == 4
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [c.checkpoint_type for c in listed] == ["training", "sampler", "external"]
    assert rest.get_training_run(client.model_id).result().last_checkpoint.tinker_path == listed[0].tinker_path
    urls = rest.get_external_weights_urls(listed[2].tinker_path).result().urls
    with urlopen(urls["adapter_model.safetensors"]) as answer:
        downloaded = load(answer.read())
    folder = Path(served[1].store.root, client.model_id, "weights", "a", "adapter")
    saved = load_file(folder / "adapter_model.safetensors")
    assert downloaded.keys() == saved.keys() and all(torch.equal(downloaded[name], saved[name]) for name in saved)
    assert "adapter_config.json" in urls
    sampler = sdk.create_sampling_client(model_path=listed[1].tinker_path).result()
    assert sampler.get_base_model() == "tiny"
    rest.delete_checkpoint_from_tinker_path(listed[0].tinker_path).result()
    assert len(rest.list_user_checkpoints().result().checkpoints) >= 2
    left = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [c.checkpoint_type for c in left] == ["sampler", "external"]


def test_time_to_live_of_a_tinker_checkpoint_is_recorded_from_now_on(sdk, served):
    client, rest = new_client(sdk), tinker.RestClient(base_url=served[0], api_key=KEY)
    path = client.save_state("saved", ttl_seconds=7200).result().path

    def seconds_left() -> float | None:
        expires = rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at
        return None if expires is None else (expires - datetime.now(UTC)).total_seconds()

    assert seconds_left() == pytest.approx(7200, abs=30)
    rest.set_checkpoint_ttl_from_tinker_path(path, 86400).result()
    assert seconds_left() == pytest.approx(86400, abs=30)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert seconds_left() is None
    sdk.create_training_client_from_state(path).result()


def test_user_metadata_of_tinker_training_runs_and_checkpoints_is_returned(sdk, served):
    client = sdk.create_lora_training_client("tiny", rank=4, user_metadata={"run": "a"}).result()
    path = client.save_state("saved", user_metadata={"step": "1"}).result().path
    client.save_weights_for_sampler("sampler", user_metadata={"step": "2"}).result()
    again = sdk.create_training_client_from_state(path, user_metadata={"run": "b"}).result()
    rest = tinker.RestClient(base_url=served[0], api_key=KEY)
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [each.user_metadata for each in listed] == [{"step": "1"}, {"step": "2"}]
    runs = [rest.get_training_run(each.model_id).result() for each in (client, again)]
    assert [run.user_metadata for run in runs] == [{"run": "a"}, {"run": "b"}]


def test_tinker_model_from_a_state_with_another_optimizer_than_adamw_is_an_error(sdk):
    path = new_client(sdk).save_state("adamw").result().path
    with pytest.raises(tinker.RequestFailedError, match="the optimizer 'dimuon' is not here: take adamw"):
        sdk.create_training_client_from_state(path, optimizer=types.DimuonOptimizerConfig()).result()


def test_tinker_clients_get_the_absolute_path_of_the_tokenizer_of_a_relative_model_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(Path("here")) as (url, _):
        client = new_client(tinker.ServiceClient(base_url=url, api_key=KEY))
        monkeypatch.chdir("/")
        assert client.get_tokenizer()("Hello")["input_ids"]


def test_tinker_base_model_can_be_sampled_with_top_logprobs_and_stop_sequences(sdk):
    sampler = sdk.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([3, 4, 5])
    answer = sampler.sample(
        prompt, 2, types.SamplingParams(max_tokens=6, seed=3, stop=[]), include_prompt_logprobs=True,
        topk_prompt_logprobs=3, topk_sample_logprobs=2, prompt_logprobs_last_n=1,
    ).result()  # fmt: skip
    assert answer.prompt_logprobs[:2] == [None, None] and answer.prompt_logprobs[2] < 0
    assert answer.topk_prompt_logprobs[:2] == [None, None] and len(answer.topk_prompt_logprobs[2]) == 3
    assert [len(row) for row in answer.sequences[0].topk_logprobs] == [2] * 6
    assert {s.stop_reason for s in answer.sequences} == {"length"}
    assert len({s.sequence_id for s in answer.sequences}) == 2
    token = answer.sequences[0].tokens[2]
    stopped = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=3, stop=[token])).result().sequences[0]
    assert stopped.stop_reason == "stop" and stopped.tokens[-1] == token
