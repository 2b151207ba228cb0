"""Generation by a vLLM server that somebody else has started, with weights that each refit brings there."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from torch import Tensor

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation.base_engine import Answers
from nemo_rl_cpp.models.generation.interfaces import Moved
from nemo_rl_cpp.models.generation.vllm.process import VllmError
from nemo_rl_cpp.models.generation.vllm.server import GENERATE, ask, check_server, client_of
from nemo_rl_cpp.models.generation.vllm.vllm_engine import Request, VllmEngine
from nemo_rl_cpp.models.generation.vllm.weights import WeightsRoad, road_of
from nemo_rl_cpp.models.generation.vllm.worker_script import Row
from nemo_rl_cpp.models.trained_model import TrainedModel

_REFIT, _GENERATE = "a refit", "generate"
_PLAIN = {  # what a server's own defaults must not change
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0,
    "logprobs": 0, "ignore_eos": True, "detokenize": False, "n": 1,
}  # fmt: skip


class Text(NamedTuple):
    """A response that has ended."""

    request: Request
    tokens: list[int]
    logprobs: list[float]
    truncated: bool


class VllmServerGeneration(VllmEngine):
    """vLLM behind `policy.generation.vllm_cfg.server_url`. The server stays when the run ends, with the last weights.

    Requests go to vLLM's route of token ids as streams, so that every token is a sign of life, and a response that a stop string has ended
    is given up there. Others may use the server, too: their requests end before each refit.

    Args:
        policy, tokenizer, end_token_ids, seed: as of `VllmEngine`.
        config: section `policy`. Read are precision and of `generation` max_new_tokens, temperature, top_p, top_k, val_temperature,
            val_top_p, val_top_k, stop_token_ids, stop_strings, max_batch_size and of `vllm_cfg` server_url, timeout_s, max_model_len,
            precision, http_refit_api_key_env_var.

    Raises ValueError for a server that the run cannot use.
    """

    def __init__(
        self, policy: TrainedModel, config: PolicyConfig, tokenizer: TokenizerType, *, end_token_ids: list[int] | None = None, seed: int = 42
    ) -> None:  # fmt: skip
        super().__init__(policy, config, tokenizer, end_token_ids=end_token_ids, seed=seed)
        weights = policy.state_dict()
        device = next(iter(weights.values())).device.type
        facts = check_server(config, device)
        if self._vocab_size and facts["vocab_size"] != self._vocab_size:
            raise ValueError(
                f"policy.generation.vllm_cfg.server_url: the server's model has {facts['vocab_size']} tokens and the policy {self._vocab_size}: "
                "start it with the policy's model"
            )
        self._client = client_of(config)
        self._rows = min(config.generation.max_batch_size or facts["max_num_seqs"], facts["max_num_seqs"])
        self._road: WeightsRoad = road_of(weights, self._client)
        self._label = ""

    # ---- token ids in, token ids out

    def _answer(self, requests: list[Request], sampling: dict[str, float], answers: Answers) -> None:
        if self.weight_version is None:
            raise VllmError(f"vLLM at {self._client.url} has no weights: a refit is missing, or has failed")
        try:
            self._answer_all(requests, sampling, answers)
        finally:
            self._client.take_up()
        label = self._client.call(_GENERATE, "GET", "/weight_info").get("weight_version")
        self._check_label(label)

    def _answer_all(self, requests: list[Request], sampling: dict[str, float], answers: Answers) -> None:
        token_bytes = self._token_bytes if any(request.stops for request in requests) else []
        with ThreadPoolExecutor(min(self._rows, len(requests)), thread_name_prefix="vllm") as threads:
            left = {threads.submit(self._one, request, sampling, token_bytes) for request in requests}
            try:
                while left:
                    done, left = wait(left, return_when=FIRST_COMPLETED)
                    self._put(done, answers, bool(left))
            except BaseException:
                for future in left:
                    future.cancel()
                self._client.give_up()  # requests under way end in vLLM with their connections
                raise

    def _put(self, done: set[Future[Text]], answers: Answers, others_run: bool) -> None:
        texts = [future.result() for future in done]
        for text in texts:
            answers.put(text.request.row, text.tokens, text.logprobs, text.truncated)
        if others_run:
            answers.tell([text.request.row for text in texts])

    def _one(self, request: Request, sampling: Mapping[str, float], token_bytes: list[bytes]) -> Text:
        stops = [text.encode() for text in request.stops]
        row = Row(request.prompt, stops, max(map(len, stops), default=0))
        body = {
            "token_ids": request.prompt, "stream": True,
            "sampling_params": {
                **_PLAIN, **sampling, "max_tokens": request.room, "seed": request.seed, "stop_token_ids": self._stop_token_ids,
            },
        }  # fmt: skip
        reason = None
        with contextlib.closing(self._client.stream(_GENERATE, GENERATE, body)) as events:
            for choice in _choices(events, self._client.url):
                ids, chances = _sampled(choice, self._client.url)
                for token, chance in zip(ids, chances):
                    row.add(token, chance, token_bytes)
                if row.stopped:
                    break
                reason = choice.get("finish_reason")
                if reason is not None:
                    for span in choice.get("weight_versions") or ():
                        self._check_label(span.get("version"))
        if not row.stopped and reason not in ("stop", "length"):
            raise VllmError(
                f"vLLM at {self._client.url} ended a request by {reason}: somebody has aborted it, or it has failed"
            )
        return Text(request, row.tokens.tolist(), row.logprobs.tolist(), not row.stopped and reason == "length")

    def _check_label(self, label: object) -> None:
        if label != self._label:
            raise VllmError(
                f"vLLM at {self._client.url} answered with weights {label!r}, and {self._label!r} were sent: somebody else has changed them"
            )

    # ---- weights

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> Moved:
        """As `VllmEngine.update_weights`. Requests of others end first. Where it fails before the update begins, the server goes on with
        its old weights; later it stays paused, since it has some of the new ones."""
        began = time.perf_counter()
        self.weight_version = self._arrived = None
        with self._resumed_where_nothing_changed():
            self._call("POST", "/pause?mode=wait")
            self._road.prepare(weights)
        self._call("POST", "/start_weight_update")
        sent = self._road.send(weights)
        label = f"{version}-{sent[:16]}"
        self._call("POST", "/finish_weight_update", {"weight_version": label})
        digests = {each.get("digest") for each in ask(self._client, _REFIT)}
        if digests != {sent}:
            raise RuntimeError(
                f"the weights that vLLM has are not the policy's: digest {', '.join(map(str, digests))} against {sent}; the server stays paused"
            )
        self._call("POST", "/resume")
        self._label, self.weight_version, self._arrived = label, version, sent
        return Moved(self._road.weight_bytes, time.perf_counter() - began, sent)

    def _call(self, method: str, path: str, body: object = None) -> dict:
        return self._client.call(_REFIT, method, path, body)

    @contextlib.contextmanager
    def _resumed_where_nothing_changed(self) -> Iterator[None]:
        """Whatever ends this: the server, which others may use, has its old weights. A pause that came too late may be one all the same."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(VllmError, WorkerLostError):
                self._call("POST", "/resume")
            raise

    def shutdown(self) -> bool:
        """Gives the memory of weights back; the server goes on. Safe to call twice."""
        self._client.give_up()
        self._road.close()
        return True


def _choices(events: Iterator[dict], url: str) -> Iterator[dict]:
    for event in events:
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise VllmError(f"vLLM at {url} answered with what is no answer: an event without choices")
        yield from choices


def _sampled(choice: dict, url: str) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities of a part of a response."""
    try:
        ids = [int(token) for token in choice["token_ids"] or ()]
        content = (choice.get("logprobs") or {}).get("content") or ()
        chances = {
            "ids": [int(each["token_id"]) for each in content],
            "values": [float(each["logprob"]) for each in content],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise VllmError(f"vLLM at {url} answered with what is no answer ({type(error).__name__}: {error})") from error
    if chances["ids"] != ids:
        raise VllmError(
            f"vLLM at {url} answered with what is no answer: log-probabilities of other tokens than the response's"
        )
    return ids, chances["values"]
