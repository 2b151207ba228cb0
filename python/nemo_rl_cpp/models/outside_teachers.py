"""Teachers outside the native core: a server that scores token ids, and a transformers model."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS, _REQUESTS = 8, 8  # rows per request, and concurrent requests


class ServerTeacher:
    """A teacher on a server that returns `prompt_logprobs` from `/v1/completions`, such as `vllm serve` or `nemo-rl-cpp
    serve`.

    Args:
        base_url: ends with `/v1`.
        model: the name under which the server knows the model.
        api_key_env: the environment variable that holds the key; None: no key is sent.

    Raises ValueError if that variable is not set."""

    timeout_s = 600.0

    def __init__(self, base_url: str, model: str, api_key_env: str | None = None) -> None:
        self.url, self.model = base_url.rstrip("/") + "/completions", model
        self.headers = {"content-type": "application/json"}
        if api_key_env is not None:
            if api_key_env not in os.environ:
                raise ValueError(
                    f"teacher.api_key_env names {api_key_env}, which is not set in the environment: set it"
                )
            self.headers["authorization"] = f"Bearer {os.environ[api_key_env]}"

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Return, for each row of token ids, the log-probability at temperature 1 of each token given the preceding
        tokens; 0 for the first. Raise ValueError if the server rejects the request or sends no log-probabilities,
        RuntimeError if it does not answer."""
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
    """A teacher that is a frozen transformers model, for architectures that the native core does not support.

    Args:
        model_name: a folder, or a name on the Hub.
        precision: the dtype of the weights.
        temperature: divides the logits.
    """

    def __init__(self, model_name: str, precision: str, temperature: float, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.temperature, self.device = temperature, device
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, precision))
        self.model.to(device).eval()

    @torch.no_grad()
    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Return, for each row of token ids, the log-probability of each token given the preceding tokens; 0 for the
        first."""
        return [self._of_row(torch.tensor([ids], device=self.device)) for ids in rows]

    def _of_row(self, ids: torch.Tensor) -> list[float]:
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float() / self.temperature
        chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        return [0.0, *chosen.tolist()]
