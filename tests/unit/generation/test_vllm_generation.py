"""A vLLM server that the run starts, against a stand-in for its interpreter, and against vLLM itself where NEMO_RL_VLLM_PYTHON names one."""

import contextlib
import gc
import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest
import tiny
import torch
import vllm_policies
import vllm_server_stand_in
from hf_players import hf_policy
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation.vllm import server as server_module
from nemo_rl_cpp.models.generation.vllm.server import (
    TESTED_VERSION,
    StartedServer,
    check_interpreter,
    server_environment,
    started_options,
)
from nemo_rl_cpp.models.generation.vllm.server_extension.nemo_rl_cpp_vllm import begin_digest
from nemo_rl_cpp.models.generation.vllm.vllm_generation import SharedMemoryTransport
from nemo_rl_cpp.models.model_folder import tiny_random
from paired_prompts import prompts
from processes import wait_until_gone
from vllm_policies import MODEL, change, engine_of, greedy_texts

REAL = os.environ.get("NEMO_RL_VLLM_PYTHON")
REALLY = pytest.mark.skipif(not REAL, reason="NEMO_RL_VLLM_PYTHON names no interpreter with vLLM")
INTERPRETERS = ["stand-in", pytest.param("vllm", marks=REALLY)]
starts_processes = pytest.mark.slow  # which import torch


def policy_of(python, tied=True, timeout_s=60.0, start_timeout_s=600.0, **generation):
    vllm = {"python": python, "timeout_s": timeout_s, "start_timeout_s": start_timeout_s}
    return vllm_policies.policy_of(tied, vllm, **generation)


def ended(leader):
    """Whether all processes of a group are gone: those that were killed take a moment."""
    return not wait_until_gone([line.split()[0] for line in of_group(leader)])


def of_group(leader):
    """Processes of the group that vLLM's process began, but for those that only wait for init to collect them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            line = path.read_text()
            state, _, group = line.rpartition(")")[2].split()[:3]
            if group == str(leader) and state != "Z":
                found.append(line)
    return found


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    return {"stand-in": vllm_server_stand_in.interpreter(tmp_path_factory.mktemp("good")), "vllm": REAL}


@starts_processes
@pytest.mark.parametrize(
    "kind", ["stand-in", *(pytest.param(f"vllm {tied}", marks=REALLY) for tied in ("tied", "untied"))]
)
def test_vllm_server_started_by_a_run_generates_with_the_policys_weights_and_exits(kind, interpreter):
    policy = policy_of(interpreter[kind.partition(" ")[0]], tied="untied" not in kind)
    engine, data = engine_of(policy), prompts()
    change(policy, 1)
    moved = engine.update_weights(policy.state_dict(), 1)
    assert moved.digest == engine.weight_digest() and moved.bytes == policy.model.compute.nbytes
    assert greedy_texts(engine, policy, data)
    assert of_group(engine.server.pid)
    engine.shutdown()
    engine.shutdown()
    assert ended(engine.server.pid)


@starts_processes
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("dies_loading", "did not start; its process .* ended with exit status 3, with the last words:\n  out of luck"),
        ("hangs_loading", r"did not start within 1 s .policy.generation.vllm_cfg.start_timeout_s.; its process"),
    ],
)  # fmt: skip
def test_vllm_server_that_does_not_start_is_an_error_and_leaves_no_process(mode, text, tmp_path, monkeypatch):
    started, end = [], server_module._end
    monkeypatch.setattr(server_module, "_end", lambda process, folder: (started.append(process), end(process, folder)))
    python, seconds = vllm_server_stand_in.interpreter(tmp_path, mode), 1.0 if "hangs" in mode else 60.0
    with pytest.raises(WorkerLostError, match=text):
        engine_of(policy_of(python, start_timeout_s=seconds))
    assert len(started) == 1 and ended(started[0].pid)


@starts_processes
def test_error_for_a_killed_vllm_server_names_the_signal_that_killed_the_server(tmp_path):
    policy = policy_of(vllm_server_stand_in.interpreter(tmp_path, "killed"), stop_token_ids=[])
    engine = engine_of(policy)
    engine.update_weights(policy.state_dict(), 1)
    with pytest.raises(WorkerLostError, match="it was doing: generate; its process .* was ended by SIGKILL"):
        engine.generate(prompts())
    engine.shutdown()
    assert ended(engine.server.pid)


def test_vllm_server_started_by_a_run_ends_with_the_trainer_process(tmp_path):
    """The kernel closes the trainer's end of standard input, however the trainer ends."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    config = PolicyConfig(model_name="tiny-random", generation={"vllm_cfg": {"python": str(program)}})
    config.fill_defaults()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StartedServer, "_wait_until_it_listens", lambda self, seconds: None)
        server = StartedServer(config, {})
    assert of_group(server.pid)
    server._process.stdin.close()
    assert server._process.wait(timeout=30) == -signal.SIGKILL
    server.close()


