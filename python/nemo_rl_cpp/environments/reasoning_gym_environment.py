"""An environment for tasks of the package reasoning_gym, which scores responses with the package's scorers."""

import importlib.util
import re
from typing import NotRequired, TypedDict

import torch

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import ReasoningGymEnvConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.single_turn import VerifyingEnvironment, assistant_text
from nemo_rl_cpp.environments.verifiers import GymEntry, ReasoningGymVerifyWorker

_NEXT_QUESTION = "\n\nQuestion:"  # ends a multi-line answer in the data set `reasoning_gym`
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(text: str, answer_format: str = "auto", several_lines: bool = False) -> str:
    """Return the answer in a response: the text in the last `<answer>...</answer>` ("tag", "" without one), or the
    first nonempty line ("line"). "auto" selects "tag" if there are tags, otherwise "line", or with `several_lines`
    everything up to the next question of a few-shot prompt."""
    tagged = _TAGGED.findall(text) if answer_format in ("auto", "tag") else []
    if tagged:
        return tagged[-1].strip()
    if answer_format == "tag":
        return ""
    if several_lines and answer_format == "auto":
        return text.partition(_NEXT_QUESTION)[0].strip()
    return text.strip().partition("\n")[0].strip()


class ReasoningGymMetadata(TypedDict):
    """The entries of a sample's metadata that the environment reads: the data set's entry, and the task's name."""

    reasoning_gym_entry: GymEntry
    reasoning_gym_task: NotRequired[str]


class ReasoningGymEnvironment(VerifyingEnvironment[ReasoningGymMetadata]):
    """An environment whose reward is reasoning_gym's score of the answer, in [0, 1]."""

    scores_rows_alone = True

    def __init__(self, cfg: ReasoningGymEnvConfig | None = None) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ImportError("the reasoning_gym environment needs the package: pip install 'nemo-rl-cpp[gym]'")
        self.cfg = as_model(cfg or {}, ReasoningGymEnvConfig, "env.reasoning_gym")
        self._format = self.cfg.answer_format
        super().__init__(ReasoningGymVerifyWorker, self.cfg)

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[ReasoningGymMetadata]
    ) -> EnvironmentReturn[ReasoningGymMetadata]:
        rows_of: dict[str, list[int]] = {}
        texts = []
        for row, info in enumerate(metadata):
            if "reasoning_gym_entry" not in info:
                raise ValueError(f"extra_env_info needs 'reasoning_gym_entry' to score by, but has only {sorted(info)}")
            answer = info["reasoning_gym_entry"].get("answer")  # None for tasks without a reference answer
            several_lines = answer is None or "\n" in str(answer).strip()
            texts.append(extract_answer(assistant_text(message_log_batch[row]), self._format, several_lines))
            name = info.get("reasoning_gym_task") or info["reasoning_gym_entry"]["metadata"]["source_dataset"]
            rows_of.setdefault(name, []).append(row)
        scores = torch.zeros(len(texts))
        for name, rows in rows_of.items():
            entries = [metadata[row]["reasoning_gym_entry"] for row in rows]
            verdicts = self._verify([texts[row] for row in rows], entries, task=name)
            scores[rows] = torch.tensor(verdicts.scores)
        return self._finish(scores, metadata, answers=list(texts))
