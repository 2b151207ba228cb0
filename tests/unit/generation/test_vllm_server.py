import base64
import json
import re
import shlex
import threading
import time

import pytest
import tiny
import torch
import vllm_server_stand_in
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation.vllm import server as server_module
from nemo_rl_cpp.models.generation.vllm import vllm_generation
from nemo_rl_cpp.models.generation.vllm.server import (
    EXTENSION,
    PROTOCOL,
    VllmError,
    check_server,
    client_of,
    server_command,
)
from nemo_rl_cpp.models.generation.vllm.server_extension.nemo_rl_cpp_vllm import begin_digest
from nemo_rl_cpp.models.generation.vllm.vllm_generation import VllmGeneration
from paired_prompts import prompts, texts, to_train
from vllm_policies import MODEL, RECURRENT, change, engine_of, greedy_texts, policy_of

UPDATE = [
    "/pause?mode=wait", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc",
    "/resume",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """config.json of the policies of this module."""
    return {tied: policy_of(tied).saved_config() for tied in (True, False)}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def joined(request, model):
    """A server, a policy, and the engine that has brought it the policy's weights."""
    with vllm_server_stand_in.serving("good", model[request.param]) as server:
        policy = policy_of(request.param, {"server_url": server.url})
        engine = engine_of(policy)
        engine.update_weights(policy.state_dict(), 0)
        yield server, policy, engine
        engine.shutdown()
        engine.shutdown()


def test_vllm_server_generates_the_greedy_texts_of_the_native_engine_after_a_refit(joined):
    server, policy, engine = joined
    data, seen = prompts(), []
    for version in (1, 2):
        change(policy, version)
        server.calls.clear()
        moved = engine.update_weights(policy.state_dict(), version)
        assert server.calls == UPDATE
        assert moved.digest == engine.weight_digest() == server.transfer.digest
        assert server.version == f"{version}-{moved.digest[:16]}" and engine.weight_version == version
        for name, tensor in policy.state_dict().items():
            assert name == "lm_head.weight" or torch.equal(server.llama.weights[name], tensor)
        seen.append((moved.digest, greedy_texts(engine, policy, data)))
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]


def test_generation_logprobs_of_vllm_match_those_of_the_trainer(joined):
    _, policy, engine = joined
    engine.update_weights(policy.state_dict(), 3)
    data = prompts()
    out = engine.generate(data)
    scored = policy.get_logprobs(to_train(data, out, 2))["logprobs"]
    torch.testing.assert_close(out["logprobs"], scored.float(), atol=1e-5, rtol=0)


def test_each_vllm_sample_has_a_distinct_and_reproducible_seed(joined):
    _, _, engine = joined
    data = prompts()
    first, again = texts(engine.generate(data), data), texts(engine.generate(data), data)
    other = texts(engine.generate({**data, "draw_ids": data["draw_ids"] + 100}), data)
    val = texts(engine.generate({**data, "stream": "val"}), data)
    assert first == again and first != other and first != val and other != val
    assert any(first[2 * i] != first[2 * i + 1] for i in range(6))  # the two of a prompt


def test_vllm_responses_are_truncated_at_stop_strings_and_reported_when_finished(joined):
    """Stop texts are looked for here; what vLLM would go on with is given up there."""
    server, policy, engine = joined
    data, told = prompts(), {}
    plain = texts(engine.generate(data), data)
    digits = [str(digit) for digit in range(10)]
    ids = {policy.tokenizer.encode(digit, add_special_tokens=False)[-1] for digit in digits} | {2}
    rows = [digits if row % 2 else None for row in range(12)]
    out = engine.generate({**data, "stop_strings": rows}, on_finished=lambda rows, ids: told.update(zip(rows, ids)))
    for row, text in enumerate(texts(out, data)):
        cut = next((at + 1 for at, token in enumerate(plain[row]) if row % 2 and token in ids), len(plain[row]))
        assert text == plain[row][:cut]
        assert bool(out["truncated"][row]) == (len(text) == 8 and text[-1] != 2 and not (row % 2 and text[-1] in ids))
    assert told and all(texts(out, data)[row] == ids for row, ids in told.items()) and len(told) < 12
    assert all(body["sampling_params"]["stop_token_ids"] == [2] for body in server.bodies)
    full = engine.generate({"input_ids": torch.full((2, 24), 5), "input_lengths": torch.tensor([24, 22])})
    assert full["generation_lengths"].tolist()[0] == 0 and bool(full["truncated"][0])


