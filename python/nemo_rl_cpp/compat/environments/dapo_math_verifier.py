"""DAPO's rule for right and wrong: the text after the last "Answer:", normalised, equals the normalised truth."""

from nemo_rl_cpp.environments.dapo_math_verifier import (
    ANSWER_PATTERN,
    INVALID,
    REMOVED_EXPRESSIONS,
    SUBSTITUTIONS,
    compute_score,
    is_correct_minerva,
    is_correct_strict_box,
    last_boxed_only_string,
    normalize_final_answer,
    remove_boxed,
    verify,
)

__all__ = [
    "ANSWER_PATTERN",
    "INVALID",
    "REMOVED_EXPRESSIONS",
    "SUBSTITUTIONS",
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "verify",
]
