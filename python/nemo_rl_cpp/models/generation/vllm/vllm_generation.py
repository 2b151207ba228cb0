"""Generation by a vLLM server. Each refit sends the weights to it, through shared memory or NCCL."""

import base64
import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from hashlib import blake2b
from itertools import chain
from struct import pack

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation import base_engine
from nemo_rl_cpp.models.generation.interfaces import OnFinished, RefitResult, Responses
from nemo_rl_cpp.models.generation.vllm import server
from nemo_rl_cpp.models.generation.vllm.server_extension.nemo_rl_cpp_vllm import begin_digest
from nemo_rl_cpp.models.qwen3_next import is_fused, joined_projections
from nemo_rl_cpp.models.trained_model import TrainedModel

_ALIGNED = 64  # bytes
REFIT = "a refit"
_ID = "nccl_unique_id"  # key of the store under which csrc/distributed/nccl_communicator.cpp writes the id


class SharedMemoryTransport:
    """The transfer of weights to vLLM through anonymous memory that this process and the server's workers map. It is
    reachable only by this process's open file `descriptor` (by its path in /proc), so it is freed once both processes
    have ended, even if killed. `manifest` has [name, dtype, shape, offset, bytes] of each tensor, as
    `nemo_rl_cpp_vllm.SharedWeights` reads it, `weight_bytes` the size of all."""

    def __init__(self, weights: Mapping[str, Tensor], client: server.ServerClient) -> None:
        self._client, self._sent, end = client, "", 0
        self.manifest: list[list] = []
        for name, tensor in weights.items():
            offset, size = -(-end // _ALIGNED) * _ALIGNED, tensor.numel() * tensor.element_size()
            self.manifest.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, size])
            end = offset + size
        self._size, self.weight_bytes = max(end, 1), sum(size for *_, size in self.manifest)
        self.descriptor = os.memfd_create("nemo_rl_cpp_weights")
        self._closing = weakref.finalize(self, os.close, self.descriptor)  # also closes it if creating the engine fails
        os.ftruncate(self.descriptor, self._size)
        self._memory = torch.frombuffer(mmap.mmap(self.descriptor, self._size), dtype=torch.uint8)

    def fill(self, weights: Mapping[str, Tensor]) -> str:
        """Copy the current weights into the shared memory. Return a digest of `weights`, not of the copy."""
        digest = begin_digest(self.manifest)
        for name, _, _, offset, size in self.manifest:
            flat = weights[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._memory[offset : offset + size].copy_(flat)
            digest.update(flat.numpy())
        return digest.hexdigest()

    def prepare(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the shared memory, whose digest vLLM checks. If this fails, vLLM keeps its old
        weights."""
        self._sent, path = self.fill(weights), f"/proc/{os.getpid()}/fd/{self.descriptor}"
        info = {"path": path, "size": self._size, "manifest": self.manifest, "digest": self._sent}
        self._client.call(REFIT, "POST", "/init_weight_transfer_engine", {"init_info": info})

    def send(self, weights: Mapping[str, Tensor]) -> str:
        """Let vLLM load the weights that `prepare` copied; `weights` are not read again. Return their digest."""
        self._client.call(REFIT, "POST", "/update_weights", {"update_info": {}})
        return self._sent

    def close(self) -> None:
        """Close the descriptor of the shared memory, which is freed when the last tensor that views it is released."""
        self._closing()
        self.descriptor = -1


class NcclTransport:
    """The transfer of weights to vLLM by NCCL: the trainer's GPU is rank 0 and broadcasts each tensor to the server's
    workers, in the order of the names in the request `/update_weights`.

    The workers receive NCCL's id by HTTP, join an all-reduce of one number as a greeting, and then receive one
    broadcast per tensor. vLLM's engine `nccl` without packing does the same."""

    def __init__(self, weights: Mapping[str, Tensor], client: server.ServerClient) -> None:
        self._client, self._communicator = client, None
        self._device = next(iter(weights.values())).device
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())

    def prepare(self, weights: Mapping[str, Tensor]) -> None:
        """Connect at the first refit to vLLM's workers; `weights` are not used. On failure vLLM keeps its weights."""
        if self._communicator is not None:
            return
        workers = self._client.call(REFIT, "GET", "/get_world_size")["world_size"]
        store, seconds = dist.HashStore(), self._client.timeout
        thread = ThreadPoolExecutor(1, thread_name_prefix="nccl")
        try:
            meeting = thread.submit(connect, store, workers + 1, self._device, seconds)
            info = {
                "nccl_unique_id_b64": base64.b64encode(_id_of(store, meeting)).decode(), "rank_offset": 1, "world_size": workers + 1,
                "packed": False,
            }  # fmt: skip
            self._client.call(REFIT, "POST", "/init_weight_transfer_engine", {"init_info": info})
            self._communicator = meeting.result()
        except C.CommunicatorError as error:
            raise WorkerLostError(
                f"the workers of vLLM at {self._client.url} did not meet the trainer: {error}"
            ) from error
        finally:
            thread.shutdown(wait=False)  # if vLLM rejects the request, the rendezvous ends at its deadline

    def send(self, weights: Mapping[str, Tensor]) -> str:
        """Broadcast the weights, let vLLM load them, and return their digest. After an error no later call succeeds."""
        manifest = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in weights.items()]
        digest = begin_digest(manifest)
        info = dict(zip(("names", "dtype_names", "shapes"), map(list, zip(*manifest))))
        thread = ThreadPoolExecutor(1, thread_name_prefix="nccl")
        try:
            told = thread.submit(self._client.call, REFIT, "POST", "/update_weights", {"update_info": info})
            for name, tensor in weights.items():
                flat = tensor.detach().contiguous()
                self._communicator.broadcast(flat, 0, f"sending {name} to vLLM")
                digest.update(flat.reshape(-1).view(torch.uint8).cpu().numpy())
            told.result()
        except C.CommunicatorError as error:
            self._communicator = None
            if told.done() and (refusal := told.exception()) is not None:
                raise refusal from error
            raise WorkerLostError(f"vLLM at {self._client.url} did not take the weights: {error}") from error
        finally:
            thread.shutdown(wait=False)
        return digest.hexdigest()

    def close(self) -> None:
        self._communicator = None


