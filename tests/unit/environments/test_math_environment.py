import random

import pytest
import torch
from nemo_rl_cpp.distributed import get
from nemo_rl_cpp.environments import verifiers
from nemo_rl_cpp.environments.math_environment import (
    EnglishMultichoiceVerifyWorker,
    HFVerifyWorker,
    MathEnvironment,
    MultilingualMultichoiceVerifyWorker,
)


def says(*texts):
    return [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]


def truths(*values):
    return [{"ground_truth": value} for value in values]


@pytest.fixture(scope="module")
def env():
    environment = MathEnvironment.remote({"num_workers": 2})
    yield environment
    environment.shutdown()


CASES = [
    (r"so \boxed{42}", "42", 1),
    (r"so \boxed{41}", "42", 0),
    (r"$\frac{1}{2}$", "0.5", 1),
    (r"\boxed{0.00001}", 1e-05, 1),
    ("the answer is 0.3333333", r"\frac{1}{3}", 1),  # six digits after the point are compared
    ("the answer is 0.333", r"\frac{1}{3}", 0),
    (r"\boxed{1} then \boxed{2}", "2", 0),  # all boxes count, as a set
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    ("no number at all", "3", 0),
    ("", "3", 0),
    ("The final answer is 7. I hope it is correct.", "7", 1),
]


@pytest.mark.slow
def test_math_environment_returns_reward_and_observation_for_each_answer(env):
    result = get(env.step.remote(says(*(c[0] for c in CASES)), truths(*(c[1] for c in CASES)), True))
    assert result.rewards.tolist() == [case[2] for case in CASES]
    assert result.observations[0] == {"role": "environment", "content": "Environment: correct"}
    assert result.observations[1]["content"] == "Environment: incorrect"
    assert result.terminateds.tolist() == [1.0] * len(CASES) and result.rewards.dtype == torch.float32
    assert result.answers[0] == "42" and result.answers[CASES.index(("", "3", 0))] is None
    assert env.step(says("1"), truths("1")).answers is None


def test_math_answer_is_read_from_all_assistant_messages(env):
    log = [{"role": "assistant", "content": r"\boxed{1"}, {"role": "user", "content": "go on"}]
    log.append({"role": "assistant", "content": "2}"})
    assert env.step([log], truths("12")).rewards.tolist() == [1.0]


def test_math_environment_counts_unparsable_ground_truths(env):
    """math-verify raises for a ground truth without a value, and this error is not the response's."""
    env.pop_metrics()
    env.step(says(r"\boxed{10}", r"\boxed{None}", "10", r"\boxed{3}"), truths("", None, "}", "3"))
    assert env.pop_metrics() == {"verifier_timeouts": 0, "verifier_unmatchable_truths": 3}
    assert env.step(says(r"\boxed{None}", r"\boxed{3}"), truths(None, "3")).rewards.tolist() == [0.0, 1.0]
    assert env.pop_metrics()["verifier_unmatchable_truths"] == 1, "counted anew after each report"
    env.step(says("nothing", r"\boxed{\frac{}}"), truths("3", "3"))
    assert "verifier_unmatchable_truths" not in env.pop_metrics(), "a response that cannot be read is no truth"


@pytest.mark.parametrize("verifier, truth, right", [
    (EnglishMultichoiceVerifyWorker, "B", "Answer: B"), (MultilingualMultichoiceVerifyWorker, "B", "答案：B"),
    (EnglishMultichoiceVerifyWorker, "**B**", "Answer: B"),
])  # fmt: skip
def test_multiple_choice_ground_truth_that_is_not_a_letter_is_counted_as_unparsable(verifier, truth, right):
    verdicts = [verifier().verify(right, each) for each in (truth, "(B) two", "")]
    assert [score for score, _, _ in verdicts] == [1.0, 0.0, 0.0]
    assert [unmatchable for _, _, unmatchable in verdicts] == [False, True, True]


def test_dapo_verifier_scores_every_response_zero_if_the_ground_truth_is_empty():
    worker, dapo = HFVerifyWorker(), {"math_verify_impl": "dapo_math_verify"}
    assert worker.verify("Answer: units", "", **dapo) == (0.0, None, True)
    assert worker.verify("Answer: 3", "3", **dapo) == (1.0, "3", False)


@pytest.mark.parametrize(("answer", "normal"), [
    ("x = 12", "12"), ("$\\frac12$", "\\frac{1}{2}"), ("\\sqrt3", "\\sqrt{3}"), ("1,234", "1234"),
    ("1,2,x", "1,2,x"), ("\\text{abc}", "abc"), ("\\boxed{5}", "5"), ("so $7$ it is", "7"), ("12 inches", "12"),
    ("90^\\circ", "90"), ("a 5", "5"), ("\\$100", "100"), ("\\textbf{B}", "B"), ("\\overline{AB}", "AB"),
    ("(3,\\!4)", "(34)"), ("", ""),
])  # fmt: skip
def test_normalize_final_answer_removes_units_latex_and_thousands_separators(answer, normal):
    assert verifiers.normalize_final_answer(answer) == normal