def test_vllm_server_started_by_a_run_gets_its_options_from_the_configuration():
    config = PolicyConfig(
        model_name="tiny-random", precision="bfloat16", max_total_sequence_length=100,
        generation={"max_batch_size": 4, "vllm_cfg": {"enforce_eager": True}, "vllm_kwargs": {"block_size": 32, "swap": {"a": 1}, "ids": [1, 2]}},
    )  # fmt: skip
    config.fill_defaults()
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 65536}
    options = started_options(config, model, "folder", 80)
    # a block for each row and vLLM's own
    expected = {"kv_cache_memory_bytes": (4 + 1) * 128 * 2 * 2 * 2 * 16384 * 2, "max_num_batched_tokens": 2048}
    assert options.items() >= (expected | {"max_num_seqs": 4, "max_model_len": 100}).items()
    words = list(server_module._words(options))
    for part in (
        ["--dtype", "bfloat16"], ["--enforce-eager"], ["--no-enable-chunked-prefill"], ["--host", "127.0.0.1"], ["--port", "80"],
        ["--block-size", "32"], ["--swap", '{"a": 1}'], ["--ids", "1", "2"],
    ):  # fmt: skip
        at = words.index(part[0])
        assert words[at : at + len(part)] == part
    assert "--enable-prefix-caching" not in words and "--no-enable-prefix-caching" not in words


def test_vllm_server_that_shares_the_trainers_gpu_gets_half_of_its_free_memory_for_the_cache(monkeypatch):
    config = PolicyConfig(model_name="tiny-random", precision="bfloat16", max_total_sequence_length=100)
    config.fill_defaults()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3_000_000, 9_000_000))
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 65536}
    options = started_options(config, model, "folder", 80, "cuda")
    assert options["kv_cache_memory_bytes"] == 1_500_000 and "enable_chunked_prefill" not in options
    assert options["weight_transfer_config"] == {"backend": "nemo_rl_cpp_shared_memory"}  # NCCL refuses a shared GPU


def test_started_vllm_server_has_enough_cache_blocks_for_all_recurrent_states(tmp_path):
    config = PolicyConfig(
        model_name="tiny-random",
        precision="bfloat16",
        max_total_sequence_length=100,
        generation={"max_batch_size": 100},
    )
    config.fill_defaults()
    model = tiny_random(vllm_policies.RECURRENT | {"num_hidden_layers": 4, "full_attention_interval": 4}).config
    (tmp_path / "config.json").write_text(json.dumps(model))
    options = started_options(config, model, str(tmp_path), 80)
    state = 4 * 128 * 128 * 4 + 3 * 1024 * 2  # float32, and three inputs of 2 * 2 * 128 + 4 * 128 channels
    block = 128 * 2 * 32 * 2  # keys and values of 128 tokens
    assert 16 * block < state < 17 * block
    # per sequence a block for the layer with attention and one for each of three states; per layer vLLM's own
    assert options["kv_cache_memory_bytes"] == (100 * 4 + 4) * 17 * block
    assert options["enable_prefix_caching"] is False and options["mamba_ssm_cache_dtype"] == "float32"


@pytest.mark.parametrize(
    ("mode", "text"),
    [("old", f"which has vLLM 0.31.0: its interfaces change with each version, and {TESTED_VERSION} is"), ("none", "which has no vLLM: install vLLM")],
)  # fmt: skip
def test_unsupported_vllm_version_is_an_error_before_the_model_is_loaded(mode, text, tmp_path):
    python = vllm_server_stand_in.interpreter(tmp_path, mode)
    with pytest.raises(ValueError, match=text):
        vllm = "policy.generation.backend=vllm", f"policy.generation.vllm_cfg.python={python}"
        tiny.make(tmp_path, *vllm, policy_factory=None)


