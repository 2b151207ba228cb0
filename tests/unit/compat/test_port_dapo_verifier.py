import pytest
from nemo_rl_cpp.compat.environments import dapo_math_verifier as dapo


def test_boxes():
    assert dapo.last_boxed_only_string("\\boxed{1} and \\boxed{\\frac{1}{2}} end") == "\\boxed{\\frac{1}{2}}"
    assert dapo.last_boxed_only_string("\\boxed{1") is None
    assert dapo.last_boxed_only_string("nothing") is None
    assert dapo.remove_boxed("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    with pytest.raises(AssertionError):
        dapo.remove_boxed("1")


def test_minerva_takes_the_last_answer():
    assert dapo.is_correct_minerva("Answer: 1\nAnswer: $2$", "2") == (True, "2")
    assert dapo.is_correct_minerva("answer : 3 units", "3") == (True, "3")
    assert dapo.is_correct_minerva("it is 3", "3") == (False, "[INVALID]")
    assert dapo.is_correct_minerva("it is 3", "[INVALID]")[0]  # the rule as NeMo RL has it
    assert dapo.is_correct_minerva("Answer: 4", "so \\boxed{4}", gt_need_extract=True) == (True, "4")


def test_strict_boxes():
    assert dapo.is_correct_strict_box("\\boxed{4}", "4") == (1, "4")
    assert dapo.is_correct_strict_box("\\boxed{4}" + " " * 100, "4") == (-1, None)
    assert dapo.is_correct_strict_box("\\boxed{4 }", "4") == (-1, "4 ")
    text = "x" * 150 + "\\boxed{4}" + "y" * 150
    assert dapo.is_correct_strict_box(text, "4", [0, 0, 0, 200]) == (1, "4")
    assert dapo.verify("\\boxed{4}", "4", strict_box_verify=True) == (True, "4")


def test_score_looks_at_the_end_only():
    assert dapo.compute_score("Answer: 5", "5") == {"score": 1.0, "acc": True, "pred": "5"}
    assert dapo.compute_score("Answer: 5\n" + "z" * 300, "5") == {"score": 0.0, "acc": False, "pred": "[INVALID]"}
    assert dapo.compute_score("\\boxed{5}", "6", strict_box_verify=True)["score"] == 0.0
