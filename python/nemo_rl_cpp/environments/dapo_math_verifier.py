"""DAPO's rule for right and wrong: the text after the last "Answer:", normalised, equals the normalised truth.

The normalisation is that of Minerva's evaluation (Lewkowycz et al., "Solving Quantitative Reasoning Problems with
Language Models", 2022, appendix D). No torch, no sympy: cheap, and safe on any text.
"""

import re

ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
INVALID = "[INVALID]"
LOOKED_AT = 300  # characters at the end of a response; an answer further up does not count

SUBSTITUTIONS = [
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
]

_REMOVED_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
).split()

REMOVED_EXPRESSIONS = _REMOVED_WORDS + [
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    "\\dots",
]

_REWRITES = [
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),  # what stands between dollar signs
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),  # \frac12 -> \frac{1}{2}
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
]


def normalize_final_answer(final_answer: str) -> str:
    """An answer without units, articles, spaces and LaTeX dress, with shorthand fractions and roots written out."""
    answer = final_answer.split("=")[-1]
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in REMOVED_EXPRESSIONS:
        answer = answer.replace(expression, "")
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def judge(response: str, ground_truth: str) -> tuple[bool, str]:
    """(whether the last answer among the last 300 characters of a response equals the truth, the normalised answer).

    Without one the answer is "[INVALID]".
    """
    found = re.findall(ANSWER_PATTERN, response[-LOOKED_AT:])
    answer = normalize_final_answer(found[-1] if found else INVALID)
    return answer == normalize_final_answer(ground_truth), answer
