"""A mock of vLLM's server: its routes over HTTP, the real worker extension, and the Llama of `vllm_stand_in`.

    with serving("good", config) as server: ... server.url ...     # in this process
    interpreter(folder, "good")            # a program for policy.generation.vllm_cfg.python that runs such a server

The routes and their answers are those of vLLM 0.32.0 (`entrypoints/rl/online`, `entrypoints/serve/dev/rpc`,
`entrypoints/scale_out`)."""

import contextlib
import importlib
import json
import os
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nemo_rl_cpp
import vllm_stand_in

EXTENSION = Path(nemo_rl_cpp.__file__).parent / "models" / "generation" / "vllm" / "server_extension"
MODES = {
    "good": "does what it is asked", "old": "is another version of vLLM",
    "no_dev": "was started without VLLM_SERVER_DEV_MODE=1", "no_extension": "was started without our extension",
    "no_scale_out": "was started without --enable-scale-out", "locked": "wants the key that is `secret`",
    "flipped": "sees a bit in the memory that the trainer has not set", "missing": "leaves one tensor out",
    "hangs": "makes no second token", "dies": "closes the connection in the middle of a response",
    "garbage": "answers with what is no event", "aborts": "has its requests aborted by somebody",
    "renamed": "has its weights changed by somebody", "none": "is not installed in this interpreter",
    "dies_loading": "ends while it loads", "hangs_loading": "never listens",
    "killed": "is killed in the middle of a response",
}  # fmt: skip


class NcclTransfer(vllm_stand_in.Transfer):
    """A mock of vLLM's engine `nccl`, with the parts that the extension uses. It reads the trainer's broadcasts from
    the queue `wire`."""

    init_info_cls = update_info_cls = SimpleNamespace

    def init_transfer_engine(self, info):
        self.info, self.wire = info, queue.Queue()
        self.model_update_group = SimpleNamespace(broadcast=lambda weight, src: weight.copy_(self.wire.get(timeout=20)))

    def update_weights(self, values):
        self.receive_weights(self.parse_update_info(values))

    def start_weight_update(self):
        """Do nothing: the mock loads directly into its weights."""

    finish_weight_update = start_weight_update


@contextlib.contextmanager
def stand_in_modules():
    """Provide the mock's module `vllm`, and yield the extension that imports it. Remove both afterwards."""
    before = dict(sys.modules)
    vllm_stand_in.modules()
    nccl = sys.modules["vllm.distributed.weight_transfer.nccl_engine"] = ModuleType("nccl_engine")
    nccl.NCCLWeightTransferEngine, nccl.NCCLWeightTransferUpdateInfo = NcclTransfer, SimpleNamespace
    sys.path.insert(0, str(EXTENSION))
    try:
        yield importlib.import_module("nemo_rl_cpp_vllm")
    finally:
        sys.path.remove(str(EXTENSION))
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in ("vllm", "nemo_rl_cpp_vllm"):
                del sys.modules[name]


class Server:
    """The state of the server. `calls` lists the routes that were called."""

    def __init__(self, mode, config, extension, facts):
        assert mode in MODES
        self.mode, self.facts, self.calls, self.bodies = mode, facts, [], []
        self.llama = vllm_stand_in.Llama(config, mode)
        make = extension.nccl_engine if facts.get("backend") == "nemo_rl_cpp_nccl" else extension.shared_memory_engine
        self.transfer = make()(None, None, "cpu", self.llama)
        self.transfer.device = "cpu"
        self.worker = SimpleNamespace(
            weight_transfer_engine=self.transfer, vllm_config=self._vllm_config(), ask=extension.Weights.nemo_rl_cpp_weights
        )  # fmt: skip
        self.version, self.paused, self.lock, self.running = "default", False, threading.Lock(), 0
        self.given_up = threading.Event()

    def _vllm_config(self):
        model = {
            "dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "max_model_len": 32, "generation_config": "vllm", **self.facts,
            "get_vocab_size": lambda: self.llama.config["vocab_size"],
        }  # fmt: skip
        scheduler = {"max_num_seqs": 16, "enable_chunked_prefill": False, **self.facts}
        return SimpleNamespace(
            model_config=SimpleNamespace(**model), scheduler_config=SimpleNamespace(**scheduler),
            weight_transfer_config=SimpleNamespace(backend=self.facts.get("backend", "nemo_rl_cpp_shared_memory")),
        )  # fmt: skip

    def update(self, path, body):
        """Answer a request to one of the weight routes."""
        transfer = self.transfer
        if path == "/pause?mode=wait":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/init_weight_transfer_engine":
            if self.mode == "flipped":
                body["init_info"]["digest"] = "0" * 32
            transfer.init_transfer_engine(transfer.init_info_cls(**body["init_info"]))
        elif path == "/start_weight_update":
            assert self.paused and not self.running
            transfer.start_weight_update()
        elif path == "/update_weights":
            transfer.update_weights(body["update_info"])
        elif path == "/finish_weight_update":
            transfer.finish_weight_update()
            self.version = body["weight_version"]
        return {"message": "done"}

    def count(self, change):
        """Add `change` to the number of running requests."""
        with self.lock:
            self.running += change

    def events(self, body):
        """Yield the events of a response, token by token."""
        parameters, response = SimpleNamespace(**body["sampling_params"]), []
        assert not self.paused and parameters.ignore_eos and parameters.logprobs == 0 and not parameters.detokenize
        assert parameters.repetition_penalty == 1 and parameters.min_p == 0
        while True:
            if response and self.mode == "hangs":
                self.given_up.wait(60)
            if response and self.mode == "dies":
                return
            if response and self.mode == "killed":
                os.kill(os.getpid(), 9)
            with self.lock:  # concurrent torch calls are slow on few cores
                token, chance = vllm_stand_in.sample(self.llama, body["token_ids"], response, parameters)
            response.append(token)
            stop = token in parameters.stop_token_ids
            reason = "stop" if stop else "length" if len(response) == parameters.max_tokens else None
            if self.mode == "aborts":
                reason = "abort"
            label = "of-others" if self.mode == "renamed" else self.version
            spans = [{"version": label, "start": 0, "end": len(response)}] if reason else None
            content = [{"token_id": token, "logprob": chance, "rank": 1, "top_logprobs": []}]
            choice = {
                "index": 0, "token_ids": [token], "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans
            }  # fmt: skip
            yield {"request_id": "r", "choices": [choice]}
            if reason:
                return


