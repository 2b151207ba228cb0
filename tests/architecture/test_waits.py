"""Nobody waits for ever: every wait of the package has a deadline, or stands in a table with the reason why it ends.

Waits are found by their names in the syntax trees of the Python code, and by their names in the lines of the C++ code. A row of a
table that fits nothing is an error too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from architecture.python_imports import NAME, ROOT

FULL = {  # method or function -> how many arguments its deadline makes; None: only by keyword
    "wait": 1, "wait_for": 2, "join": 1, "get": 1, "result": 1, "communicate": None, "recv": None, "recv_bytes": None, "accept": None,
    "select": None, "poll": None, "acquire": None, "waitpid": None, "flock": None, "check_output": None, "check_call": None, "sigwait": None,
}  # fmt: skip
BOUNDED = {"timeout", "timeout_s", "timeout_seconds", "deadline", "patience"}

PYTHON = {  # (file, function, call): why it ends
    ("algorithms/collection.py", "BesideTraining.collect", "self._batches.popleft().result()"): "rollouts at work on a thread; their own waits have deadlines",
    ("algorithms/collection.py", "*", "batch.result()"): "as above",
    ("checkpoints/manager.py", "*", "self._store.acquire()"): "a lock of a folder, taken without waiting: FolderError where another run holds it",
    ("compat/experience/async_rollouts.py", "_run", "thread.join()"): "the rollouts themselves, on a thread since a notebook's loop runs",
    ("compat/utils/checkpoint.py", "*", "self._thread.join()"): "writes to a disk, and what the caller asked it to wait for",
    ("compat/utils/checkpoint.py", "*", "self._store.acquire()"): "as in checkpoints/manager.py",
    ("compat/distributed/worker_groups.py", "*", "get(futures)"): "calls of workers: one that is lost ends them (ProcessWorker._end)",
    ("interrupts.py", "nobody_reads", "select.poll()"): "makes an object; what asks it, poll(0), does not wait",
    ("models/generation/vllm/worker_script.py", "_read", "connection.recv(min(size - len(parts), 1 << 20))"): "vLLM's process waits for work; the socket closes with the trainer's process",
    ("models/generation/vllm/server_generation.py", "VllmServerGeneration._put", "future.result()"): "requests that have ended",
    ("models/generation/vllm/weights.py", "*", "meeting.result()"): "NCCL's meeting has the deadline of vllm_cfg.timeout_s",
    ("models/generation/vllm/weights.py", "NcclRoad.send", "told.result()"): "a call of HTTP with the deadline of vllm_cfg.timeout_s",
    ("data/dataloader.py", "StatefulDataLoader._submit", "future.result()"): "reading rows: the user's own processor, at work in this process",
    ("distributed/futures.py", "get", "get(item, timeout)"): "hands the caller's deadline on",
    ("distributed/worker_calls.py", "values_of", "call.result()"): "calls that have ended",
    ("distributed/worker.py", "SocketWorker.run", "self._calls.get()"): "a worker waits for work; the reader ends the process with the socket",
    ("distributed/worker.py", "SocketWorker._read", "self._connection.recv()"): "the socket is closed when the run's process ends",
    ("distributed/process_workers.py", "SocketPeer._write", "self._outgoing.get()"): "a daemon thread; _end and kill put None",
    ("distributed/process_workers.py", "SocketPeer._read", "self._connection.recv_bytes()"): "a daemon thread; the run looks at signs of life",
    ("distributed/worker_groups.py", "RayWorkerGroup.call_all", "get(futures)"): "futures of this very process, which have ended",
    ("distributed/launch.py", "serve", "connection.recv_bytes()"): "the socket is closed when rank 0 ends; keep-alive notices a lost machine",
    ("distributed/launch.py", "admit", "connection.recv_bytes(1 << 16)"): "the socket's own timeout, HANDSHAKE_SECONDS",
    ("distributed/process_workers.py", "LaunchedWorkers._meet", "listening.accept()"): "the socket's own timeout, within MEETING_SECONDS",
    ("environments/remote.py", "RemoteMethod.__call__", "self.remote(*args, **kwargs).result()"): "the user's environment, at work in this process; Ctrl-C ends it",
    ("environments/remote.py", "_work", "calls.get()"): "a daemon thread waits for work; None comes with the handle's end",
    ("environments/remote.py", "answer_of", "get(result)"): "as RemoteMethod.__call__",
    ("environments/reward_values.py", "awaited", "thread.join()"): "the user's reward function, at work in this process",
    ("environments/sandbox/run.py", "*", "os.waitpid(self.keeper, 0)"): "killed or finished before",
    ("environments/sandbox/run.py", "*", "select.poll()"): "makes the object",
    ("environments/sandbox/supervisor.py", "*", "select.poll()"): "makes the object",
    ("environments/sandbox/supervisor.py", "*", "os.waitpid(first, 0)"): "the caller kills `first` at the limit, the kernel with its parent",
    ("environments/verifier_process.py", "*", "select.poll()"): "makes the object",
    ("serving/app.py", "Conversation.next", "self.news.get()"): "within the request's time limit; the engine's thread tells every request's end",
    ("serving/app.py", "Conversation.unless_gone", "task.result()"): "a task that is done",
    ("serving/engine_thread.py", "EngineThread._work", "self._changed.wait_for(self._has_something)"): "a daemon thread waits for work; shut_down ends it",
    ("files/durable.py", "seal_folder", "file.result()"): "writes to a disk",
}  # fmt: skip
CPP = {  # (file, line's text): why it ends
    ("csrc/process/signal_watch.cpp", "thread_.join();"): "the thread watches with a grace, and is told to close before",
    ("csrc/distributed/gradient_exchange.cpp", "while (!failed_ && gone_ + kWaiting < ready) changed_.wait_for(lock, kLong);"): "buckets go or fail by messages with a deadline",
    ("csrc/distributed/gradient_exchange.cpp", "while (!failed_ && final_ > begin) changed_.wait_for(lock, kLong);"): "the backward at work in this process; ~GradientExchange ends it",
    ("csrc/distributed/gloo_communicator.cpp", "run(phase, [&] { return group_->recv(tensors, from, /*tag=*/0); });"): "starts; run() waits with the deadline",
}  # fmt: skip
CPP_WAIT = re.compile(
    r"(?:\.|->)(?:wait|wait_for|wait_until|synchronize)\(|(?:\.|->)join\(\)|(?:->|::|\b)recv\(|::accept\(|::poll\(|::select\(|\bepoll_wait\("
    r"|\bwaitpid\(|\bpthread_join\(|\bsigwait\w*\(|\bsem_wait\(|cuda\w+Synchronize\(|\.get\(\)\s*;\s*//\s*future"
)
CPP_DEADLINE = re.compile(r"deadline|grace|patience|timeout|until|seconds|WNOHANG|, left\)")


def waits(path: Path) -> Iterator[tuple[str, str]]:
    """(function, text of the call) of every call without a deadline."""
    stack: list[str] = []

    def visit(node: ast.AST) -> Iterator[tuple[str, str]]:
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if named:
            stack.append(node.name)
        if isinstance(node, ast.Call) and is_wait(node):
            yield ".".join(stack), ast.unparse(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        if named:
            stack.pop()

    yield from visit(ast.parse(path.read_text()))


def is_wait(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in ("run", "call") and receiver == "subprocess":
        name = "check_output"
    if name not in FULL or receiver == "self._objects" or any(keyword.arg in BOUNDED for keyword in call.keywords):
        return False
    given, text = len(call.args), ast.unparse(call)
    if receiver in ("ray", "self._ray", "dist"):
        return name in ("get", "wait")  # only a keyword is a deadline there
    if not receiver and name == "get":
        return given < 2 or text == "get(item, timeout)"
    if name in ("recv", "recv_bytes", "accept", "check_output", "check_call"):
        return True
    if name == "select":
        return receiver == "select" and given < 4 or receiver.endswith("selector") and given == 0
    if name == "poll":
        return given == 0 and "process" not in receiver
    if name in ("waitpid", "flock"):
        return "WNOHANG" not in text and "LOCK_NB" not in text and "LOCK_UN" not in text
    limit = FULL[name]
    return given == 0 if limit in (None, 1) else given < limit


def why_python(file: str, function: str, call: str) -> tuple | None:
    return next((key for key in ((file, function, call), (file, "*", call)) if key in PYTHON), None)


def test_python_waits_have_a_deadline_or_a_reason():
    package, used, bare = ROOT / "python" / NAME, set(), []
    for path in sorted(package.rglob("*.py")):
        for function, call in waits(path):
            file = path.relative_to(package).as_posix()
            key = why_python(file, function, call)
            used.add(key) if key else bare.append(f"{file}: {function}: {call}")
    assert not bare, f"{bare}: give it a timeout, or a row in PYTHON with the reason why it cannot hang"
    stale = [key for key in PYTHON if key not in used and (package / key[0]).exists()]
    assert not stale, f"rows of PYTHON that fit nothing: {stale}"


def test_native_waits_have_a_deadline_or_a_reason():
    used, bare = set(), []
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in (".cpp", ".h", ".cu", ".cuh"):
            continue
        file = path.relative_to(ROOT).as_posix()
        for line in map(str.strip, path.read_text().splitlines()):
            code = line.partition("//")[0]
            if CPP_WAIT.search(code) and not CPP_DEADLINE.search(code):
                used.add((file, line)) if (file, line) in CPP else bare.append(f"{file}: {line}")
    assert not bare, f"{bare}: give it a deadline, or a row in CPP with the reason why it cannot hang"
    assert not set(CPP) - used, "rows of CPP that fit nothing"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("event.wait()", 1), ("event.wait(2.0)", 0), ("event.wait(timeout=t)", 0), ("condition.wait_for(f)", 1), ("condition.wait_for(f, 1)", 0),
        ("thread.join()", 1), ("', '.join(names)", 0), ("queue.get()", 1), ("settings.get('a')", 0), ("get(future)", 1), ("get(future, 5)", 0),
        ("ray.get(ref)", 1), ("ray.get(ref, timeout=3)", 0), ("ray.wait([ref])", 1), ("ray.wait([ref], timeout=0)", 0), ("s.recv()", 1),
        ("select.select(a, b, c)", 1), ("select.select(a, b, c, 1)", 0), ("selector.select()", 1), ("p.communicate()", 1), ("os.waitpid(p, 0)", 1),
        ("os.waitpid(p, os.WNOHANG)", 0), ("subprocess.run(x)", 1), ("subprocess.run(x, timeout=1)", 0), ("lock.acquire()", 1),
        ("fcntl.flock(f, fcntl.LOCK_EX)", 1), ("fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)", 0), ("future.result()", 1),
    ],
)  # fmt: skip
def test_the_reader_knows_a_wait(tmp_path, code, found):
    (tmp_path / "m.py").write_text(code)
    assert len(list(waits(tmp_path / "m.py"))) == found
