import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from nemo_rl_cpp import ServiceClient, TrainingClient
from nemo_rl_cpp.tinker import adapters, worker
from nemo_rl_cpp.tinker.adapters import PromptGroup, Shape, prompt_groups
from nemo_rl_cpp.tinker.models import rows_of
from nemo_rl_cpp.tinker.types import AdamParams, Datum, SamplingParams
from served import RECURRENT
from test_sdk import rl_loop
from tinker import types as sdk_types
from tinker_server import KEY, make_model, serving, tiny_base
from tiny_layers import LAYERS

TOKENS = [3, 4, 5, 6, 7]
WEIGHTS = [1.0, 0.5, 2.0, 0.0]


@contextmanager
def service_in(folder: Path, quantization: str | None = None, **more: object) -> Iterator[ServiceClient]:
    model, sizes = make_model(folder / "model", **more), dict(max_batch_size=16, cache_gb=0.05)
    with ServiceClient(model, folder / "saved", precision="float32", quantization=quantization, **sizes) as client:
        yield client


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with service_in(tmp_path_factory.mktemp("clients")) as client:
        yield client


@pytest.fixture(
    scope="module", params=[{}, RECURRENT, {"quantization": "q4_0"}], ids=["attention", "recurrent", "q4_0"]
)
def each_service(request, tmp_path_factory):
    with service_in(tmp_path_factory.mktemp("clients"), **request.param) as client:
        yield client


def new_client(service: ServiceClient, seed: int = 1) -> TrainingClient:
    return service.create_lora_training_client(rank=4, seed=seed).result()


def adapter_of(client: TrainingClient) -> torch.Tensor:
    return client._model.state.adapter


def gradient_of(client: TrainingClient) -> torch.Tensor:
    client._model.adapted.put_down()
    return client._model.state.grads


def away_from_zero(client: TrainingClient) -> None:
    """Make one optimizer step, so that B is not 0 and A has a gradient."""
    client.forward_backward([Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": WEIGHTS})], "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1e-2)).result()


def test_tinker_rl_loop_gives_identical_weights_in_process_and_over_http(service, tmp_path):
    here = new_client(service, seed=5)
    rl_loop(here, 3)
    with serving(tmp_path) as (url, server):
        remote = tinker.ServiceClient(base_url=url, api_key=KEY).create_lora_training_client("tiny", rank=4, seed=5)
        remote = remote.result()
        rl_loop(remote, 3)
        assert torch.equal(adapter_of(here), server.models[remote.model_id].state.adapter)


def test_tinker_rl_loop_in_process_increases_the_reward(service):
    rewards = rl_loop(new_client(service, seed=4), 25)
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.4


