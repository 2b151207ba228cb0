import threading

import pytest
import torch
from fakes import ByteTokenizer, FakeGeneration, prompts
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl_cpp.rollouts.rollouts import EarlyScoring, run_multi_turn_rollout

TOKENIZER = ByteTokenizer()


class Lengths(EnvironmentInterface):
    """An environment whose reward is the length of the response, and which records its calls."""

    scores_rows_alone = True

    def __init__(self, fails_on=None):
        self.fails_on = fails_on
        self.calls = []
        self.answered = threading.Event()

    def step(self, message_log_batch, metadata):
        texts = [log[-1]["content"] for log in message_log_batch]
        self.calls.append([(log[0]["content"], text) for log, text in zip(message_log_batch, texts)])
        self.answered.set()
        if self.fails_on in texts:
            raise RuntimeError(f"cannot score {self.fails_on}")
        rewards = torch.tensor([float(len(text)) for text in texts])
        observations = [{"role": "environment", "content": f"<{info}>"} for info in metadata]
        return EnvironmentReturn(
            observations, list(metadata), [None] * len(texts), rewards, torch.ones(len(texts)), None
        )


class Together(Lengths):
    scores_rows_alone = False


class ReportingGeneration(FakeGeneration):
    """A fake engine that reports the rows `early` as finished before it returns, and calls `between` after each
    report."""

    reports_finished = True

    def __init__(self, early, between=lambda: None):
        super().__init__(lambda prompt, key: "x" * int(prompt))
        self.early, self.between = early, between

    def generate(self, data, greedy=False, on_finished=None):
        out = super().generate(data, greedy)
        starts, ends = data["input_lengths"].tolist(), out["unpadded_sequence_lengths"].tolist()
        for rows in self.early if on_finished else ():
            on_finished(rows, [out["output_ids"][row, starts[row] : ends[row]].tolist() for row in rows])
            self.between()
        return out


def rollout(engine, environments, tasks=("a", "b", "a", "a", "b")):
    batch = prompts(["3", "1", "4", "1", "5"], list(tasks), [f"info {i}" for i in range(5)])
    return run_multi_turn_rollout(engine, batch, TOKENIZER, environments, max_seq_len=100, max_rollout_turns=1)


def same(result, expected):
    assert result["total_reward"].tolist() == expected["total_reward"].tolist() == [3, 1, 4, 1, 5]
    assert result["extra_env_info"] == expected["extra_env_info"]
    contents = [[message["content"] for message in log] for log in result["message_log"]]
    assert contents == [[message["content"] for message in log] for log in expected["message_log"]]


@pytest.mark.parametrize("early", [[], [[3]], [[4, 0], [2], [1]], [[1], [0], [2, 3], [4]]])
def test_rollout_result_does_not_depend_on_whether_responses_are_scored_during_generation(early):
    expected, _ = rollout(FakeGeneration(lambda prompt, key: "x" * int(prompt)), {"a": Lengths(), "b": Lengths()})
    a, b = Lengths.remote(), Lengths.remote()
    result, _ = rollout(ReportingGeneration(early), {"a": a, "b": b})
    same(result, expected)
    asked = [row for call in a.calls + b.calls for row in call]
    assert sorted(asked) == sorted([("3", "xxx"), ("1", "x"), ("4", "xxxx"), ("1", "x"), ("5", "xxxxx")])


def test_environment_scores_finished_responses_while_other_responses_are_generated():
    environment = Lengths.remote()
    answered = []
    engine = ReportingGeneration([[2]], lambda: answered.append(environment.answered.wait(30)))
    rollout(engine, {"a": environment, "b": environment})
    assert answered == [True]
    assert environment.calls[0] == [("4", "xxxx")] and len(environment.calls) > 1


@pytest.mark.parametrize(
    "environment", [Together.remote(), Lengths()], ids=["needs the whole batch", "no thread of its own"]
)
def test_environment_without_early_scoring_scores_all_responses_in_one_call_after_generation(environment):
    rollout(ReportingGeneration([[0], [1, 2]]), {"a": environment}, tasks="aaaaa")
    assert [len(call) for call in environment.calls] == [5]


def test_responses_finished_while_the_environment_is_busy_are_scored_in_one_call():
    go_on = threading.Event()

    class Slow(Lengths):
        def step(self, message_log_batch, metadata):
            answer = super().step(message_log_batch, metadata)
            assert go_on.wait(30)
            return answer

    environment = Slow.remote()
    batch = prompts(["1"] * 4, ["a"] * 4, [None] * 4)
    early = EarlyScoring(batch, TOKENIZER, {"a": environment})
    early.finished([2], [[120]])
    assert environment.answered.wait(30)
    early.finished([0], [[120]])
    early.finished([3], [[120, 120]])
    assert [rows for rows, _ in early.begun] == [[2]]
    go_on.set()
    early.begun[0][1].result(30)
    early.finished([1], [[120]])
    assert [rows for rows, _ in early.begun] == [[2], [0, 3, 1]]
    assert early.begun[1][1].result(30).rewards.tolist() == [1, 2, 1]


def test_environment_error_during_generation_is_raised_by_the_rollout():
    with pytest.raises(RuntimeError, match="cannot score xxxx"):
        rollout(ReportingGeneration([[2]]), {"a": Lengths.remote(fails_on="xxxx"), "b": Lengths.remote()})
