"""Verifiers, which score a response against its ground truth, in this process or in the verifier pool."""

import contextlib
import io
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar, TypedDict

ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
INVALID = "[INVALID]"
LOOKED_AT = 300  # only these last characters of a response are searched for an answer

SUBSTITUTIONS = [
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
]  # fmt: skip

_REMOVED_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
).split()

REMOVED_EXPRESSIONS = _REMOVED_WORDS + [
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ",
    r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
]  # fmt: skip

_REWRITES = [
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),  # text between dollar signs
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),  # \frac12 -> \frac{1}{2}
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
]


def normalize_final_answer(final_answer: str) -> str:
    r"""Return an answer without units, articles, spaces and decoration; arguments of \frac and \sqrt get braces."""
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
    """Return (whether the response is correct, normalised answer). The answer is the line after the last "Answer:" in
    the response's last 300 characters, or "[INVALID]". It is correct if it equals the normalised ground truth."""
    found = re.findall(ANSWER_PATTERN, response[-LOOKED_AT:])
    answer = normalize_final_answer(found[-1] if found else INVALID)
    return answer == normalize_final_answer(ground_truth), answer


Verdict = tuple[float, str | None]
_LONGEST_EXTRACTED = 1000  # an extracted answer is truncated to this many characters


class VerifierUseError(ValueError):
    """Raised if the verifier is used incorrectly: the error is the caller's, not the response's."""


class UnmatchableTruthError(ValueError):
    """Raised if no response can be correct, because the ground truth has nothing to compare a response with."""


class VerifierBase(ABC):
    """The base class of verifiers, which score responses one by one."""

    # the exceptions that give score 0; a library's timeout may not be an Exception
    caught: tuple[type[BaseException], ...] = (Exception,)

    @abstractmethod
    def judge(self, response: str, ground_truth: str, **kwargs: object) -> Verdict:
        """Return (score, extracted answer or None) for one response."""

    def verify(self, response: str, ground_truth: str, **kwargs: object) -> tuple[float, str | None, bool]:
        """Return (score, extracted answer or None, whether no response can match). If `judge` raises an exception other
        than VerifierUseError, the score is 0."""
        try:
            return *self.judge(response, ground_truth, **kwargs), False
        except VerifierUseError:
            raise
        except UnmatchableTruthError:
            return 0.0, None, True
        except self.caught:
            return 0.0, None, False


class HFVerifyWorker(VerifierBase):
    r"""A verifier for mathematics. `math_verify_impl` is "hf_math_verify" or "dapo_math_verify" (the function `judge`).

    hf_math_verify is the package math-verify. The ground truth, wrapped in `\boxed{}`, is parsed as LaTeX, the response
    as LaTeX or as a plain expression; several boxes are compared as a set. math-verify's time limits need the main
    thread; on other threads use MathEnvironment."""

    _metric: Callable[..., tuple[float, tuple[list[str], list[str]] | None]] | None = None

    def judge(self, response: str, ground_truth: str, math_verify_impl: str = "hf_math_verify") -> Verdict:
        if not ground_truth.strip():
            raise UnmatchableTruthError("the truth is empty")
        if math_verify_impl == "dapo_math_verify":
            right, answer = judge(response, ground_truth)
            return float(right), answer
        if threading.current_thread() is not threading.main_thread():
            # math-verify's time limit uses signals; on other threads it would silently give every response score 0
            raise VerifierUseError("hf_math_verify runs in the main thread only: use MathEnvironment")
        if self._metric is None:
            self._load()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                score, extracted = self._metric(["\\boxed{" + ground_truth + "}"], [response])
        except ValueError as error:
            if "No gold targets" in str(error):
                raise UnmatchableTruthError(f"math-verify finds nothing in the truth {ground_truth!r}") from None
            raise
        if extracted is None or not extracted[1]:
            return float(score), None
        golds, predictions = extracted
        answer = next((prediction for prediction in predictions if prediction in golds), predictions[0])
        return float(score), answer[:_LONGEST_EXTRACTED]

    def _load(self) -> None:
        from math_verify.errors import TimeoutException
        from math_verify.metric import math_metric
        from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        self.caught = (Exception, TimeoutException)
        self._metric = math_metric(
            gold_extraction_target=(LatexExtractionConfig(),),
            pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
        )

    def warm_up(self, math_verify_impl: str = "hf_math_verify") -> None:
        """Load the packages that `math_verify_impl` needs, so that they do not delay the first response."""
        self.judge("\\boxed{1}", "1", math_verify_impl)

    @staticmethod
    def shortcut(response: str, ground_truth: str, math_verify_impl: str = "hf_math_verify") -> Verdict | None:
        r"""Return the verdict without a worker process if the ground truth is an integer, and the only LaTeX of the
        response is one `\boxed{integer}`, because the verdict is then certain. Otherwise return None."""
        if math_verify_impl != "hf_math_verify" or not _PLAIN_INTEGER.fullmatch(ground_truth):
            return None
        if len(response) > 100_000 or response.count("\\") != 1 or response.count("{") != 1 or response.count("}") != 1:
            return None
        boxed = _BOXED_INTEGER.search(response)
        if boxed is None or _OTHER_EXTRACTIONS.search(response):
            return None
        return float(boxed[1] == ground_truth), boxed[1]