def test_dapo_verifier_scores_the_last_answer_line_near_the_end_of_the_response():
    assert verifiers.judge("Answer: 1\nAnswer: $2$", "2") == (True, "2")
    assert verifiers.judge("answer : 3 units", "3") == (True, "3")
    assert verifiers.judge("it is 3", "3") == (False, "[INVALID]")
    assert verifiers.judge("Answer: 5\n" + "z" * 300, "5") == (False, "[INVALID]")


def test_fast_path_for_plain_numbers_agrees_with_math_verify():
    worker = HFVerifyWorker()
    rng = random.Random(0)
    words = [
        "the answer", "is", "12", "=", "-3", "1/2", "so", "50%", "Final", "x", "3.5", "\n", "(2)", "answer: 9", "and",
        "#",
    ]  # fmt: skip
    taken = 0
    for _ in range(400):
        number = str(rng.choice([0, 1, -1, 7, 12, -45, 10**8, rng.randint(-(10**9) + 1, 10**9 - 1)]))
        truth = number if rng.random() < 0.5 else str(rng.randint(-50, 50))
        before = " ".join(rng.choices(words, k=rng.randint(0, 8)))
        after = " ".join(rng.choices(words, k=rng.randint(0, 8)))
        text = f"{before} \\boxed{{{number}}} {after}"
        verdict = worker.shortcut(text, truth)
        if verdict is not None:
            taken += 1
            assert (*verdict, False) == worker.verify(text, truth), (text, truth)
    assert taken > 300


@pytest.mark.parametrize(("text", "truth"), [
    (r"\boxed{1} $2$", "1"), (r"\boxed{1} \boxed{2}", "1"), (r"\boxed{01}", "1"), (r"\boxed{1}", "1.0"),
    (r"final answer is 3 \boxed{1}", "1"), (r"\boxed{1{2}}", "1"), (r"\[ \boxed{1} \]", "1"), ("1", "1"),
])  # fmt: skip
def test_fast_path_for_plain_numbers_leaves_ambiguous_answers_to_math_verify(text, truth):
    assert HFVerifyWorker.shortcut(text, truth) is None


def test_math_environment_scores_with_the_configured_verifier():
    for cfg, text, truth, wrong in [
        ({"math_verify_impl": "dapo_math_verify"}, "Answer: $3$", "3", "4"),
        ({"verifier_type": "english_multichoice"}, "Answer: b", "b", "C"),
        ({"verifier_type": "multilingual_multichoice"}, "答案：Ｃ", "C", "D"),
    ]:
        env = MathEnvironment({"num_workers": 1, **cfg})
        result = env.step(says(text, text), truths(truth, wrong), return_extracted_answer=True)
        assert result.rewards.tolist() == [1.0, 0.0] and result.answers == [truth, truth]
        env.shutdown()


def test_english_multiple_choice_verifier_reads_the_letter_after_the_word_answer():
    worker = EnglishMultichoiceVerifyWorker()
    texts = ["Answer: A", "**Answer**: B and Answer: C", "answer : $\\boxed{D}$", "A", "Answer:\nA"]
    verdicts = [worker.judge(text, truth) for text, truth in zip(texts, ["A", "B", "D", "A", "A"])]
    assert verdicts == [(1, "A"), (1, "B"), (1, "D"), (0, None), (0, None)]


def test_multilingual_multiple_choice_verifier_reads_the_letter_after_the_localised_word_answer():
    worker = MultilingualMultichoiceVerifyWorker()
    texts = ["Antwort: C", "Respuesta: D", "الإجابة: ب", "উত্তর: অ", "回答：Ｄ", "Réponse : B", "Jibu: A", "E"]
    scores = [worker.judge(text, truth)[0] for text, truth in zip(texts, ["C", "D", "B", "A", "D", "B", "A", "E"])]
    assert scores == [1, 1, 1, 1, 1, 1, 1, 0]


def test_calling_math_verify_outside_the_main_thread_is_an_error():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(HFVerifyWorker().verify, "1", "1").result()


def test_invalid_math_environment_settings_are_errors():
    with pytest.raises(ValueError, match="verifier_type"):
        MathEnvironment({"num_workers": 1, "verifier_type": "physics"})
    with pytest.raises(ValueError, match="math_verify_impl"):
        MathEnvironment.remote({"num_workers": 1, "math_verify_impl": "mine"})
    with pytest.raises(ValueError, match="num_workers"):
        MathEnvironment({"num_workers": 0})