def connect(store: dist.Store, size: int, device: torch.device, seconds: float) -> C.Communicator:
    """Connect by NCCL, as rank 0 with the GPU `device`, to the `size` - 1 other ranks, which meet at `store`. Return
    the communicator after a greeting, an all-reduce of one number. No operation may take longer than `seconds`."""
    communicator = C.nccl_communicator(store, 0, size, device, seconds)
    C.nccl_greeting(communicator, "greeting vLLM's workers")
    return communicator


def _id_of(store: dist.Store, meeting: Future[C.Communicator]) -> bytes:
    """Wait until the call of `meeting`, in another thread, has written NCCL's id to `store`, and return the id. Raise
    the call's error if it fails."""
    failed = threading.Event()
    meeting.add_done_callback(lambda _: failed.set())
    while not store.check([_ID]):
        if failed.wait(0.01):
            meeting.result()
    return store.get(_ID)


_GENERATE = "generate"
_PLAIN = {  # set explicitly, so that they do not depend on a server's defaults
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0,
    "logprobs": 0, "ignore_eos": True, "detokenize": False, "n": 1,
}  # fmt: skip


class Response:
    """One response that vLLM is generating, of at most `room` tokens, for the row `row` of the batch."""

    def __init__(
        self, row: int, prompt: list[int], room: int, seed: int, stops: tuple[str, ...], token_bytes: list[bytes]
    ) -> None:
        self.row, self.prompt, self.room, self.seed = row, prompt, room, seed
        self._stops, self.stopped, self.truncated = base_engine.StopStrings(stops, token_bytes), False, False
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def add(self, token: int, logprob: float) -> None:
        """Append a token. Ignore tokens that vLLM has sampled after a stop string."""
        if self.stopped:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = self._stops.end_at(token)