class Handler(BaseHTTPRequestHandler):
    """The handler of one request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Print nothing."""

    @property
    def state(self):
        return self.server.state

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        state = self.state
        state.calls.append(self.path)
        if self.path == "/version":
            self.answer(200, {"version": "0.31.0" if state.mode == "old" else "0.32.0"})
        elif self.path == "/get_world_size":
            self.answer(200, {"world_size": 2})
        elif self.path == "/weight_info":
            self.answer(200, {"weight_version": state.version})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        state, generates = self.state, self.path == "/inference/v1/generate"
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"null")
        state.calls.append(self.path)
        if generates and state.mode == "no_scale_out":
            self.answer(403, {"error": {"message": "Scale-out endpoints are disabled.", "code": 403}})
        elif generates and state.mode == "locked" and self.headers.get("authorization") != "Bearer secret":
            self.answer(401, {"error": "Unauthorized"})
        elif generates and "token_ids" not in body:
            self.answer(400, {"error": {"message": "token_ids: Field required", "code": 400}})
        elif generates:
            state.bodies.append(body)
            state.count(1)
            try:
                self.stream(body)
            finally:
                state.count(-1)
        elif state.mode == "no_dev":
            self.answer(404, {"detail": "Not Found"})
        elif self.path == "/collective_rpc":
            if state.mode == "no_extension":
                self.answer(500, {"error": {"message": f"'Worker' has no attribute {body['method']!r}"}})
            else:
                self.answer(200, {"results": [state.worker.ask(state.worker)]})
        else:
            try:
                self.answer(200, state.update(self.path, body))
            except Exception as error:  # FastAPI answers like this
                self.answer(500, {"error": {"message": f"{type(error).__name__}: {error}", "code": 500}})

    def stream(self, body):
        state = self.state
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

        def chunk(text):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

        with contextlib.suppress(OSError):  # the client has disconnected
            for event in state.events(body):
                chunk(b"no event\n\n" if state.mode == "garbage" else b"data: " + json.dumps(event).encode() + b"\n\n")
                if state.mode == "garbage":
                    chunk(b"data: nothing\n\n")
            if state.mode == "dies":
                self.close_connection = True
                return
            chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")


class Listening(ThreadingHTTPServer):
    """A server that accepts all connections that a run opens at once. By default only five may wait, and more are
    refused."""

    daemon_threads = True
    request_queue_size = 128


@contextlib.contextmanager
def serving(mode, config, port=0, **facts):
    """Run a server for a model with this config.json. `facts` replace properties of a server that a run can use."""
    with stand_in_modules() as extension:
        http = Listening(("127.0.0.1", port), Handler)
        http.state = Server(mode, config, extension, facts)
        http.state.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield http.state
        finally:
            http.state.given_up.set()
            http.shutdown()
            http.server_close()
            thread.join()


def interpreter(folder: Path, mode: str = "good") -> str:
    """Write a program that takes the place of vLLM's interpreter and answers `-c` and `-m` as Python would. Return its
    path."""
    assert mode in MODES
    path = folder / f"python_{mode}"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {mode} "$@"\n')
    path.chmod(0o755)
    return str(path)


def main(mode, *arguments):
    if "-c" in arguments:  # the run asks which vLLM is installed
        print({"old": {"vllm": "0.31.0"}, "none": {}}.get(mode, {"vllm": "0.32.0"}))
        return
    assert arguments[:2] == ("-m", "vllm.entrypoints.openai.api_server")
    assert os.environ["PYTHONPATH"] == str(EXTENSION) and os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    options = dict(zip(arguments, arguments[1:]))
    assert {"--load-format", "--skip-tokenizer-init", "--no-enable-chunked-prefill", "--enable-scale-out"} < set(
        arguments
    )
    if mode == "dies_loading":
        print("out of luck", flush=True)
        sys.exit(3)
    if mode == "hangs_loading":
        threading.Event().wait()
    config = json.loads((Path(options["--model"]) / "config.json").read_text())
    facts = {"max_model_len": int(options["--max-model-len"]), "max_num_seqs": int(options["--max-num-seqs"])}
    with serving(mode, config, int(options["--port"]), **facts):
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
