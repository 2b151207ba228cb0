"""The process in which vLLM runs, as the trainer sees it: started, asked with deadlines, ended."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from nemo_rl_cpp.distributed.worker_calls import GRACE_SECONDS, WorkerLostError
from nemo_rl_cpp.models.generation.vllm import worker_script
from nemo_rl_cpp.models.generation.vllm.worker_script import TESTED_VERSION, FrameError, receive_frame, send_frame

KEY = "policy.generation.vllm_cfg.python"
HOW_TO = "docs/vllm.md says how to make an environment with it"
_SCRIPT = Path(worker_script.__file__)
_LAST_LINES, _LAST_BYTES = 12, 4000


class VllmError(RuntimeError):
    """vLLM could not do what it was asked; its process goes on."""


def check_interpreter(python: str, patience: float = 60.0) -> None:
    """ValueError where `python` is no interpreter that has the vLLM which is tested here, with what it has."""
    try:
        asked = subprocess.run(
            [python, "-I", str(_SCRIPT), "version"], capture_output=True, text=True, timeout=patience, stdin=subprocess.DEVNULL
        )  # fmt: skip
    except OSError as error:
        raise ValueError(
            f"{KEY} is {python}, which cannot be run ({error.strerror}): name a Python interpreter that has vLLM; {HOW_TO}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{KEY} is {python}, which has not answered for {patience:g} s: name a Python interpreter that has vLLM"
        ) from error
    try:
        version = json.loads(asked.stdout)
    except ValueError:
        said = (asked.stderr or asked.stdout).strip().splitlines()
        raise ValueError(
            f"{KEY} is {python}, which is no Python interpreter (it said {said[-1] if said else 'nothing'!r}): name one that has vLLM; {HOW_TO}"
        ) from None
    check_version(python, version)


def check_version(python: str, version: str | None) -> None:
    """ValueError for another version of vLLM than the one that is tested."""
    if version is None:
        raise ValueError(f"{KEY} is {python}, which has no vLLM: install vLLM {TESTED_VERSION} there; {HOW_TO}")
    if version.partition("+")[0] != TESTED_VERSION:
        raise ValueError(
            f"{KEY} is {python}, which has vLLM {version}: its interfaces change with each version, and {TESTED_VERSION} is the one that is "
            f"tested here; {HOW_TO}"
        )


class VllmProcess:
    """`worker_script.py` in vLLM's interpreter, in a session of its own: a Ctrl-C in the terminal reaches the trainer alone.

    It holds one end of a pipe of which this process holds the other, so that it ends with this one, however that ends.
    A call that fails in any way but by `VllmError` ends it.

    Args:
        python: vLLM's interpreter.
        environment: all of its environment variables.
        memory: an open file, the weights' memory.
        start_timeout: seconds until it must have answered `start`.
        timeout: seconds without a sign of life in any other call.

    Raises ValueError for another version of vLLM, WorkerLostError where it does not begin.
    """

    def __init__(
        self, python: str, environment: Mapping[str, str], memory: int, start_timeout: float, timeout: float
    ) -> None:  # fmt: skip
        self._timeout, self._starting = timeout, False
        self.folder = TemporaryDirectory(prefix="nemo_rl_cpp_vllm_")
        self._log = Path(self.folder.name) / "output.txt"
        self.start_timeout = start_timeout
        self._connection, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        command = [python, "-I", str(_SCRIPT), str(theirs.fileno()), str(lifeline), str(memory)]
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno(), lifeline, memory], stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True, env=dict(environment),
                )  # fmt: skip
        except BaseException:
            self._connection.close()
            os.close(self._lifeline)
            self.folder.cleanup()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, self._lifeline, self.folder)
        try:
            hello, _ = self._receive("beginning", start_timeout)
            check_version(python, hello.get("vllm"))
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def begin(self, message: Mapping[str, object]) -> None:
        """Asks it to load vLLM, and does not wait: the next call does."""
        self._must_be_alive()
        self._send({"call": "start", **message}, b"")
        self._starting = True

    def wait_until_ready(self) -> None:
        """Until vLLM is loaded. Raises as `call`."""
        self._must_be_alive()
        if self._starting:
            self._answer("loading vLLM", self.start_timeout, None)
            self._starting = False

    def call(
        self, what: str, message: Mapping[str, object] | None = None, payload: bytes = b"", on_step: Callable[[dict, bytes], None] | None = None
    ) -> dict:  # fmt: skip
        """What it answers to a call; `on_step` sees the answer's steps.

        Raises VllmError where vLLM cannot do it, WorkerLostError where the process has ended or gives no sign of life.
        """
        self.wait_until_ready()
        self._send({"call": what, **(message or {})}, payload)
        return self._answer(what, self._timeout, on_step)

    def kill(self) -> None:
        """Ends it and whatever it started, and collects it. May be called again."""
        self._finalizer()

    def _must_be_alive(self) -> None:
        if not self._finalizer.alive:
            raise WorkerLostError("vLLM has been ended, and cannot be asked any more")

    def _send(self, message: dict, payload: bytes) -> None:
        self._connection.settimeout(self._timeout)
        try:
            send_frame(self._connection, message, payload)
        except OSError as error:
            raise self._lost(message["call"], self._timeout) from error
        except BaseException:
            self.kill()
            raise

    def _answer(self, what: str, patience: float, on_step: Callable[[dict, bytes], None] | None) -> dict:
        try:
            while True:
                message, payload = self._receive(what, patience)
                if message["event"] == "error":
                    if what == "loading vLLM":
                        self.kill()
                    error = VllmError(f"vLLM, {what}: {message['text']}")
                    error.add_note(f"in vLLM's process:\n{message['trace']}")
                    raise error
                if message["event"] != "step":
                    return message
                if on_step is not None:
                    on_step(message, payload)
        except VllmError:
            raise
        except BaseException:  # also one of `on_step`: what it answers later is nobody's
            self.kill()
            raise

    def _receive(self, what: str, patience: float) -> tuple[dict, bytes]:
        self._connection.settimeout(patience)
        try:
            return receive_frame(self._connection)
        except (EOFError, OSError, FrameError, ValueError) as error:
            raise self._lost(what, patience, error) from error

    def _lost(self, what: str, patience: float, error: BaseException | None = None) -> WorkerLostError:
        """What happened to it; it is ended."""
        if isinstance(error, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=GRACE_SECONDS)
        code, pid, said = self._process.poll(), self.pid, self._last_words()
        if isinstance(error, TimeoutError):
            how = f"gave no sign of life for {patience:g} s (policy.generation.vllm_cfg.{'start_timeout_s' if what in ('beginning', 'loading vLLM') else 'timeout_s'})"
        elif code is None:
            how = f"answered with what is no answer ({type(error).__name__})" if error is not None else "takes no calls"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        self.kill()
        return WorkerLostError(f"vLLM (process {pid}) {how}; it was doing: {what}{said}")

    def _last_words(self) -> str:
        """The end of its output, for an error."""
        try:
            with open(self._log, "rb") as log:
                log.seek(max(os.fstat(log.fileno()).st_size - _LAST_BYTES, 0))
                lines = log.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        except OSError:
            return ""
        return "; its last words:\n" + "\n".join(f"  {line}" for line in lines) if lines else "; it has said nothing"


def _end(process: subprocess.Popen, connection: socket.socket, lifeline: int, folder: TemporaryDirectory) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its children too, where it has died before them
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that the kernel does not let go ends later
        process.wait(timeout=GRACE_SECONDS)
    connection.close()
    os.close(lifeline)
    folder.cleanup()
