import pytest
from nemo_rl_cpp.environments import verifiers as dapo


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("x = 12", "12"), ("$\\frac12$", "\\frac{1}{2}"), ("\\sqrt3", "\\sqrt{3}"), ("1,234", "1234"),
        ("1,2,x", "1,2,x"), ("\\text{abc}", "abc"), ("\\boxed{5}", "5"), ("so $7$ it is", "7"), ("12 inches", "12"),
        ("90^\\circ", "90"), ("a 5", "5"), ("\\$100", "100"), ("\\textbf{B}", "B"), ("\\overline{AB}", "AB"),
        ("(3,\\!4)", "(34)"), ("", ""),
    ],
)  # fmt: skip
def test_final_answer_is_normalized_as_expected(answer, normal):
    assert dapo.normalize_final_answer(answer) == normal


def test_dapo_verifier_scores_the_last_answer_line_near_the_end():
    assert dapo.judge("Answer: 1\nAnswer: $2$", "2") == (True, "2")
    assert dapo.judge("answer : 3 units", "3") == (True, "3")
    assert dapo.judge("it is 3", "3") == (False, "[INVALID]")
    assert dapo.judge("Answer: 5\n" + "z" * 300, "5") == (False, "[INVALID]")
