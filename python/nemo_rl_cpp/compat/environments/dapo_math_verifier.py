"""DAPO's rule for right and wrong: the text after the last "Answer:", normalised, equals the normalised truth."""

import re

from nemo_rl_cpp.environments.dapo_math_verifier import (
    ANSWER_PATTERN,
    INVALID,
    LOOKED_AT,
    REMOVED_EXPRESSIONS,
    SUBSTITUTIONS,
    normalize_final_answer,
)

_LOOKED_AT_STRICT = 100


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` with matching braces, as written; None if there is none or it is not closed."""
    start = string.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start, len(string)):
        depth += (string[i] == "{") - (string[i] == "}")
        if string[i] == "}" and depth == 0:
            return string[start : i + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""The content of `\boxed{...}`. Raises AssertionError when `s` is anything else."""
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise AssertionError(f"not a \\boxed{{...}}: {s!r}")
    return s[len("\\boxed{") : -1]


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> tuple[bool, str]:
    r"""(whether the last match of `answer_pattern` equals the truth, the normalised answer).

    `gt_need_extract`: the truth stands in the last `\boxed{...}` of `gt`. Without a match the answer is "[INVALID]".
    """
    found = re.findall(answer_pattern, solution_str)
    answer = normalize_final_answer(found[-1] if found else INVALID)
    if gt_need_extract:
        boxed = last_boxed_only_string(gt)
        if boxed is None:
            raise ValueError(f"gt_need_extract: there is no \\boxed{{...}} in the ground truth {gt!r}")
        gt = remove_boxed(boxed)
    return answer == normalize_final_answer(gt), answer


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    r"""(1 or -1, content of the last `\boxed{...}` among the last 100 characters); compared as it is written.

    `pause_tokens_index`: four positions; the text from 100 characters before the last of them counts.
    """
    if pause_tokens_index is not None:
        if len(pause_tokens_index) != 4:
            raise AssertionError(f"pause_tokens_index needs 4 positions, not {len(pause_tokens_index)}")
        pred = pred[pause_tokens_index[-1] - _LOOKED_AT_STRICT :]
    else:
        pred = pred[-_LOOKED_AT_STRICT:]
    boxed = last_boxed_only_string(pred)
    answer = None if boxed is None else remove_boxed(boxed)
    return (1 if answer == gt else -1), answer


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """(right or wrong, the answer found), by `is_correct_strict_box` or `is_correct_minerva`."""
    if strict_box_verify:
        score, found = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, found
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, float | str | None]:
    """{"score": 1.0 or 0.0, "acc": bool, "pred": the answer found}, from the last 300 characters of the response."""
    right, found = verify(solution_str[-LOOKED_AT:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if right else 0.0, "acc": right, "pred": found}
