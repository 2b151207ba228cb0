"""Teachers: frozen models that compute log-probabilities of the tokens that the policy sampled. They run in the
policy's workers, on a server, or as a transformers model."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.models.interfaces import PolicyInterface
from nemo_rl_cpp.models.model_folder import TINY_RANDOM
from nemo_rl_cpp.models.policy.micro_batches import wanted_tokens
from nemo_rl_cpp.rollouts.batches import Rollouts, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_vocabulary(tokenizer: TokenizerType, teacher: str, key: str) -> None:
    """Raise ValueError, naming the key `key`, unless the teacher (a model name or folder) has the policy's vocabulary,
    because teachers score the policy's token ids."""
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
    """Frozen teachers inside the policy's workers. Each sample is scored by the teacher of its task."""

    policy: PolicyInterface  # holds the teachers' weights alongside its own, by model name
    models: Mapping[str, str]  # teacher name -> model name
    default: str | None  # the teacher of tasks that have no entry in `models`; None: such a task raises ValueError

    def add_logprobs(self, batch: TrainBatch, samples: Rollouts) -> None:
        """Add `teacher_logprobs` [T] to the batch, 0 on untrained tokens. Raise ValueError if a task has no teacher."""
        scored = torch.zeros(batch.num_tokens)
        for model, own in self._chosen(batch, samples):
            scored = scored + batch.ragged(self.policy.get_teacher_logprobs(own, model)["teacher_logprobs"])
        batch.teacher_logprobs = scored

    def _chosen(self, batch: TrainBatch, samples: Rollouts) -> list[tuple[str, TrainBatch]]:
        """Return (model name, copy of the batch with the samples of all other teachers masked) for each teacher."""
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
    """One teacher for all tasks, which runs on a server or as a transformers model."""

    # a function that takes rows of token ids and returns the log-probability of each token given those before it
    score: Callable[[Sequence[list[int]]], Sequence[Sequence[float]]]

    def add_logprobs(self, batch: TrainBatch, samples: Rollouts) -> None:
        """Add `teacher_logprobs` [T], the teacher's scores, to the batch; 0 on untrained tokens."""
        wanted, scored = wanted_tokens(batch), torch.zeros(batch.num_tokens)
        asked = [row for row, own in enumerate(batch.rows(wanted)) if own.any()]
        ids, places = batch.rows(batch.input_ids), batch.rows(scored)  # views
        for row, values in zip(asked, self.score([ids[row].tolist() for row in asked]), strict=True):
            places[row].copy_(torch.tensor(values))
        batch.teacher_logprobs = torch.where(wanted, scored, 0.0)


@dataclass
class TopKTeachers(Teachers):
    """Teachers that score `k` candidate tokens at the position of each sampled token: the k most likely tokens of the
    student there if `of_student`, otherwise those of the teacher."""

    k: int = 1
    of_student: bool = False

    def add_logprobs(self, batch: TrainBatch, samples: Rollouts) -> None:
        """Add `candidate_ids` int64 [T, k] and `candidate_teacher_logprobs` [T, k], both 0 on untrained tokens."""
        ids = torch.zeros(batch.num_tokens, self.k, dtype=torch.int64)
        logprobs = torch.zeros(batch.num_tokens, self.k)
        if self.of_student:
            ids = self.policy.get_topk_logprobs(batch, self.k)["ids"]
        for model, own in self._chosen(batch, samples):
            if self.of_student:
                own.tokens["candidate_ids"] = ids
            scored = self.policy.get_topk_logprobs(own, self.k, model)
            logprobs = logprobs + scored["logprobs"]
            ids = ids if self.of_student else ids + scored["ids"]
        batch.tokens["candidate_ids"], batch.tokens["candidate_teacher_logprobs"] = ids, logprobs


_ROWS, _REQUESTS = 8, 8  # rows per request, and concurrent requests


class ServerTeacher:
    """A teacher on a server that returns `prompt_logprobs` from `/v1/completions`, such as `vllm serve` or `nemo-rl-cpp
    serve`. `base_url` ends with `/v1`; `model` is the server's name of the model. Raises ValueError if the variable
    `api_key_env` (None: no key) is not set."""

    timeout_s = 600.0

    def __init__(self, base_url: str, model: str, api_key_env: str | None = None) -> None:
        self.url, self.model = base_url.rstrip("/") + "/completions", model
        self.headers = {"content-type": "application/json"}
        if api_key_env is not None:
            if api_key_env not in os.environ:
                raise ValueError(f"teacher.api_key_env names {api_key_env}, which the environment lacks: set it")
            self.headers["authorization"] = f"Bearer {os.environ[api_key_env]}"

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probability at temperature 1 of each token of each row; 0 for the first. Raise ValueError if
        the server rejects the request or sends no log-probabilities, RuntimeError if it does not answer."""
        parts = [rows[begin : begin + _ROWS] for begin in range(0, len(rows), _ROWS)]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            return [row for part in pool.map(self._ask, parts) for row in part]

    def _ask(self, rows: Sequence[list[int]]) -> list[list[float]]:
        body = {"model": self.model, "prompt": list(rows), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), self.headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                choices = json.load(answer)["choices"]
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise ValueError(f"teacher.base_url: {self.url} answered with status {error.code}: {said}") from None
        except OSError as error:
            raise RuntimeError(f"teacher.base_url: {self.url} does not answer: {error}") from None
        by_index = {choice["index"]: choice.get("prompt_logprobs") for choice in choices}
        return [list(self._of_row(ids, by_index.get(k))) for k, ids in enumerate(rows)]

    def _of_row(self, ids: list[int], entries: list[dict[str, dict[str, float]] | None] | None) -> Iterator[float]:
        if entries is None or len(entries) != len(ids):
            raise ValueError(
                f"teacher.base_url: {self.url} sends no prompt_logprobs for the {len(ids)} token ids of a prompt: take a server that "
                "does, as vLLM"
            )
        yield 0.0
        for token, entry in zip(ids[1:], entries[1:], strict=True):
            yield entry[str(token)]["logprob"]


class HfTeacher:
    """A teacher that is a frozen transformers model, for architectures that the native core does not support: a folder,
    or a name on the Hub, with weights of the dtype `precision`. `temperature` divides the logits."""

    def __init__(self, model_name: str, precision: str, temperature: float, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.temperature, self.device = temperature, device
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, precision))
        self.model.to(device).eval()

    @torch.no_grad()
    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        scored = []
        for ids in (torch.tensor([row], device=self.device) for row in rows):
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float() / self.temperature
            scored.append([0.0, *torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()])
        return scored