def test_unfinished_requests_never_exceed_the_vllm_servers_max_num_seqs(model):
    with vllm_server_stand_in.serving("good", model[True], max_num_seqs=3) as server:
        policy = policy_of(True, {"server_url": server.url})
        engine, running, most, one = engine_of(policy), set(), [], VllmGeneration._one
        engine.update_weights(policy.state_dict(), 0)

        def counted(request, *given):
            running.add(request.row)
            most.append(len(running))
            try:
                return one(engine, request, *given)
            finally:
                running.discard(request.row)

        engine._one = counted
        engine.generate(prompts())
        engine.shutdown()
    assert max(most) <= 3 and len(most) == 12


REFUSED = {  # what is wrong -> what is said
    ("old",): "which is vLLM 0.31.0: its interfaces change with each version",
    ("no_dev",): "has no routes for weights: it was started without VLLM_SERVER_DEV_MODE=1",
    ("no_extension",): "was started without --worker-extension-cls nemo_rl_cpp_vllm.Weights",
    ("no_scale_out",): "route for token ids is closed: it was started without --enable-scale-out",
    ("locked",): "wants a key: name the environment variable",
    ("good", "enable_chunked_prefill", True): "computes prompts in parts: on CPUs vLLM cannot do that with a seed",
    ("good", "max_model_len", 23): "sequences have at most 23 tokens: this run needs 24",
    ("good", "logprobs_mode", "raw_logprobs"): "gives raw_logprobs: training compares with processed_logprobs",
    ("good", "backend", "nccl"): "weight transfer is nccl: a trainer on cpu needs nemo_rl_cpp_shared_memory",
    ("good", "dtype", "torch.float16"): "computes in float16, but policy.generation.vllm_cfg.precision is bf16",
}


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda wrong: str(wrong[min(1, len(wrong) - 1)]))
def test_error_for_an_unusable_vllm_server_contains_the_command_that_starts_a_server(wrong, model):
    facts = dict([wrong[1:]]) if len(wrong) > 1 else {}
    vllm = {"precision": "bf16"} if "dtype" in facts else {}
    with vllm_server_stand_in.serving(wrong[0], model[True], **facts) as server:
        policy = policy_of(True, {"server_url": server.url, **vllm}).config
        with pytest.raises(ValueError, match=re.escape(REFUSED[wrong])) as error:
            check_server(client_of(policy), policy)
    assert f"is started like this:\n  {server_command(policy)}" in str(error.value)


def test_vllm_on_a_cpu_requires_bfloat16_for_models_with_recurrent_layers(model):
    with vllm_server_stand_in.serving("good", model[True]) as server:  # it reports float32
        policy = policy_of(True, {"server_url": server.url}, RECURRENT).config
        with pytest.raises(ValueError, match="which computes in float32: .* compute only in bfloat16") as error:
            check_server(client_of(policy), policy)
    assert "--no-enable-prefix-caching --mamba-ssm-cache-dtype float32" in str(error.value)


def test_vllm_server_with_a_different_model_or_worker_extension_is_an_error(model, monkeypatch):
    with vllm_server_stand_in.serving("good", {**model[True], "vocab_size": 99}) as server:
        policy = policy_of(True, {"server_url": server.url})
        with pytest.raises(ValueError, match="model has 99 tokens and the policy .*start it with the policy's model"):
            engine_of(policy)
        assert server.worker.ask(server.worker)["protocol"] == PROTOCOL
        server.worker.ask = lambda worker: {"protocol": PROTOCOL + 1}
        with pytest.raises(ValueError, match=f"speaks protocol {PROTOCOL + 1}, and this package {PROTOCOL}"):
            engine_of(policy)


def test_api_key_of_the_vllm_server_is_read_from_the_configured_environment_variable(model, monkeypatch):
    with vllm_server_stand_in.serving("locked", model[True]) as server:
        policy = policy_of(True, {"server_url": server.url, "http_refit_api_key_env_var": "KEY_OF_VLLM"})
        monkeypatch.delenv("KEY_OF_VLLM", raising=False)
        with pytest.raises(ValueError, match="the environment has no KEY_OF_VLLM"):
            engine_of(policy)
        monkeypatch.setenv("KEY_OF_VLLM", "secret")
        engine_of(policy).shutdown()