def test_vllm_python_path_that_is_not_a_python_interpreter_is_an_error(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no such thing >&2; exit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ValueError, match="is no Python interpreter that can be run .SyntaxError"):
        check_interpreter(str(program))
    with pytest.raises(ValueError, match="can be run .No such file"):
        check_interpreter(str(tmp_path / "nothing"))
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ValueError, match="can be run .TimeoutExpired"):
        check_interpreter(str(program), patience=0.2)


def test_vllm_generation_is_an_error_for_models_whose_tensor_names_vllm_does_not_know(tmp_path):
    """transformers keeps all experts of a layer in one tensor; vLLM reads them one by one."""
    pytest.importorskip("transformers")
    policy = hf_policy("mixtral", generation={"backend": "vllm", "vllm_cfg": {"python": "/usr/bin/python3"}})
    text = r"a mixtral has .* in its checkpoints.*policy.generation.vllm_cfg.python to null"
    with pytest.raises(ValueError, match=text):
        engine_of(policy)


def test_digest_of_the_weights_sent_to_vllm_covers_names_dtypes_shapes_and_values():
    weights = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    buffer = SharedMemoryTransport(weights, None)
    first = buffer.fill(weights)
    by_hand = begin_digest([["a", "float32", [5], 0, 20], ["b", "bfloat16", [2, 3], 64, 12]])
    for tensor in weights.values():
        by_hand.update(tensor.view(torch.uint8).numpy().tobytes())
    assert first == by_hand.hexdigest() and buffer.weight_bytes == 32
    weights["a"][4] = 4.0000005
    assert buffer.fill(weights) != first
    buffer.close()
    buffer.close()


def test_shared_memory_for_weights_sent_to_vllm_is_freed_when_its_owner_is_garbage_collected():
    buffer = SharedMemoryTransport({"a": torch.ones(3)}, None)
    descriptor, memory = buffer.descriptor, os.fstat(buffer.descriptor)
    del buffer
    gc.collect()
    with contextlib.suppress(OSError):  # another thread may have opened a file and received the same number
        assert not os.path.samestat(os.fstat(descriptor), memory)


def test_null_in_env_vars_removes_the_environment_variable_from_the_vllm_server(monkeypatch):
    monkeypatch.setenv("PROXY", "somewhere")
    given = server_environment({"PROXY": None, "HF_HUB_OFFLINE": None, "VLLM_NO_USAGE_STATS": 0})
    assert "PROXY" not in given and "HF_HUB_OFFLINE" not in given and given["VLLM_NO_USAGE_STATS"] == "0"
    assert server_environment(None)["PROXY"] == "somewhere" and given["PATH"] == os.environ["PATH"]


@starts_processes
@pytest.mark.parametrize("kind", INTERPRETERS)
def test_grpo_run_trains_with_a_vllm_server_started_by_the_run(kind, interpreter, tmp_path):
    overrides = [f"++policy.hf_config_overrides.{key}={value}" for key, value in MODEL.items()]
    run = tiny.make(
        tmp_path, *tiny.SMALL, *overrides, "grpo.max_num_steps=2", "grpo.val_period=2", "policy.generation.backend=vllm",
        f"policy.generation.vllm_cfg.python={interpreter[kind]}", "policy.generation.vllm_cfg.enforce_eager=true",
    )  # fmt: skip
    with run:
        assert run.config.loss_fn.use_importance_sampling_correction and run.config.loss_fn.correction_left_open
        assert not run.policy.skips_prev_logprobs
        before = run.policy.weight_digest()
        run.train()
        engine, began = run.collector.generation, time.monotonic()
        os.kill(engine.server.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="was ended by SIGKILL"):
            engine.generate(prompts())
        assert time.monotonic() - began < 30
    assert ended(engine.server.pid)
    steps = [json.loads(line) for line in (tmp_path / "logs" / "exp_001" / "metrics.jsonl").read_text().splitlines()]
    refits = [step for step in steps if "train/refit/version" in step]
    assert [step["train/refit/version"] for step in refits] == [0, 1]
    assert refits[0]["train/weights/digest"] == before != refits[1]["train/weights/digest"]
    assert len({step["train/refit/digest"] for step in refits}) == 2
    for step in refits:
        assert 1 <= step["train/token_mult_prob_error"] < 1.0001 and step["train/gen_kl_error"] < 1e-6
    other = run.policy.create_generation(run.config.policy.generation, seed=42)
    assert engine.weight_version == 2 and other.weight_digest() == run.policy.weight_digest()  # for the validation
