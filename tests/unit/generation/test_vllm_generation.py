"""vLLM as the generator, against a stand-in for its interpreter, and against vLLM itself where NEMO_RL_VLLM_PYTHON names one."""

import contextlib
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
import vllm_stand_in
from hf_players import hf_policy
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.models.generation.vllm.process import VllmError, check_interpreter
from nemo_rl_cpp.models.generation.vllm.weights import WeightBuffer
from nemo_rl_cpp.models.generation.vllm.worker_script import TESTED_VERSION, begin_digest
from paired_prompts import prompts, texts
from vllm_policies import MODEL, change, engine_of

pytestmark = pytest.mark.slow  # processes that import torch
REAL = os.environ.get("NEMO_RL_VLLM_PYTHON")


def policy_of(python, tied=True, timeout_s=60.0, start_timeout_s=600.0, **generation):
    vllm = {"python": python, "timeout_s": timeout_s, "start_timeout_s": start_timeout_s}
    return vllm_policies.policy_of(tied, vllm, **generation)


def gone(engine):
    return not Path(f"/proc/{engine.process.pid}").exists()


def of_group(leader):
    """Processes of the group that vLLM's process began."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            line = path.read_text()
            if line.rpartition(")")[2].split()[2] == str(leader):
                found.append(line)
    return found


REALLY = pytest.mark.skipif(not REAL, reason="NEMO_RL_VLLM_PYTHON names no interpreter with vLLM")
INTERPRETERS = ["stand-in", pytest.param("vllm", marks=REALLY)]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    return {"stand-in": vllm_stand_in.interpreter(tmp_path_factory.mktemp("good")), "vllm": REAL}


@pytest.fixture(
    scope="module", params=["stand-in", *(pytest.param(f"vllm {kind}", marks=REALLY) for kind in ("tied", "untied"))]
)
def pair(request, interpreter):
    """A policy and its vLLM, which has its weights; with and without a head that shares the embedding's."""
    policy = policy_of(
        interpreter[request.param.partition(" ")[0]], tied="untied" not in request.param, max_new_tokens=8
    )
    engine = engine_of(policy)
    engine.update_weights(policy.state_dict(), 0)
    yield policy, engine
    engine.shutdown()
    assert gone(engine)


def test_weights_arrive_and_greedy_texts_are_those_of_the_native_engine(pair):
    policy, engine = pair
    native = NativeGeneration.generate
    data, seen = prompts(), []
    for version in (1, 2):
        change(policy, version)
        moved = engine.update_weights(policy.state_dict(), version)
        assert moved.digest == engine.weight_digest() and moved.bytes == policy.model.compute.nbytes
        out = engine.generate(data, greedy=True)
        wanted = native(policy.create_generation(policy.config.generation, seed=5), data, greedy=True)
        assert texts(out, data) == texts(wanted, data)
        assert torch.equal(out["truncated"], wanted["truncated"])
        torch.testing.assert_close(out["logprobs"], wanted["logprobs"], atol=1e-5, rtol=0)
        assert engine.weight_version == version
        seen.append((moved.digest, texts(out, data)))
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]


def test_what_it_reports_is_what_the_trainer_scores(pair):
    policy, engine = pair
    engine.update_weights(policy.state_dict(), 3)
    data = prompts()
    out = engine.generate(data)
    lengths, ends = data["input_lengths"], out["unpadded_sequence_lengths"]
    place = torch.arange(out["output_ids"].shape[1])
    mask = ((place >= lengths[:, None]) & (place < ends[:, None])).float()
    scored = policy.get_logprobs(
        {"input_ids": out["output_ids"], "input_lengths": ends, "token_mask": mask, "sample_mask": torch.ones(len(ends))}
    )["logprobs"]  # fmt: skip
    torch.testing.assert_close(out["logprobs"], scored.float(), atol=1e-5, rtol=0)


def test_samples_have_seeds_of_their_own(pair):
    _, engine = pair
    data = prompts()
    first, again = texts(engine.generate(data), data), texts(engine.generate(data), data)
    other = texts(engine.generate({**data, "draw_ids": data["draw_ids"] + 100}), data)
    val = texts(engine.generate({**data, "stream": "val"}), data)
    assert first == again
    assert first != other and first != val and other != val
    assert any(first[2 * i] != first[2 * i + 1] for i in range(6))  # the two of a prompt


