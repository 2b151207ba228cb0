import pytest
import torch
from nemo_rl_cpp.distributed import get
from nemo_rl_cpp.environments import loading
from nemo_rl_cpp.environments.arithmetic_environment import ArithmeticEnvironment
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface
from nemo_rl_cpp.environments.loading import create_env, register_env
from nemo_rl_cpp.environments.reasoning_gym_environment import extract_answer
from nemo_rl_cpp.environments.remote import LocalActor
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment


def says(*texts):
    return [[{"role": "user", "content": "3 + 4 = "}, {"role": "assistant", "content": text}] for text in texts]


def test_arithmetic_environment_scores_the_leading_integer():
    env = ArithmeticEnvironment()
    texts = ["7\n", " 7", "7 apples\n", "7 apples", "so 7", "-7\n", "1,234\n", "", "07\n", "7.0\n", "8\n7\n", "٧\n"]
    gold = ["7", "7", 7, "7", "7", "-7", "1234", "7", "7", "7", "7", "7"]
    result = env.step(says(*texts), [{"ground_truth": g} for g in gold])
    assert result.rewards.tolist() == [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0]
    assert result.answers[6] == "1234" and result.answers[7] is None
    assert all(o["content"] == "" for o in result.observations) and bool(result.terminateds.all())
    metrics = env.pop_metrics()
    assert metrics["well_formed"] == pytest.approx(9 / 12)  # not: "7 apples", "so 7", ""
    assert metrics["accuracy_of_well_formed"] == pytest.approx(7 / 9)
    assert env.pop_metrics() == {}
    with pytest.raises(ValueError, match="ground_truth is 'seven'"):
        env.step(says("7"), [{"ground_truth": "seven"}])


def test_reverse_digits_environment_scores_the_share_of_correct_digits():
    env = create_env("reverse_digits")
    result = get(env.step.remote(says("321", "331", "3", " 321 9", "123"), [{"ground_truth": "321"}] * 5))
    assert result.rewards.tolist() == pytest.approx([1, 2 / 3, 1 / 3, 1, 1 / 3])
    assert env.pop_metrics() == {"exactly_right": 0.4}