def test_asynchronous_tinker_client_trains_saves_and_loads_a_state(each_service):
    service = each_service
    data = [Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": WEIGHTS})]

    async def train(client: TrainingClient) -> float:
        forward = await client.forward_backward_async(data, "cross_entropy")
        step = client.optim_step(AdamParams(learning_rate=1e-3))
        assert (await step)["unclipped_grad_l2:mean"] > 0
        return (await forward.result_async()).metrics["loss:sum"]

    async def loop() -> None:
        client = await service.create_lora_training_client(rank=4, seed=2)
        await train(client)
        path = await client.save_state("first")
        expected = [await train(client) for _ in range(2)]
        again = await service.create_training_client_from_state_with_optimizer(path)
        assert [await train(again) for _ in range(2)] == expected and expected[1] < expected[0]
        await client.load_state_with_optimizer(path)
        assert [await train(client) for _ in range(2)] == expected
        sampler = await client.save_weights_and_get_sampling_client()
        saved = await service.create_sampling_client(await client.save_weights_for_sampler("adapter"))
        params = SamplingParams(max_tokens=5, seed=1, stop=[])
        answers = await asyncio.gather(*(each.sample(TOKENS, 2, params) for each in (sampler, saved)))
        assert answers[0].sequences == answers[1].sequences
        scored = await saved.compute_logprobs(TOKENS + answers[0].sequences[0].tokens)
        assert scored[0] is None and scored[len(TOKENS) :] == answers[0].sequences[0].logprobs
        with pytest.raises(ValueError, match="exists"):
            await client.save_state("first")
        assert (await client.save_weights_external("peft")).joinpath("adapter_model.safetensors").is_file()

    asyncio.run(loop())


def test_asynchronous_calls_give_clients_and_samples_themselves_as_in_the_sdk(service):
    async def loop() -> None:
        client = await service.create_lora_training_client_async(rank=4, seed=2)
        assert client.get_tokenizer() is not None
        sampler = await client.save_weights_and_get_sampling_client_async()
        params = SamplingParams(max_tokens=5, seed=1, stop=[])
        (answer,) = (await sampler.sample_async(TOKENS, 1, params)).sequences
        assert (await sampler.compute_logprobs_async(TOKENS + answer.tokens))[len(TOKENS) :] == answer.logprobs

    asyncio.run(loop())


OLDS = [[-5.7, -5.9, -5.6, -5.5], [-5.8, -5.2, -6.0]]
MASKS, ADVANTAGES = [[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0]], [[0.0, 1.0, 1.0, -2.0], [0.0, 0.0, 1.5]]


def importance_sampling(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return -(torch.exp(new - old) * a).sum()


def gspo(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp((new.detach() - old)[mask != 0].mean() + new - new.detach())
    return -torch.minimum(ratio * a, ratio.clamp(0.9, 1.1) * a).sum()


def ppo(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(new - old)
    return -torch.minimum(ratio * a, ratio.clamp(0.9, 1.1) * a).sum()


def cispo(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return -(torch.exp(new - old).clamp(0.9, 1.1).detach() * new * a).sum()


def dro(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return -(new * a - 0.15 * (new - old) ** 2).sum()


CLIPPED = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
CONFIGS = {importance_sampling: {}, gspo: CLIPPED, ppo: CLIPPED, cispo: CLIPPED, dro: {"beta": 0.3}}


@pytest.mark.parametrize("formula", CONFIGS)
def test_custom_loss_of_a_tinker_client_has_the_same_gradient_as_the_built_in_loss(service, formula):
    data = []
    for old, a, mask in zip(OLDS, ADVANTAGES, MASKS):
        inputs = {"target_tokens": TOKENS[1 : len(old) + 1], "logprobs": old, "advantages": a}
        data.append(Datum(TOKENS[: len(old)], inputs | ({"sequence_ratio_mask": mask} if formula is gspo else {})))

    def loss(data: list[Datum], found: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        rows = zip(found, *([torch.tensor(row) for row in each] for each in (OLDS, MASKS, ADVANTAGES)))
        return sum(formula(*row) for row in rows), {"mine": 3.0}

    builtin, custom = new_client(service), new_client(service)
    for client in (builtin, custom) if formula is importance_sampling else ():  # the other ratios would be clipped
        away_from_zero(client)
    expected = builtin.forward_backward(data, formula.__name__, CONFIGS[formula]).result()
    result = custom.forward_backward_custom(data, loss).result()
    assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    assert result.metrics["mine"] == 3.0 and gradient_of(builtin).any()
    torch.testing.assert_close(gradient_of(custom), gradient_of(builtin))


def test_tinker_loss_with_several_targets_per_token_is_the_sum_over_the_targets(service):
    targets = torch.tensor([[4, 9, 200], [5, 5, 0], [6, 1, 2], [7, 8, 299]])
    weights = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.5], [0.1, 0.2, 0.3], [2.0, -1.0, 0.25]])
    together, apart = new_client(service), new_client(service)
    for client in (together, apart):
        away_from_zero(client)
    short = Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": WEIGHTS})
    wide = Datum(TOKENS[:-1], {"target_tokens": targets, "weights": weights})
    result = together.forward_backward([short, wide], "cross_entropy").result()
    alone = [short, *(Datum(TOKENS[:-1], {"target_tokens": targets[:, k], "weights": weights[:, k]}) for k in range(3))]
    each = apart.forward_backward(alone, "cross_entropy").result()
    assert torch.equal(result.loss_fn_outputs[0]["logprobs"], each.loss_fn_outputs[0]["logprobs"])
    columns = [output["logprobs"] for output in each.loss_fn_outputs[1:]]
    assert torch.equal(result.loss_fn_outputs[1]["logprobs"], torch.stack(columns, dim=1))
    assert result.metrics["loss:sum"] == pytest.approx(each.metrics["loss:sum"], rel=1e-6)
    difference = gradient_of(together) - gradient_of(apart)  # sums of float32 in another order
    assert difference.norm() < 1e-5 * gradient_of(apart).norm()
    likeliest = service.create_sampling_client().result().sample(TOKENS, 1, SamplingParams(max_tokens=1), False, 300)
    base = new_client(service).forward([wide], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    rows = [dict(row) for row in likeliest.result().topk_prompt_logprobs[1:]]
    scored = torch.tensor([[row[token] for token in chosen] for row, chosen in zip(rows, targets.tolist())])
    torch.testing.assert_close(base, scored)


def test_tinker_sdk_can_send_several_targets_per_token_as_sparse_matrices(tmp_path):
    targets, weights = torch.zeros((3, 6), dtype=torch.int64), torch.zeros((3, 6))
    targets[0, :2], weights[0, :2], targets[1, 0], weights[1, 0] = torch.tensor([4, 9]), 0.5, 5, 1.0
    inputs = {"target_tokens": targets, "weights": weights}
    data = [sdk_types.Datum(sdk_types.ModelInput.from_ints([3, 4, 5]), inputs)]
    assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None
    with serving(tmp_path) as (url, _):
        client = tinker.ServiceClient(base_url=url, api_key=KEY).create_lora_training_client("tiny", rank=2).result()
        output = client.forward(data, "cross_entropy").result()
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_torch()
    assert logprobs.shape == (3, 6)
    assert output.metrics["loss:sum"] == pytest.approx(-(logprobs * weights).sum().item(), rel=1e-6)


Result = list[float] | list[list[int]]


def tenant(client: TrainingClient, number: int) -> Iterator[Result]:
    """Train and sample in three steps, and yield each result."""
    for step in range(3):
        tokens = [3 + number, 4 + step, 5, 6, 3]
        data = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * 4})
        yield [client.forward_backward([data], "cross_entropy").result().metrics["loss:sum"]]
        yield list(client.optim_step(AdamParams(learning_rate=1e-2)).result().values())
        sampler = client.save_weights_and_get_sampling_client().result()
        sampled = sampler.sample(tokens, 3, SamplingParams(max_tokens=6, seed=step, stop=[]))
        yield [sequence.tokens for sequence in sampled.result().sequences]


def test_eight_concurrent_tinker_clients_get_the_same_results_as_separate_clients(service):
    def clients() -> list[TrainingClient]:
        return [service.create_lora_training_client(rank=2 + 2 * (n % 2), seed=n).result() for n in range(8)]

    alone, together, rng = clients(), clients(), random.Random(0)
    expected = [list(tenant(client, number)) for number, client in enumerate(alone)]
    found: list[list[Result]] = [[] for _ in together]
    running = [tenant(client, number) for number, client in enumerate(together)]
    turns = [number for number in range(8) for _ in expected[0]]
    rng.shuffle(turns)
    for number in turns:
        found[number].append(next(running[number]))
    assert found == expected
    assert all(torch.equal(adapter_of(one), adapter_of(other)) for one, other in zip(alone, together))
    assert not torch.equal(adapter_of(alone[0]), adapter_of(alone[2]))


def test_two_tinker_samplers_interleaved_token_by_token_give_the_same_samples_as_alone(service, monkeypatch):
    monkeypatch.setattr(worker, "_TURN_STEPS", 1)
    monkeypatch.setattr(worker, "_TURN_OVER_SWITCH", 0)
    samplers, params = [], SamplingParams(max_tokens=12, seed=7, stop=[])
    for seed in range(3):
        client = new_client(service, seed)
        away_from_zero(client)
        samplers.append(client.save_weights_and_get_sampling_client().result())
    alone = [sampler.sample(TOKENS, 4, params).result() for sampler in samplers]
    requests = [sampler.sample(TOKENS, 4, params) for sampler in samplers]
    assert [request.result() for request in requests] == alone
    assert alone[0] != alone[1]


def test_tinker_option_train_attn_also_trains_recurrent_layers(tmp_path):
    base = tiny_base(make_model(tmp_path, **RECURRENT))
    for shape, blocks in (
        (Shape(2), {"linear_attn", "self_attn", "mlp"}), (Shape(2, train_mlp=False), {"linear_attn", "self_attn"}),
        (Shape(2, train_attn=False), {"mlp"}),
    ):  # fmt: skip
        assert {module.split(".")[3] for module in base.adapted(shape).lora.modules} == blocks


MAMBA = LAYERS["nemotron_h"] | dict(model_type="nemotron_h", hybrid_override_pattern="M*-")


@pytest.mark.parametrize(
    "family, expected",
    [({"model_type": "phi3"}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
     (MAMBA, {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"})],
    ids=["fused", "mamba"],
)  # fmt: skip
def test_lora_adapters_of_tinker_models_cover_all_linear_layers_of_every_architecture(tmp_path, family, expected):
    modules = tiny_base(make_model(tmp_path, **family)).adapted(Shape(2)).lora.modules
    assert {module.rpartition(".")[2] for module in modules} == expected


def test_tinker_model_with_experts_can_be_sampled_and_trained_with_adapters_on_attention(tmp_path):
    with service_in(tmp_path, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2) as service:
        with pytest.raises(ValueError, match="mixture of experts, .* set train_mlp=False"):
            service.create_lora_training_client(rank=2).result()
        scored = service.create_sampling_client().result().compute_logprobs(TOKENS).result()
        client = service.create_lora_training_client(rank=2, train_mlp=False).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        assert sampler.compute_logprobs(TOKENS).result() == scored
        away_from_zero(client)
        trained = client.save_weights_and_get_sampling_client().result()
        assert trained.compute_logprobs(TOKENS).result() != scored


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
def test_most_likely_tokens_of_a_tinker_sample_are_those_of_the_model_at_temperature_1(service, params):
    client = service.create_sampling_client().result()
    call = client.sample(TOKENS, 1, SamplingParams(max_tokens=6, seed=1, **params), topk_sample_logprobs=20)
    (sequence,) = call.result().sequences
    again = client.sample(
        [*TOKENS, *sequence.tokens], 1, SamplingParams(max_tokens=1), topk_prompt_logprobs=20
    ).result()
    for row, expected in zip(sequence.topk_logprobs, again.topk_prompt_logprobs[len(TOKENS) :], strict=True):
        assert dict(row) == pytest.approx(dict(expected), abs=1e-5)
    for token, logprob, row in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert dict(row).get(token, logprob) == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize("prompt", [[1.5, 2.0], "12", ["1", "2"], [[1, 2]], [True], None])
def test_tinker_clients_raise_for_prompts_and_data_that_are_not_token_ids(service, prompt):
    datum = Datum(prompt, {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    calls = [
        lambda: new_client(service).forward(data=[datum], loss_fn="cross_entropy").result(),
        lambda: service.create_sampling_client().result().sample(prompt, 1, SamplingParams(max_tokens=1)).result(),
        lambda: service.create_sampling_client().result().compute_logprobs(prompt).result(),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="(datum 0|the prompt).*: expected a (list of token ids|whole number)"):
            call()


@pytest.mark.parametrize(("wrong", "message"), [
    ({"learning_rate": float("nan")}, "learning_rate = nan"), ({"learning_rate": -1.0}, "learning_rate = -1.0"),
    ({"beta1": 1.0}, "beta1 = 1.0"), ({"beta2": 1.5}, "beta2 = 1.5"), ({"eps": 0.0}, "eps = 0.0"), ({"weight_decay": -1}, "weight_decay = -1"),
])  # fmt: skip
def test_tinker_optim_step_with_invalid_settings_raises_and_changes_no_weight(service, wrong, message):
    client = new_client(service)
    client.forward_backward([Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": WEIGHTS})], "cross_entropy")
    before = adapter_of(client).clone()
    with pytest.raises(ValueError, match=message):
        client.optim_step(AdamParams(**wrong)).result()
    assert torch.equal(adapter_of(client), before)


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 1.5}, {"seed": 0.5}, {"top_k": 1.5}, {"temperature": "1"}, {"max_tokens": 0}]
)
def test_tinker_sample_with_invalid_parameters_raises_an_error_that_names_the_parameter(service, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} = {value!r}: expected a"):
        service.create_sampling_client().result().sample(TOKENS, 1, SamplingParams(**wrong)).result()


def test_stop_tokens_of_a_tinker_sample_may_be_numpy_integers(service):
    client = service.create_sampling_client().result()
    free = client.sample(TOKENS, 1, SamplingParams(max_tokens=8, seed=1, stop=[])).result().sequences[0].tokens
    stopped = client.sample(TOKENS, 1, SamplingParams(max_tokens=8, seed=1, stop=[np.int64(free[3])])).result()
    assert stopped.sequences[0].tokens == free[: free.index(free[3]) + 1] and stopped.sequences[0].stop_reason == "stop"


@pytest.mark.parametrize(("loss_fn", "message"), [
    (lambda data, logprobs: logprobs[0].sum(), "expected a loss and a dict of metrics"),
    (lambda data, logprobs: None, "gave None, expected a loss"),
    (lambda data, logprobs: (logprobs[0], {}), "no scalar tensor"), (lambda data, logprobs: (torch.tensor(1.0), {}), "no scalar tensor"),
])  # fmt: skip
def test_custom_loss_of_a_tinker_client_that_returns_something_else_raises(service, loss_fn, message):
    datum = Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:]})
    with pytest.raises(ValueError, match=message):
        new_client(service).forward_backward_custom([datum], loss_fn).result()


def test_tinker_gspo_loss_of_a_sequence_without_trained_tokens_is_zero(service):
    nothing, inputs = [0.0] * 4, {"target_tokens": TOKENS[1:]}
    datum = Datum(TOKENS[:-1], inputs | dict.fromkeys(("logprobs", "advantages", "sequence_ratio_mask"), nothing))
    trained = Datum(TOKENS[:-1], inputs | dict.fromkeys(("logprobs", "advantages", "sequence_ratio_mask"), WEIGHTS))
    client, config = new_client(service), {"clip_high_threshold": 2}
    both = client.forward([datum, trained], "gspo", config).result()
    assert both.metrics == client.forward([trained], "gspo", config).result().metrics and both.metrics["loss:sum"] != 0


def test_tinker_sampling_client_keeps_its_weights_while_training_continues(service):
    client = new_client(service, seed=3)
    away_from_zero(client)
    before = client.save_weights_and_get_sampling_client().result()
    scored = before.compute_logprobs(TOKENS).result()
    away_from_zero(client)
    after = client.save_weights_and_get_sampling_client().result()
    assert before.compute_logprobs(TOKENS).result() == scored != after.compute_logprobs(TOKENS).result()


def test_model_of_a_lora_rank_is_freed_when_no_tinker_client_uses_that_rank(service):
    base = service._core.base
    client = service.create_lora_training_client(rank=5).result()
    assert Shape(5) in base._native
    del client
    new_client(service)
    assert Shape(5) not in base._native


def answers_to(prompt: list[int], answers: list[tuple[list[int], float]]) -> list[Datum]:
    """Return a datum for each response (tokens, advantage) to a prompt. Advantages are 0 in the prompt."""
    data = []
    for answer, advantage in answers:
        tokens, empty = prompt + answer, [0.0] * (len(prompt) - 1)
        inputs = {"logprobs": empty + [-5.0] * len(answer), "advantages": empty + [advantage] * len(answer)}
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], **inputs}))
    return data


ANSWERS = [([8, 9], 0.0), ([8, 9, 3], -1.0), ([4], 0.5), ([8, 9], 2.0)]
GROUPS = [*answers_to(TOKENS, ANSWERS), *answers_to([9, 8, 7], ANSWERS[1:]), *answers_to([3, 4], [([5], 1.0)])]


@pytest.mark.parametrize("tokens_at_once", [4096, 9])
def test_tinker_samples_with_shared_prompts_train_like_ones_with_own_prompts(each_service, monkeypatch, tokens_at_once):
    monkeypatch.setattr(adapters, "_TOKENS_AT_ONCE", tokens_at_once)
    together, apart = new_client(each_service), new_client(each_service)
    for client in (together, apart):
        away_from_zero(client)
    result = together.forward_backward(GROUPS, "importance_sampling").result()
    alone = [apart.forward_backward([datum], "importance_sampling").result() for datum in GROUPS]
    for found, expected in zip(result.loss_fn_outputs, alone, strict=True):
        assert torch.equal(found["logprobs"], expected.loss_fn_outputs[0]["logprobs"])
    assert result.metrics["loss:sum"] == pytest.approx(sum(each.metrics["loss:sum"] for each in alone), rel=1e-6)
    difference = gradient_of(together) - gradient_of(apart)  # sums of float32 in another order
    assert difference.norm() < 1e-5 * gradient_of(apart).norm()


def test_consecutive_tinker_samples_with_equal_prompts_share_the_prompt_unless_it_is_trained(service):
    rows = rows_of(GROUPS, service._core.base, ("logprobs", "advantages"), ())
    first, second = len(TOKENS) - 1, 2
    assert prompt_groups(rows, "advantages") == [PromptGroup(0, 4, first), PromptGroup(4, 7, second)]
    assert prompt_groups(rows, None) == prompt_groups(rows[:1], "advantages") == []
    assert prompt_groups([rows[1], rows[4], rows[2]], "advantages") == []
    rows[2].inputs["advantages"][1] = 1.0  # a gradient in the prompt
    assert prompt_groups(rows[:4], "advantages") == [PromptGroup(0, 2, first), PromptGroup(2, 4, 1)]