def test_ends(pair):
    """Stop tokens and stop texts stay part of the response; what has no room is empty and truncated."""
    policy, engine = pair
    data = prompts()
    plain = texts(engine.generate(data), data)
    stopped = engine.generate({**data, "stop_strings": [["3"], None, *[[]] * 10]})
    three = policy.tokenizer.encode("3", add_special_tokens=False)[-1]
    for row, text in enumerate(texts(stopped, data)):
        cut = plain[row].index(three) + 1 if row == 0 and three in plain[row] else len(plain[row])
        assert text == plain[row][:cut]
        ended = text[-1] == 2 or (row == 0 and text[-1] == three)
        assert bool(stopped["truncated"][row]) == (not ended and len(text) == 8)
    assert any(2 in text for text in plain) or all(len(text) == 8 for text in plain)
    long = torch.full((2, 24), 5)
    full = engine.generate({"input_ids": long, "input_lengths": torch.tensor([24, 22])})
    assert full["generation_lengths"].tolist()[0] == 0 and full["generation_lengths"].tolist()[1] <= 2
    assert bool(full["truncated"][0])


def test_every_stop_text_ends_every_row(pair):
    policy, engine = pair
    data = prompts()
    digits = [str(digit) for digit in range(10)]
    out = engine.generate({**data, "stop_strings": [digits] * 12})
    ids = {policy.tokenizer.encode(digit, add_special_tokens=False)[-1] for digit in digits} | {2}
    for text in texts(out, data):
        assert all(token not in ids for token in text[:-1]) and (text[-1] in ids or len(text) == 8)


def test_finished_rows_are_told(pair):
    _, engine = pair
    data, told = prompts(), {}
    out = engine.generate(
        {**data, "stop_strings": [[str(row % 10)] for row in range(12)]},
        on_finished=lambda rows, ids: told.update(zip(rows, ids)),
    )
    assert told and all(texts(out, data)[row] == ids for row, ids in told.items()) and len(told) < 12


WRONG = {  # mode -> error, what it says, milliseconds that it may need beyond the start
    "dies_loading": (WorkerLostError, "ended with exit status 3; it was doing: loading vLLM; its last words:\n  out of luck"),
    "hangs_loading": (WorkerLostError, r"no sign of life for 4 s \(policy.generation.vllm_cfg.start_timeout_s\)"),
    "dies": (WorkerLostError, "was ended by SIGKILL; it was doing: generate"),
    "hangs": (WorkerLostError, r"no sign of life for 1 s \(policy.generation.vllm_cfg.timeout_s\); it was doing: generate"),
    "garbage": (WorkerLostError, "answered with what is no answer"),
    "fails": (VllmError, "vLLM, generate: RuntimeError: the kernel has a bug"),
    "forgets": (VllmError, "left 11 requests without an answer"),
    "flipped": (VllmError, "the weights that arrived are not the trainer's: digest"),
    "missing": (VllmError, "1 parameters of vLLM's model got no weights from the trainer, first model.norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("mode", WRONG)
def test_what_goes_wrong_is_an_error_in_time_and_leaves_no_process(mode, tmp_path):
    error, text = WRONG[mode]
    short = {"timeout_s": 1.0} if mode == "hangs" else {"start_timeout_s": 4.0} if mode == "hangs_loading" else {}
    policy = policy_of(vllm_stand_in.interpreter(tmp_path, mode), stop_token_ids=[], max_batch_size=None, **short)
    engine = engine_of(policy)
    if mode == "hangs":
        engine.process._timeout = 60.0  # of the refit, on a busy machine
    folder, data = Path(engine.process.folder.name), prompts()
    data["input_lengths"] = data["input_lengths"].clone()
    data["input_ids"] = torch.cat([data["input_ids"], torch.full((12, 15), 5)], 1)
    data["input_lengths"][0] = 23  # room for one token: this row ends in the first step
    began = time.monotonic()
    with pytest.raises(error, match=text):
        engine.update_weights(policy.state_dict(), 1)
        engine.process._timeout = min(engine.process._timeout, short.get("timeout_s", 60.0))
        engine.generate(data)
    assert time.monotonic() - began < 60
    if mode in ("flipped", "missing"):
        with pytest.raises(VllmError, match="vLLM has no weights"):  # never with the old ones, or with some
            engine.weight_version = None
            engine.generate(data)
    if error is WorkerLostError:
        assert gone(engine) and not folder.exists()
        with pytest.raises(WorkerLostError, match="has been ended"):
            engine.generate(data)
    engine.shutdown()
    engine.shutdown()
    assert gone(engine) and not folder.exists()


@pytest.mark.parametrize(
    ("mode", "text"),
    [("old", f"which has vLLM 0.31.0: its interfaces change with each version, and {TESTED_VERSION} is"), ("none", "which has no vLLM: install vLLM")],
)  # fmt: skip
def test_another_version_is_refused_before_anything_is_loaded(mode, text, tmp_path):
    python = vllm_stand_in.interpreter(tmp_path, mode)
    with pytest.raises(ValueError, match=text):
        check_interpreter(python)
    with pytest.raises(ValueError, match=text):
        tiny.make(
            tmp_path,
            "policy.generation.backend=vllm",
            f"policy.generation.vllm_cfg.python={python}",
            policy_factory=None,
        )


def test_what_is_no_interpreter_is_refused(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no such thing >&2; exit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ValueError, match="is no Python interpreter .it said 'no such thing'"):
        check_interpreter(str(program))
    with pytest.raises(ValueError, match="cannot be run"):
        check_interpreter(str(tmp_path / "nothing"))
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ValueError, match=r"has not answered for 0.2 s"):
        check_interpreter(str(program), patience=0.2)


def test_a_process_ends_with_the_trainer(tmp_path):
    """The lifeline: a trainer that is killed closes it."""
    engine = engine_of(policy_of(vllm_stand_in.interpreter(tmp_path, "hangs_loading")))
    os.close(os.dup(engine.process._lifeline))  # it is open
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), engine.process._lifeline)  # the pipe has no other end any more
    assert engine.process._process.wait(timeout=30) == 1
    engine.shutdown()