def test_reward_functions_are_called_with_the_arguments_that_trl_passes():
    seen = {}

    def length(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [len(completion) for completion in completions]

    def right(completions, ground_truth):
        return [float(c == g) if g else None for c, g in zip(completions, ground_truth)]

    metadata = [{"ground_truth": "ab", "level": 1}, {"ground_truth": ""}]
    result = RewardFunctionEnvironment(length).step(says("ab", "abc"), metadata)
    assert result.rewards.tolist() == [2, 3] and result.rewards.dtype == torch.float32
    assert seen == {
        "prompts": ["3 + 4 = "] * 2, "completions": ["ab", "abc"], "ground_truth": ["ab", ""], "level": [1, None],
    }  # fmt: skip

    env = RewardFunctionEnvironment.remote(reward_funcs=[length, right], weights=[0.5, 10])
    assert env.step(says("ab", "abc"), metadata).rewards.tolist() == [11.0, 1.5]
    assert env.pop_metrics() == {"rewards/length": 2.5, "rewards/right": 1.0}


GRID = "1 2 3\n4 5 6\n\n7 8 9"


@pytest.mark.parametrize("text, answer_format, several_lines, answer", [
    (GRID, "auto", True, GRID),
    (f"\n{GRID}\n", "auto", True, GRID),
    (f"{GRID}\n\nQuestion: next\nAnswer: 1", "auto", True, GRID),
    (f"I think so.\n<answer>\n{GRID}\n</answer> Done.", "auto", True, GRID),
    (f"<answer>{GRID}</answer>", "tag", False, GRID),
    (GRID, "auto", False, "1 2 3"),
    (GRID, "line", True, "1 2 3"),
    (GRID, "tag", True, ""),
])  # fmt: skip
def test_reasoning_gym_environment_extracts_answers_of_one_or_several_lines(text, answer_format, several_lines, answer):
    assert extract_answer(text, answer_format, several_lines) == answer


def test_few_shot_examples_for_reasoning_gym_tasks_without_answers_are_an_error():
    pytest.importorskip("reasoning_gym")
    from nemo_rl_cpp.data.datasets import load_response_dataset

    section = {"dataset_name": "reasoning_gym", "task": "propositional_logic", "num_samples": 2}
    with pytest.raises(ValueError, match="'propositional_logic' has no answers to show: set num_shots: 0"):
        load_response_dataset(section)
    row = load_response_dataset({**section, "num_shots": 0}).dataset[0]
    assert row["stop_strings"] == ["\n\nQuestion:"] and row["messages"][1]["content"] is None


@pytest.mark.slow
def test_reasoning_gym_environment_scores_tagged_plain_and_multi_line_answers():
    """The last three answers are a grid, a list of moves, and a response to a task without a reference answer."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entries = [reasoning_gym.create_dataset("chain_sum", size=3, seed=1)[i] for i in range(3)]
    tasks = ("letter_counting", "mini_sudoku", "rotate_matrix", "tower_of_hanoi")
    entries += [reasoning_gym.create_dataset(task, size=1, seed=7)[0] for task in tasks]
    answers = [entry["answer"] for entry in entries]
    assert ["\n" in answer for answer in answers] == [False] * 4 + [True] * 3
    env = create_env("reasoning_gym", {"num_workers": 1, "verifier_deadline_s": 20.0})
    tagged = [f"<answer>{answer}</answer>" for answer in answers]
    texts = [f" {answers[0]}\nQuestion: more", tagged[1], "999999", f"well {tagged[3]}."]
    result = env.step(says(*texts, *answers[4:]), [{"reasoning_gym_entry": entry} for entry in entries])
    wrong = reasoning_gym.get_score_answer_fn("chain_sum")("999999", entries[2])
    assert result.rewards.tolist() == [1.0, 1.0, pytest.approx(wrong), 1.0, 1.0, 1.0, 1.0] and wrong < 0.1
    assert result.answers[3] == answers[3]
    with pytest.raises(ValueError, match="no task 'nonsense'"):
        env.step(says("1"), [{"reasoning_gym_entry": entries[0], "reasoning_gym_task": "nonsense"}])
    with pytest.raises(ValueError, match="reasoning_gym_entry"):
        env.step(says("1"), [{"ground_truth": "1"}])
    env.shutdown()


def test_environments_are_created_by_registered_name_or_dotted_class_name(monkeypatch):
    monkeypatch.setattr(loading, "ENV_REGISTRY", dict(loading.ENV_REGISTRY))
    register_env("echo", "fakes.EchoEnvironment")
    env = create_env("echo", {"next_stop_strings": ["x"]})
    assert isinstance(env, LocalActor) and env.cfg == {"next_stop_strings": ["x"]}
    assert create_env("fakes.EchoEnvironment").steps == 0
    with pytest.raises(ValueError, match="already registered"):
        register_env("math", "a.B")
    with pytest.raises(ValueError, match="known: agent, arithmetic"):
        create_env("mathematics")


class Slow(EnvironmentInterface):
    def __init__(self):
        import threading

        self.go = threading.Event()
        self.order = []

    def step(self, message_log_batch, metadata):
        self.go.wait(20)
        self.order.append(metadata)
        if metadata == "bad":
            raise LookupError("bad")
        return metadata

    def also(self, batch):
        return self.step(None, batch), {}


def test_remote_environment_executes_calls_in_the_background_in_order():
    env = Slow.remote()
    first, second, third = env.step.remote([], 1), env.step.remote([], "bad"), env.also.remote(3)
    assert not first.done()
    with pytest.raises(TimeoutError):
        get(first, timeout=0.01)
    env.go.set()
    assert get([first, third]) == [1, (3, {})]
    with pytest.raises(LookupError, match="bad"):
        get(second)
    assert env.order == [1, "bad", 3]
    assert get("a value") == "a value"
    with pytest.raises(AttributeError):
        env.missing