WRONG = {  # mode -> error, what it says
    "dies": (WorkerLostError, "is gone, or answered with what is no answer .*it was doing: generate"),
    "hangs": (WorkerLostError, r"gave no sign of life for 0.5 s \(policy.generation.vllm_cfg.timeout_s\); it was doing: generate"),
    "garbage": (WorkerLostError, "answered with what is no answer"),
    "aborts": (VllmError, "ended a request by abort: it was aborted"),
    "renamed": (VllmError, "answered with weights 'of-others', and '1-.*' were sent: somebody else has changed them"),
    "flipped": (VllmError, "the weights that arrived are not the trainer's: digest"),
    "missing": (VllmError, "1 parameters of vLLM's model got no weights from the trainer, first model.norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("mode", WRONG)
def test_failures_of_the_vllm_server_raise_an_error_within_the_timeout(mode, model):
    error, text = WRONG[mode]
    with vllm_server_stand_in.serving(mode, model[True]) as server:
        policy = policy_of(True, {"server_url": server.url, "timeout_s": 60.0}, stop_token_ids=[])
        engine, began = engine_of(policy), time.monotonic()
        with pytest.raises(error, match=text):
            engine.update_weights(policy.state_dict(), 1)
            if mode == "hangs":
                engine._client.timeout = 0.5
            engine.generate(prompts())
        assert time.monotonic() - began < 30
        if mode in ("flipped", "missing"):
            assert server.paused == (mode == "missing")  # vLLM has its old weights still, or some of the new ones
            with pytest.raises(VllmError, match="has no weights: a refit is missing, or has failed"):
                engine.generate(prompts())
        engine.shutdown()
    assert not [t for t in threading.enumerate() if t.name.startswith("vllm")]  # nobody waits for the server any more


def test_vllm_server_that_pauses_only_after_the_timeout_is_resumed(model):
    with vllm_server_stand_in.serving("good", model[True]) as server:
        policy = policy_of(True, {"server_url": server.url, "timeout_s": 1.0})
        engine, update, resumed = engine_of(policy), server.update, threading.Event()

        def slow(path, body):
            answer = update(path, body)
            if path == "/resume":
                resumed.set()
            elif path.startswith("/pause"):  # a request of somebody else does not end
                resumed.wait(20)
            return answer

        server.update = slow
        with pytest.raises(WorkerLostError, match="gave no sign of life for 1 s .*it was doing: a refit"):
            engine.update_weights(policy.state_dict(), 1)
        assert resumed.is_set() and not server.paused and engine.weight_version is None
        engine.shutdown()


@pytest.mark.parametrize("error", [WorkerLostError, ValueError, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_vllm_server_is_resumed_if_a_refit_fails_before_weights_change(joined, monkeypatch, error):
    server, policy, engine = joined

    def fails(weights):
        assert server.paused
        raise error("before the update")

    with monkeypatch.context() as patch:
        patch.setattr(engine._transport, "prepare", fails)
        server.calls.clear()
        with pytest.raises(error, match="before the update"):
            engine.update_weights(policy.state_dict(), 7)
    assert not server.paused and server.calls == ["/pause?mode=wait", "/resume"]
    engine.update_weights(policy.state_dict(), 8)
    assert engine.weight_version == 8


def test_error_in_the_on_finished_callback_cancels_unfinished_vllm_requests(joined):
    server, _, engine = joined
    data = prompts()
    events = server.events

    def slow(body):
        for number, event in enumerate(events(body)):
            if body["token_ids"] == data["input_ids"][0, : data["input_lengths"][0]].tolist():
                server.given_up.wait(0.02 * number)
            yield event

    def fails(rows, ids):
        raise ZeroDivisionError("of a reward function")

    server.events = slow
    try:
        with pytest.raises(ZeroDivisionError, match="of a reward function"):
            engine.generate({**data, "stop_strings": [None] * 12}, on_finished=fails)
    finally:
        server.events = events
    assert texts(engine.generate(data), data)  # and the engine goes on


@pytest.fixture
def by_nccl(model, monkeypatch):
    """A server with the extension's NCCL, a policy, its engine, and the phases of the trainer's communicator, which the server hears."""
    monkeypatch.setattr(server_module, "transfer_of", lambda policy, device: "nemo_rl_cpp_nccl")
    with vllm_server_stand_in.serving("good", model[True], backend="nemo_rl_cpp_nccl") as server:

        class Communicator:
            phases = []

            def broadcast(self, tensor, root, phase):
                self.phases.append((root, phase))
                server.transfer.wire.put(tensor.clone())

        def connect(store, size, device, seconds):
            store.set("nccl_unique_id", bytes(range(128)))
            Communicator.phases.append(size)
            return Communicator()

        monkeypatch.setattr(vllm_generation, "connect", connect)
        policy = policy_of(True, {"server_url": server.url, "timeout_s": 20.0})
        engine = engine_of(policy)
        yield server, policy, engine, Communicator
        engine.shutdown()


def test_nccl_weight_transfer_sends_weights_in_the_format_that_vllm_expects(by_nccl):
    server, policy, engine, communicator = by_nccl
    for version in (0, 1):
        change(policy, version)
        weights = policy.state_dict()
        moved = engine.update_weights(weights, version)
        assert moved.digest == server.transfer.digest == engine.weight_digest()
        assert moved.bytes == sum(t.nbytes for t in weights.values())
        for name, tensor in weights.items():
            assert torch.equal(server.llama.weights[name], tensor)
    info = vars(server.transfer.info)
    assert base64.b64decode(info.pop("nccl_unique_id_b64")) == bytes(range(128))
    assert info == {"rank_offset": 1, "world_size": 3, "packed": False}  # two workers behind the trainer
    sent = [(0, f"sending {name} to vLLM") for name in policy.state_dict()]
    assert communicator.phases == [3, *sent, *sent]  # they meet once
    by_hand = begin_digest([[name, "float32", list(tensor.shape)] for name, tensor in weights.items()])
    for tensor in weights.values():
        by_hand.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert moved.digest == by_hand.hexdigest()


def test_failed_nccl_weight_transfer_raises_and_leaves_the_server_paused(by_nccl, monkeypatch):
    server, policy, engine, communicator = by_nccl
    engine.update_weights(policy.state_dict(), 0)

    def lost(self, tensor, root, phase):
        server.transfer.wire.put(torch.zeros(1, 1, 1, 1, 1))  # the worker's call fails, too
        raise C.TimedOut(f"rank 0 of 3: {phase} failed after 20 s")

    monkeypatch.setattr(communicator, "broadcast", lost)
    text = "did not take the weights: rank 0 of 3|a refit: POST /update_weights has status 500"
    with pytest.raises((WorkerLostError, VllmError), match=text):
        engine.update_weights(policy.state_dict(), 1)
    assert server.paused and engine.weight_version is None


def test_vllm_workers_missing_from_the_nccl_rendezvous_are_an_error(by_nccl, monkeypatch):
    server, policy, engine, _ = by_nccl

    def alone(store, size, device, seconds):
        raise C.TimedOut("rank 0 of 3: meeting the other ranks failed after 20 s")

    monkeypatch.setattr(vllm_generation, "connect", alone)
    with pytest.raises(WorkerLostError, match="did not meet the trainer: rank 0 of 3: meeting"):
        engine.update_weights(policy.state_dict(), 0)
    assert not server.paused


def test_printed_vllm_server_command_contains_the_policys_options():
    policy = policy_of(True, {"server_url": "http://10.0.0.7:8123", "precision": "bf16"}).config
    dev, path, *words = shlex.split(server_command(policy))
    assert dev == "VLLM_SERVER_DEV_MODE=1" and path == f"PYTHONPATH={EXTENSION}"
    assert (EXTENSION / "nemo_rl_cpp_vllm.py").is_file()
    assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--port") + 1] == "8123"
    assert words[words.index("--dtype") + 1] == "bfloat16" and words[words.index("--max-model-len") + 1] == "24"
    assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": "nemo_rl_cpp_shared_memory"}


SMALL = {
    "grpo": tiny.SMALL,
    "ppo": (
        "ppo.num_prompts_per_step=8", "ppo.num_generations_per_prompt=4", "policy.train_global_batch_size=16", "value.train_global_batch_size=16", "ppo.policy_training_start_step=0",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "trainer"), [("ppo", "native"), ("grpo", "hf")])
def test_grpo_run_trains_with_an_already_running_vllm_server(algorithm, trainer, tmp_path):
    if trainer == "hf":
        pytest.importorskip("transformers")
    overrides = [f"++policy.hf_config_overrides.{key}={value}" for key, value in MODEL.items()]
    small, config = SMALL[algorithm], f"{algorithm}_tiny.yaml"
    with tiny.make(tmp_path / "a", *small, *overrides, config=config) as run:
        saved = run.policy.saved_config()
    with vllm_server_stand_in.serving("good", saved, max_model_len=4096) as server:
        run = tiny.make(
            tmp_path / "b", *small, *overrides, f"{algorithm}.max_num_steps=2", "policy.generation.backend=vllm", f"policy.backend={trainer}",
            f"policy.generation.vllm_cfg.server_url={server.url}", config=config,
        )  # fmt: skip
        with run:
            assert run.config.loss_fn.use_importance_sampling_correction and not run.policy.skips_prev_logprobs
            run.train()
            digest = run.policy.weight_digest()
        assert not server.paused
    steps = [json.loads(line) for line in (tmp_path / "b/logs/exp_001/metrics.jsonl").read_text().splitlines()]
    refits = [step for step in steps if "train/refit/version" in step]
    assert [step["train/refit/version"] for step in refits] == [0, 1] and server.version.startswith("1-")
    assert len({step["train/refit/digest"] for step in refits}) == 2 and digest != refits[-1]["train/weights/digest"]
    for step in refits:
        assert 1 <= step["train/token_mult_prob_error"] < 1.0001 and abs(step["train/gen_kl_error"]) < 1e-6