class VllmGeneration(base_engine.BaseEngine):
    """NeMo RL's generation interface for vLLM, with the user's server at `policy.generation.vllm_cfg.server_url`, or
    one (`server`) that the run starts with the interpreter `vllm_cfg.python`. A user's server keeps running after the
    run, with the last weights, and each refit waits until other clients' requests have ended.

    Requests go to vLLM's token-id route as streams, so that every received token shows that the server is alive. The
    client aborts a response once a stop string ends it. vLLM's seed is computed from (seed, stream, draw id, sample,
    prompt length), so that a repeated run sends the same requests; its log-probabilities are not bit-identical to
    training's. `weight_version` is the version of vLLM's weights, None before the first refit (transfer of weights).

    Raises ValueError for a server that the run cannot use. `generate` also raises VllmError before the first refit, and
    WorkerLostError if the server has ended or has produced no token for vllm_cfg.timeout_s."""

    owns_process = True

    def __init__(
        self,
        policy: TrainedModel,
        config: PolicyConfig,
        tokenizer: TokenizerType,
        *,
        end_token_ids: list[int] | None = None,
        seed: int = 42,
    ) -> None:
        longest = config.generation.effective_max_model_len(config.max_total_sequence_length)
        super().__init__(config.generation, tokenizer, end_token_ids=end_token_ids, max_model_len=longest, seed=seed)
        self.model_config = policy.saved_config()
        self.weight_version: int | None = None
        self._arrived: str | None = None
        self._label = ""
        text = self.model_config.get("text_config", {})
        self._vocab_size = int(self.model_config.get("vocab_size") or text.get("vocab_size") or 0)
        vllm = config.generation.vllm_cfg
        weights = self._named(policy.state_dict())
        device = next(iter(weights.values())).device.type
        self.server = server.StartedServer(config, self.model_config, device) if vllm.server_url is None else None
        try:
            self._join(weights, config, device)
        except BaseException:
            if self.server is not None:
                self.server.close()
            raise

    def _join(self, weights: Mapping[str, Tensor], config: PolicyConfig, device: str) -> None:
        if self.server is None:
            self._client = server.client_of(config)
        else:
            seconds = config.generation.vllm_cfg.timeout_s
            self._client = server.ServerClient(self.server.url, None, seconds, self.server.what_happened)
        facts = server.check_server(self._client, config, device)
        if self._vocab_size and facts["vocab_size"] != self._vocab_size:
            raise ValueError(
                f"policy.generation.vllm_cfg.server_url: the server's model has {facts['vocab_size']} tokens and the policy {self._vocab_size}: "
                "start it with the policy's model"
            )
        self._rows = min(self.config.max_batch_size or facts["max_num_seqs"], facts["max_num_seqs"])
        self._call = partial(self._client.call, REFIT)
        by_nccl = server.transfer_of(config, device) == server.NCCL
        self._transport = (NcclTransport if by_nccl else SharedMemoryTransport)(weights, self._client)

    # ---- token ids in, token ids out

    def _respond(self, asked: base_engine.GenerationRequest, on_finished: OnFinished | None) -> Responses:
        prompts, room = [row.tolist() for row in asked.batch.rows(asked.batch.tokens["input_ids"])], self._room(asked)
        draws, samples = asked.draws.tolist(), asked.samples.tolist()
        token_bytes = self._token_bytes if any(asked.stops) else []
        requests = []
        for row, prompt in enumerate(prompts):
            if room[row] > 0:
                # a seed of 63 bits; the prompt's length distinguishes the turns of a conversation
                key = pack(
                    "<IIqqq", self.seed, base_engine.STREAMS[asked.stream], draws[row], samples[row], len(prompt)
                )
                seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
                requests.append(Response(row, prompt, room[row], seed, asked.stops[row], token_bytes))
        answers = base_engine.ResponseBuffer(asked.batch.size, on_finished)
        if requests:
            rule = self.sampling(asked.greedy, asked.stream)
            filters = {} if rule.greedy else {"top_p": rule.top_p, "top_k": rule.top_k}
            self._answer(requests, {"temperature": 0.0 if rule.greedy else rule.temperature, **filters}, answers)
        responses = answers.responses(self.weight_version)
        if not bool(torch.isfinite(responses.logprobs).all()):
            raise RuntimeError("vLLM gave a log-probability that is not finite: the model's logits are not")
        return responses

    def _answer(
        self, requests: list[Response], sampling: dict[str, float], answers: base_engine.ResponseBuffer
    ) -> None:
        if self.weight_version is None:
            raise server.VllmError(f"vLLM at {self._client.url} has no weights: a refit is missing, or has failed")
        try:
            with ThreadPoolExecutor(min(self._rows, len(requests)), thread_name_prefix="vllm") as threads:
                left = {threads.submit(self._one, request, sampling) for request in requests}
                try:
                    while left:
                        done, left = wait(left, return_when=FIRST_COMPLETED)
                        for response in (ended := [future.result() for future in done]):
                            answers.put(response.row, response.tokens, response.logprobs, response.truncated)
                        if left:
                            answers.tell([response.row for response in ended])
                except BaseException:
                    for future in left:
                        future.cancel()
                    self._client.give_up()  # closing the connections aborts the requests in flight in vLLM
                    raise
        finally:
            self._client.take_up()
        self._check_label(self._client.call(_GENERATE, "GET", "/weight_info").get("weight_version"))

    def _one(self, row: Response, sampling: Mapping[str, float]) -> Response:
        own = {"max_tokens": row.room, "seed": row.seed, "stop_token_ids": self._stop_token_ids}
        body = {"token_ids": row.prompt, "stream": True, "sampling_params": _PLAIN | sampling | own}
        reason = None
        with contextlib.closing(self._client.stream(_GENERATE, server.GENERATE, body)) as events:
            for choice in chain.from_iterable(event["choices"] for event in events):
                content = (choice.get("logprobs") or {}).get("content") or []
                ids = [int(each["token_id"]) for each in content]
                if ids != list(choice["token_ids"] or []):
                    raise server.VllmError(f"vLLM at {self._client.url} gave log-probabilities of other tokens")
                for token, each in zip(ids, content):
                    row.add(token, each["logprob"])
                if row.stopped:
                    break
                reason = choice.get("finish_reason")
                if reason is not None:
                    for span in choice.get("weight_versions") or ():
                        self._check_label(span.get("version"))
        if not row.stopped and reason not in ("stop", "length"):
            raise server.VllmError(f"vLLM at {self._client.url} ended a request by {reason}: it was aborted, or failed")
        row.truncated = not row.stopped and reason == "length"
        return row

    def _check_label(self, label: object) -> None:
        if label != self._label:
            raise server.VllmError(
                f"vLLM at {self._client.url} answered with weights {label!r}, and {self._label!r} were sent: somebody else has changed them"
            )

    # ---- weights

    def _named(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return `weights` under the names and in the shapes of a checkpoint, which vLLM reads."""
        return dict(joined_projections(weights, self.model_config)) if is_fused(self.model_config) else weights

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> RefitResult:
        """Send the weights of `version` to vLLM, converted to its dtypes where needed.

        Requests of other clients end first. If a failure occurs before the update begins, the server continues with its
        old weights. After a later failure it stays paused, because some of its weights are new. Raises RuntimeError if
        the digest of the weights that vLLM received is not that of the weights sent, or if a parameter of vLLM's model
        received no values; vLLM then generates nothing."""
        began = time.perf_counter()
        self.weight_version = self._arrived = None
        weights = self._named(weights)
        try:
            self._call("POST", "/pause?mode=wait")
            self._transport.prepare(weights)
        except BaseException:
            # the server still has its old weights, so end its pause, if it has begun: other clients can continue
            with contextlib.suppress(server.VllmError, WorkerLostError):
                self._call("POST", "/resume")
            raise
        self._call("POST", "/start_weight_update")
        sent = self._transport.send(weights)
        label = f"{version}-{sent[:16]}"
        self._call("POST", "/finish_weight_update", {"weight_version": label})
        digests = {each.get("digest") for each in server.ask(self._client, REFIT)}
        if digests != {sent}:
            raise RuntimeError(
                f"the weights that vLLM has are not the policy's: digest {', '.join(map(str, digests))} against {sent}; the server stays paused"
            )
        self._call("POST", "/resume")
        self._label, self.weight_version, self._arrived = label, version, sent
        return RefitResult(self._transport.weight_bytes, time.perf_counter() - began, sent)

    def weight_digest(self) -> str:
        """Return the digest of the weights of the last refit, 32 hexadecimal digits. Raise RuntimeError before the
        first."""
        if self._arrived is None:
            raise RuntimeError("vLLM has no weights before the first sync_weights")
        return self._arrived

    def shutdown(self) -> bool:
        """Release the transfer memory, and stop the server if the run has started it. Further calls do nothing."""
        self._client.give_up()
        self._transport.close()
        if self.server is not None:
            self.server.close()
        return True


def check_vllm(policy: PolicyConfig, device: str) -> None:
    """Raise ValueError if the configured vLLM is missing, or cannot generate for a run on `device`."""
    if policy.generation.vllm_cfg.server_url is None:
        server.check_interpreter(policy.generation.vllm_cfg.python)
    else:
        server.check_server(server.client_of(policy), policy, device)


def vllm_of(policy: TrainedModel, config: PolicyConfig, tokenizer: TokenizerType, seed: int) -> VllmGeneration:
    """Return the vLLM engine for a run's policy, at `vllm_cfg.server_url` or a server that it starts. Raises ValueError
    for a policy, such as a custom class, that does not expose its weights."""
    vllm = config.generation.vllm_cfg
    key = "python" if vllm.server_url is None else "server_url"
    if not hasattr(policy, "state_dict") or not hasattr(policy, "saved_config"):
        raise ValueError(
            f"{type(policy).__name__} has no state_dict and saved_config, from which vLLM gets its weights and config.json: set "
            f"policy.generation.vllm_cfg.{key} to null"
        )
    other = getattr(policy, "other_names_in_checkpoints", None)
    if other is not None:
        raise ValueError(
            f"policy.backend is hf, and {other}, which vLLM reads: set policy.generation.vllm_cfg.{key} to null, or train another model"
        )
    path = getattr(getattr(policy, "folder", None), "path", None)
    ends = end_token_ids(path, policy.saved_config(), tokenizer)
    return VllmGeneration(policy, config, tokenizer, end_token_ids=ends, seed=seed)
