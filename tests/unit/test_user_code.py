import asyncio
import os
import signal
import threading

import pytest
from nemo_rl_cpp.user_code import call_user, serve


def here():
    return threading.current_thread()


def test_user_code_of_a_run_is_called_in_the_thread_that_started_the_run():
    seen = serve(lambda: (here(), call_user(here)))
    assert seen[0] is not here() and seen[1] is here()


def test_training_run_can_be_started_from_any_thread():
    found = []

    def begin():
        found.append((serve(lambda: call_user(here)), here()))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert found[0][0] is found[0][1]


def test_user_coroutines_of_all_runs_use_the_same_event_loop():
    async def loop():
        return asyncio.get_running_loop()

    loops = [call_user(loop), *serve(lambda: [call_user(loop) for _ in range(3)]), serve(lambda: call_user(loop))]
    assert len(set(map(id, loops))) == 1


def test_user_coroutines_called_from_several_threads_run_concurrently():
    async def meet(barrier):
        barrier.append(None)
        while len(barrier) < 3:
            await asyncio.sleep(0)
        return len(barrier)

    def work():
        barrier, results = [], []
        threads = [threading.Thread(target=lambda: results.append(call_user(meet, barrier))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert serve(work) == [3, 3, 3]


@pytest.mark.parametrize("how", ["run", "run_until_complete"])
def test_user_function_can_run_an_event_loop_while_a_user_coroutine_waits(how):
    async def value():
        await asyncio.sleep(0)
        return 7

    def function():
        return asyncio.run(value()) if how == "run" else asyncio.get_event_loop().run_until_complete(value())

    async def waits(done):
        while not done:
            await asyncio.sleep(0)

    def work():
        done = []
        thread = threading.Thread(target=call_user, args=(waits, done))
        thread.start()
        result = [call_user(function) for _ in range(3)]
        done.append(True)
        thread.join()
        return result

    assert serve(work) == [7, 7, 7]


def test_training_run_can_be_started_inside_a_running_event_loop():
    async def cell():
        async def value():
            return 7

        found = serve(lambda: (call_user(here), call_user(value), call_user(lambda: asyncio.run(value()))))
        await asyncio.sleep(0)  # the notebook's loop goes on
        return found

    assert asyncio.run(cell()) == (here(), 7, 7)


def test_exceptions_in_user_code_are_raised_in_the_run():
    class OwnError(Exception):
        pass

    def fails(error):
        raise error

    async def fails_later(error):
        raise error

    for function in (fails, fails_later):
        for error in (OwnError("no"), SystemExit(3), asyncio.CancelledError()):
            with pytest.raises(type(error)):
                serve(lambda: call_user(function, error))
    assert serve(lambda: call_user(here)) is here()  # and the next run is none the worse


def test_nested_run_started_by_user_code_calls_user_code_in_the_same_thread():
    assert serve(lambda: call_user(lambda: serve(lambda: call_user(here)))) is here()


def test_working_directory_and_torch_settings_are_restored_after_each_call_of_user_code(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def changes():
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")

    async def changes_later():
        await asyncio.sleep(0)
        changes()

    def state():
        modes = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
        return os.getcwd(), *modes, torch.get_float32_matmul_precision(), call_user(torch.is_grad_enabled)

    before = state()
    for function in (changes, changes_later):
        assert serve(lambda: (call_user(function), state())[1]) == before
        call_user(function)
        assert state() == before


def test_custom_loss_runs_with_the_gradient_mode_of_the_trainer():
    import torch

    def work():
        with torch.no_grad():
            off = call_user(torch.is_grad_enabled)
        return call_user(torch.is_grad_enabled), off

    with torch.no_grad():
        assert serve(work) == (True, False)


def test_failing_run_waits_for_unfinished_user_code_calls_in_other_threads():
    results, begun = [], threading.Event()

    async def judge():
        begun.set()
        for _ in range(100):
            await asyncio.sleep(0)
        return 7

    def work():
        threading.Thread(target=lambda: results.append(call_user(judge))).start()
        begun.wait()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve(work)
    while not results:  # the thread has its value and is about to take it
        pass
    assert results == [7]


def test_user_code_called_after_a_run_has_ended_runs_in_the_calling_thread():
    late, go = [], threading.Event()

    def ask():
        go.wait()
        late.append(call_user(here))

    thread = threading.Thread(target=ask)
    serve(thread.start)
    go.set()
    thread.join()
    assert late == [thread]


def test_ctrl_c_ends_the_run_and_cancels_user_coroutines():
    ended = []

    async def waits():
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("coroutine")

    def work():
        try:
            call_user(waits)
        finally:
            ended.append("run")

    with pytest.raises(KeyboardInterrupt):
        serve(work)
    assert sorted(ended) == ["coroutine", "run"]
    assert serve(lambda: call_user(here)) is here()


def test_ctrl_c_ends_a_run_that_calls_no_user_code():
    ended, begun = [], threading.Event()

    def work():
        try:
            begun.set()
            while True:
                pass
        finally:
            ended.append(True)

    def interrupt():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        serve(work)
    assert ended