_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,8}")
_BOXED_INTEGER = re.compile(r"\\boxed\{(0|-?[1-9][0-9]{0,8})\}")
# Text that math-verify may parse before or instead of a box: other LaTeX, and a number after "final answer".
_OTHER_EXTRACTIONS = re.compile(r"[$\[\]]|final\s+answer", re.IGNORECASE)


_DRESS = [
    "**", "$\\boxed{", "}$", "\\$", "$\\text{", "$", "\\mathrm{", "\\{", "\\text", "\\(", "\\mathbf{", "{", "\\boxed",
]  # fmt: skip

_LETTERS = {"A": "أاঅＡ", "B": "بবＢ", "C": "جসＣ", "D": "دডＤ"}
_TO_LATIN = {foreign: latin for latin, others in _LETTERS.items() for foreign in others}

# "answer" with its colon; the first match is used, so a longer form precedes the forms that it contains
_ANSWER_WORDS = (
    r"Answer\s*:|উত্তর\s*:|উত্তরঃ|उत्तर\s*:|Antwort\s*:|답변\s*:|정답\s*:|답\s*:|答案\s*[：:]|"
    r"答复\s*[：:]|答曰\s*[：:]|回答\s*[：:]|答え\s*[：:]|答\s*[：:]|الإجابة النهائية\s*:|"
    r"الإجابة الصحيحة\s*:|الإجابة هي\s*:|الإجابة\s*:|الجواب النهائي\s*:|الجواب\s*:|"
    r"إجابة\s*:|Respuesta\s*:|Risposta\s*:|Resposta\s*:|Réponse\s*:|Jawaban\s*:|Jibu\s*:|"
    r"Idahun\s*:|Ìdáhùn\s*:|Idáhùn\s*:|Àmọ̀nà\s*:|Àdáhùn\s*:|Ànúgọ\s*:|Àṣàyàn\s*:"
).split("|")


def normalize_response(response: str) -> str:
    """Return the response without Markdown stars and without the LaTeX that often surrounds letters."""
    for dress in _DRESS:
        response = response.replace(dress, "")
    return response


class MultilingualMultichoiceVerifyWorker(VerifierBase):
    """A verifier for multiple choice in many languages. A response is correct if the letter A-D (also in Arabic,
    Bengali or full-width form) after a word for "answer" equals the ground truth."""

    _patterns = [re.compile(f"{word}[ \t]*([A-D]|[{''.join(_TO_LATIN)}])", re.IGNORECASE) for word in _ANSWER_WORDS]

    def judge(self, response: str, ground_truth: str, **kwargs: object) -> Verdict:
        truth, text = normalize_response(ground_truth), normalize_response(response)
        if len(truth) != 1:  # every extracted answer is a single character
            raise UnmatchableTruthError(f"the truth {ground_truth!r} is no letter of an option")
        found = next((match for pattern in self._patterns if (match := pattern.search(text))), None)
        answer = _TO_LATIN.get(found[1], found[1]) if found else None
        return float(answer == truth), answer


class EnglishMultichoiceVerifyWorker(MultilingualMultichoiceVerifyWorker):
    """A verifier for multiple choice: the letter after the first "Answer:" must equal the ground truth."""

    _patterns = [re.compile(r"Answer\s*:[ \t]*([A-Z])", re.IGNORECASE)]


class GymEntry(TypedDict):
    """A question of a reasoning_gym task and its answer: None if responses are checked without a reference answer."""

    question: str
    answer: str | None
    metadata: dict[str, str]


class ReasoningGymVerifyWorker(VerifierBase):
    """A verifier that scores responses with reasoning_gym; `ground_truth` is the question's entry in the data set."""

    _scorers: ClassVar[dict[str, Callable[..., float]]] = {}

    def warm_up(self, **kwargs: object) -> None:
        import_module("reasoning_gym")

    def judge(self, response: str, ground_truth: GymEntry, task: str | None = None) -> Verdict:
        import reasoning_gym

        name = task or ground_truth["metadata"]["source_dataset"]
        if name not in self._scorers:
            if name not in reasoning_gym.factory.DATASETS:
                raise VerifierUseError(f"reasoning_gym has no task {name!r}")
            self._scorers[name] = reasoning_gym.get_score_answer_fn(name)
        return float(self._scorers[name](response, ground_truth)), response[:_LONGEST_EXTRACTED]
