"""Teachers: frozen models that compute log-probabilities of the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.models.interfaces import PolicyInterface
from nemo_rl_cpp.models.model_folder import TINY_RANDOM
from nemo_rl_cpp.models.policy.micro_batches import wanted_tokens
from nemo_rl_cpp.rollouts.batches import Rollouts, TrainBatch


def check_vocabulary(tokenizer: TokenizerType, teacher: str, key: str) -> None:
    """Raise ValueError unless teacher and policy have the same vocabulary, because the teacher gets the policy's token
    ids.
    """
    if teacher == TINY_RANDOM:  # tiny-random has no tokenizer
        return
    if Tokenizer.from_pretrained(teacher, section=key).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{key}: {teacher} has another vocabulary than policy.tokenizer.name {tokenizer.name_or_path}; a teacher scores the policy's "
            "tokens, so take a model of the same family"
        )


class NoTeacher:
    """A placeholder in a run without a teacher. It adds nothing to the batch."""

    def add_logprobs(self, batch: TrainBatch, samples: Rollouts) -> None:
        pass


@dataclass
class Teachers:
    """Teachers inside the policy's workers. The task of a sample determines its teacher.

    Attributes:
        policy: holds the teachers' weights alongside its own, by model name.
        models: teacher name -> model name.
        default: the teacher of tasks that have no entry in `models`; None: such a task raises ValueError.
    """

    policy: PolicyInterface
    models: Mapping[str, str]
    default: str | None

    def add_logprobs(self, batch: TrainBatch, samples: Rollouts) -> None:
        """Add `teacher_logprobs` [T] to the batch, 0 on untrained tokens. Raise ValueError for a task without a
        teacher.
        """
        scored = torch.zeros(batch.num_tokens)
        for model, own in self._chosen(batch, samples):
            scored = scored + batch.ragged(self.policy.get_teacher_logprobs(own, model)["teacher_logprobs"])
        batch.teacher_logprobs = scored

    def _chosen(self, batch: TrainBatch, samples: Rollouts) -> list[tuple[str, TrainBatch]]:
        """Return, for each teacher, (its model, a copy of the batch in which the samples of all other teachers are
        masked).
        """
        chosen = []
        for task in samples.get("task_name") or [None] * batch.size:
            name = task if task in self.models else self.default
            if name is None:
                raise ValueError(
                    f"the task {task} has no teacher; on_policy_distillation.teacher_model_by_agent_name has {', '.join(self.models)}: add "
                    "it there, or set on_policy_distillation.default_teacher_alias"
                )
            chosen.append(self.models[name])
        parts = []
        for model in sorted(set(chosen)):
            own = batch.copy()
            own.samples["sample_mask"] = batch.sample_mask * torch.tensor([name == model for name in chosen])
            parts.append((model, own))
        return parts


@dataclass
class OutsideTeacher:
    """One teacher for all tasks, which runs outside the native core.

    Attributes:
        score: a function that takes rows of token ids and returns the log-probability of each token given those before
            it.
    """

    score: Callable[[Sequence[list[int]]], Sequence[Sequence[float]]]

    def add_logprobs(self, batch: TrainBatch, samples: Rollouts) -> None:
        """Add `teacher_logprobs` [T] to the batch, 0 on untrained tokens."""
        wanted, scored = wanted_tokens(batch), torch.zeros(batch.num_tokens)
        asked = [row for row, own in enumerate(batch.rows(wanted)) if own.any()]
        ids, places = batch.rows(batch.input_ids), batch.rows(scored)  # views
        for row, values in zip(asked, self.score([ids[row].tolist() for row in asked]), strict=True):
            places[row].copy_(torch.tensor(values))
        batch.teacher_logprobs = torch.where(wanted, scored, 0.0)


@dataclass
class TopKTeachers(Teachers):
    """Teachers that compute log-probabilities of `k` candidate tokens at the position of each sampled token: the k most
    likely tokens of the student if `of_student`, otherwise those of the teacher.
    """

    k: int = 1
    of_student: bool = False

    def add_logprobs(self, batch: TrainBatch, samples: Rollouts) -> None:
        """Add `candidate_ids` int64 [T, k] and `candidate_teacher_logprobs` [T, k] to the batch, 0 on untrained tokens.
        Raise ValueError for a task without a teacher.
        """
        ids = torch.zeros(batch.num_tokens, self.k, dtype=torch.int64)
        logprobs = torch.zeros(batch.num_tokens, self.k)
        if self.of_student:
            ids = self.policy.get_topk_logprobs(batch, self.k)["ids"]
        for model, own in self._chosen(batch, samples):
            asked = own.copy()
            if self.of_student:
                asked.tokens["candidate_ids"] = ids
            scored = self.policy.get_topk_logprobs(asked, self.k, model)
            logprobs = logprobs + scored["logprobs"]
            ids = ids if self.of_student else ids + scored["ids"]
        batch.tokens["candidate_ids"], batch.tokens["candidate_teacher_logprobs"] = ids, logprobs