def test_a_run_of_ppo_on_transformers(interpreter, tmp_path):
    """Policy and critic by transformers, texts by vLLM, which gets the policy's weights before each step."""
    pytest.importorskip("transformers")
    overrides = [f"++policy.hf_config_overrides.{key}={value}" for key, value in MODEL.items()]
    with tiny.make(
        tmp_path, *overrides, "policy.backend=hf", "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=2", "ppo.max_num_steps=2",
        "policy.train_global_batch_size=8", "value.train_global_batch_size=8", "ppo.policy_training_start_step=0", "policy.precision=float32",
        "policy.generation.backend=vllm", f"policy.generation.vllm_cfg.python={interpreter['stand-in']}", config="ppo_tiny.yaml",
    ) as run:  # fmt: skip
        assert run.config.value.backend == "hf" and not run.policy.skips_prev_logprobs
        run.train()
        engine = run.generation
    assert [row["refit/version"] for row in run.history] == [0, 1] and gone(engine)
    for row in run.history:
        assert row["refit/digest"] and 1 <= row["token_mult_prob_error"] < 1.0001 and row["gen_kl_error"] < 1e-6
        assert row["critic/loss"] >= 0


def test_vllm_is_refused_where_checkpoints_have_other_names(tmp_path):
    """transformers keeps all experts of a layer in one tensor; vLLM reads them one by one."""
    pytest.importorskip("transformers")
    policy = hf_policy("mixtral", generation={"backend": "vllm", "vllm_cfg": {"python": "/usr/bin/python3"}})
    with pytest.raises(
        ValueError, match=r"a mixtral has .* in its checkpoints.*policy.generation.vllm_cfg.python to null"
    ):
        engine_of(policy)


def test_the_digest_is_of_the_weights_and_their_names():
    weights = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    buffer = WeightBuffer(weights)
    first = buffer.fill(weights)
    by_hand = begin_digest([["a", "float32", [5], 0, 20], ["b", "bfloat16", [2, 3], 64, 12]])
    for tensor in weights.values():
        by_hand.update(tensor.view(torch.uint8).numpy().tobytes())
    assert first == by_hand.hexdigest() and buffer.weight_bytes == 32
    weights["a"][4] = 4.0000005
    assert buffer.fill(weights) != first
    with pytest.raises(ValueError, match="other names, types or shapes"):
        buffer.fill({"a": weights["a"]})
    with pytest.raises(ValueError, match="other names, types or shapes"):
        buffer.fill({**weights, "b": weights["b"].float()})
    buffer.close()
    buffer.close()


@pytest.mark.parametrize("kind", INTERPRETERS)
def test_a_run(kind, interpreter, tmp_path):
    """Two steps with a refit before each: digests, versions, scored batches; killed in the middle, vLLM leaves an error and no process."""
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
        engine = run.generation
        call = engine.process.call

        def killed(what, message, payload, on_step):
            """The first step of vLLM is its last."""
            return call(what, message, payload, lambda *_: os.kill(engine.process.pid, signal.SIGKILL))

        engine.process.call, began = killed, time.monotonic()
        with pytest.raises(WorkerLostError, match="was ended by SIGKILL; it was doing: generate"):
            engine.generate(prompts())
        assert time.monotonic() - began < 30 and gone(engine) and not of_group(engine.process.pid)
    steps = [json.loads(line) for line in (tmp_path / "logs" / "exp_001" / "metrics.jsonl").read_text().splitlines()]
    refits = [step for step in steps if "train/refit/version" in step]
    assert [step["train/refit/version"] for step in refits] == [0, 1]
    assert refits[0]["train/weights/digest"] == before != refits[1]["train/weights/digest"]
    assert len({step["train/refit/digest"] for step in refits}) == 2
    for step in refits:
        assert 1 <= step["train/token_mult_prob_error"] < 1.0001 and step["train/gen_kl_error"] < 1e-6
    other = run.policy.create_generation(run.config.policy.generation, seed=42)
    assert engine.weight_version == 2 and other.weight_digest() == run.policy.weight_digest()  # for the validation
