"""``engine.sync``: adds from threads without an event loop, from forked processes, and at the end of a process."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from clusters import until
from ports import free_port
from processes import PROGRAMS
from replicas import freeze, thaw
from servers import PASSWORD, USER, Server, running_server
from userland import DEADLINE, environment

from aiodigest import Bounds, DigestEngine, Entry, Policy
from aiodigest.errors import BackendUnavailable, ConfigurationError, InvalidArgument, LimitExceeded, PartialAdd
from aiodigest.session import sync


@pytest.fixture
def engine(server: Server, namespace: str) -> DigestEngine[int]:
    return DigestEngine(server.url, namespace=namespace, value_type=int)


def stored(url: str, namespace: str, key: str = "k") -> list[str]:
    """The ids that a timeline holds, sorted."""

    async def look() -> list[str]:
        async with DigestEngine(url, namespace=namespace) as engine:
            timeline = await engine.peek(key)
            return sorted(record.id for record in timeline.records) if timeline else []

    return asyncio.run(look())


def test_sync_adds_store_their_records_and_tell_whether_they_are_due(engine: DigestEngine[int], server: Server) -> None:
    assert engine.sync.add("k", 1, record_id="a", timestamp=1.5) is True
    assert engine.sync.add_many(Entry(key, 1, record_id=key) for key in ("k", "l", "k")) == [False, True, False]
    assert engine.sync.add_many([]) == []
    assert engine.sync.add("k", 1, record_id="a", urgent=True) is False  # it was due
    assert stored(server.url, engine.namespace) == ["a", "k"]
    threads = threading.active_count()
    other = DigestEngine(server.url, namespace=f"{engine.namespace}-other", value_type=str)
    assert other.sync.add("k", "text")
    assert threading.active_count() == threads, "all engines share one"


def test_sync_adds_raise_what_the_engine_raises(server: Server, namespace: str) -> None:
    engine = DigestEngine(server.url, namespace=namespace, value_type=int, bounds=Bounds(records=2))
    with pytest.raises(InvalidArgument, match="key") as refused:
        engine.sync.add("", 1)
    assert refused.value.__context__ is None, "its traceback tells of nothing else"
    with pytest.raises(InvalidArgument, match="entries one after another"):
        engine.sync.add_many(5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(LimitExceeded, match="at most 2"):
        engine.sync.add_many([Entry("k", 1)] * 3)
    with pytest.raises(PartialAdd) as raised:
        engine.sync.add_many([Entry("k", 1), Entry("", 1)])
    assert raised.value.results[0] is True
    assert isinstance(raised.value.results[1], InvalidArgument)


def test_entries_are_taken_in_the_thread_that_adds(engine: DigestEngine[int]) -> None:
    taking: list[threading.Thread] = []

    def entries() -> Iterator[Entry[int]]:
        taking.append(threading.current_thread())
        yield Entry("k", 1)

    assert engine.sync.add_many(entries()) == [True]
    assert taking == [threading.current_thread()]


def test_a_sync_add_is_traced_to_what_the_thread_was_doing(engine: DigestEngine[int]) -> None:
    doing: ContextVar[str] = ContextVar("doing")
    told: list[str] = []

    class Tracing:
        def context(self) -> bytes:
            told.append(doing.get("nothing"))
            return b""

        def delivering(self, digest: Any, contexts: Any) -> Any: ...

    engine.trace(Tracing())
    for request in ("first request", "second request"):
        doing.set(request)
        engine.sync.add("k", 1)
    assert told == ["first request", "second request"]


def test_fifty_threads_add_at_once_over_two_connections() -> None:
    with running_server() as server, server.client() as client:
        engine = DigestEngine(server.url, namespace="many", value_type=int, timeout=2 * DEADLINE)
        received = client.info("stats")["total_connections_received"]
        assert engine.sync.add("first", 1)

        def calls() -> int:
            return client.info("commandstats")["cmdstat_evalsha"]["calls"]

        def add(thread: int) -> None:
            engine.sync.add(f"k{thread % 5}", 1, record_id=f"{thread}")

        before = calls()
        freeze(server)  # until all have something to add
        with ThreadPoolExecutor(50) as pool:
            adding = [pool.submit(add, thread) for thread in range(50)]
            until(lambda: len(sync._bridge._under_way) >= 50, "all add")
            thaw(server)
        assert all(each.exception() is None for each in adding)
        assert calls() - before < 10, "adds of several threads go out in one call"
        assert client.info("stats")["total_connections_received"] - received <= 2
        held = [record for key in range(5) for record in stored(server.url, "many", f"k{key}")]
        assert sorted(held) == sorted(map(str, range(50)))


def test_an_engine_may_be_entered_and_used_by_threads_at_the_same_time(engine: DigestEngine[int]) -> None:
    async def serve() -> None:
        async with engine:
            assert await engine.add("k", 1)
            assert not await asyncio.to_thread(engine.sync.add, "k", 2)
            assert not await engine.add("k", 3)
        assert not await asyncio.to_thread(engine.sync.add, "k", 4), "and when it was left, too"
        with pytest.raises(ConfigurationError, match="not entered"):
            await engine.add("k", 5)

    asyncio.run(serve())
    assert not engine.sync.add("k", 6)
    assert engine.activity.adds == 5


async def test_a_sync_add_is_refused_where_it_would_block_an_event_loop(engine: DigestEngine[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"await engine\.add, "):
        engine.sync.add("k", 1)
    with pytest.raises(ConfigurationError, match=r"await engine\.add_many, "):
        engine.sync.add_many([])


def test_a_policy_function_may_raise_but_not_add_in_the_thread_that_serves_all(server: Server, namespace: str) -> None:
    def policy(key: str) -> Policy:
        if key == "adds":
            engine.sync.add("other", 1)
        if key == "exits":
            sys.exit(3)
        return Policy()

    engine = DigestEngine(server.url, namespace=namespace, value_type=int, policy=policy)
    with pytest.raises(ConfigurationError, match="would block"):
        engine.sync.add("adds", 1)
    with pytest.raises(SystemExit):
        engine.sync.add("exits", 1)
    assert engine.sync.add("other", 1)


def test_an_add_that_is_interrupted_is_withdrawn_and_the_others_go_on(server: Server, namespace: str) -> None:
    withdrawn = threading.Event()

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    async def policy(key: str) -> Policy:
        if key == "slow":
            os.kill(os.getpid(), signal.SIGUSR1)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                withdrawn.set()
                raise
        return Policy()

    engine = DigestEngine(server.url, namespace=namespace, value_type=int, policy=policy, timeout=2 * DEADLINE)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            engine.sync.add("slow", 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert withdrawn.wait(DEADLINE)
    assert engine.sync.add("k", 1)


def test_threads_whose_adds_are_cut_short_from_outside_hold_up_no_other() -> None:
    class Cut(Exception):
        pass

    def add(number: int) -> bool:
        idents[number] = threading.get_ident()
        return engine.sync.add("k", number, record_id=f"{number}")

    idents = dict[int, int]()
    with running_server() as server, ThreadPoolExecutor(20) as pool:
        engine = DigestEngine(server.url, namespace="cut", value_type=int, timeout=2 * DEADLINE)
        assert engine.sync.add("first", 1)
        freeze(server)
        adding = [pool.submit(add, number) for number in range(20)]
        until(lambda: len(sync._bridge._under_way) >= 20, "all add")
        for number in range(0, 20, 3):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(idents[number]), ctypes.py_object(Cut))
        thaw(server)
        for number, each in enumerate(adding):
            error = each.exception(DEADLINE)
            assert isinstance(error, Cut) if number % 3 == 0 else error is None
    until(lambda: not sync._bridge._ended, "nobody is left to be woken")


async def test_of_threads_whose_adds_have_ended_one_at_a_time_is_woken(
    engine: DigestEngine[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def add() -> bool:
        return True

    def woken() -> list[bool]:
        return [not call.waiting.locked() for call in calls]

    monkeypatch.setattr(sync, "LOOK", DEADLINE)  # nobody is helped along but by hand
    fresh: Any = sync.Bridge()
    calls = [sync.Call(engine, add, in_task=False, is_of_main=False) for _ in range(4)]
    for call in calls:
        call.waiting.acquire()
    fresh._ended += calls[:2]
    fresh._wake()
    fresh._ended += calls[2:]
    fresh._wake()
    assert woken() == [True, False, False, False], "the second answer wakes nobody while the first is woken"
    fresh._pass_on()
    assert woken() == [True, True, False, False]
    fresh._look()
    assert woken() == [True, True, False, False], "the second may have been woken just now"
    fresh._look()
    assert woken() == [True, True, True, False], "it has passed nothing on since the last look"
    fresh._pass_on()
    fresh._pass_on()
    assert woken() == [True] * 4
    assert fresh._woken is None


def test_a_thread_that_did_not_wake_the_next_holds_up_no_other(engine: DigestEngine[int]) -> None:
    assert engine.sync.add("k", 1)
    bridge: Any = sync._bridge
    bridge._woken = lost = sync.Call(engine, engine.health, in_task=True, is_of_main=False)  # of a thread that is gone
    with ThreadPoolExecutor(20) as pool:
        adding = [pool.submit(engine.sync.add, "k", number) for number in range(200)]
        assert not any(each.result(DEADLINE) for each in adding)
    until(lambda: bridge._woken is None and bridge._seen is None, "nothing of it is kept")
    assert lost not in bridge._ended


def test_an_add_is_begun_although_the_thread_that_was_to_ask_for_it_was_interrupted(
    engine: DigestEngine[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "PATIENCE", 0.01)
    assert engine.sync.add("k", 1)
    with ThreadPoolExecutor(1) as pool:
        sync._bridge._is_asked = True  # by a thread that asked for nothing in the end
        adding = pool.submit(engine.sync.add, "k", 2)
        try:
            assert adding.result(DEADLINE) is False
        finally:
            sync._bridge._ask()


def test_threads_that_find_no_room_in_the_queue_wait_for_some() -> None:
    with running_server() as server, ThreadPoolExecutor(40) as pool:
        engine = DigestEngine(server.url, namespace="full", value_type=str, timeout=2 * DEADLINE)
        assert engine.sync.add("k", "first", record_id="first")
        freeze(server)
        value = os.urandom(500_000).hex()  # 40 of which are more than the queue holds, compressed too
        adding = [pool.submit(engine.sync.add, "k", value, record_id=f"{number}") for number in range(40)]
        until(lambda: len(sync._bridge._under_way) >= 40 or any(each.done() for each in adding), "all add")
        thaw(server)
        assert [each.result(DEADLINE) for each in adding] == [False] * 40
        assert len(stored(server.url, "full")) == 41


def test_a_policy_function_may_use_whatever_takes_a_task(server: Server, namespace: str) -> None:
    async def policy(key: str) -> Policy:
        async with asyncio.timeout(DEADLINE):
            await asyncio.sleep(0)
        return Policy()

    engine = DigestEngine(server.url, namespace=namespace, value_type=int, policy=policy)
    assert engine.sync.add("k", 1)
    assert engine.sync.add_many([Entry("l", 1)]) == [True]


def test_the_connections_of_an_engine_that_nobody_holds_are_closed() -> None:
    with running_server() as server, server.client() as client:
        before = len(client.client_list())
        for number in range(3):
            DigestEngine(server.url, namespace=f"short-{number}", value_type=int).sync.add("k", 1)
        gc.collect()
        until(lambda: len(client.client_list()) == before, "they are closed")


def test_a_server_that_is_away_is_told_and_used_again_when_it_is_back() -> None:
    with running_server() as server:
        server.stop()
        engine = DigestEngine(server.url, namespace="back", value_type=int, timeout=60)
        for _ in range(2):
            with pytest.raises(BackendUnavailable) as raised:
                engine.sync.add("k", 1, record_id="a")
            assert (raised.value.record_id, raised.value.stored) == ("a", "no")
            assert engine.activity.unavailable
        server.start()
        assert engine.sync.add("k", 1)
        server.stop()
        with pytest.raises(PartialAdd):
            engine.sync.add_many([Entry("k", 1)])
        server.start()
        assert engine.sync.add("k", 1)
        assert not engine.activity.unavailable


def test_a_missing_thread_is_told_as_an_outage(server: Server, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fresh = sync.Bridge()
    monkeypatch.setattr(sync, "_bridge", fresh)
    engine = DigestEngine(server.url, namespace=namespace, value_type=int)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendUnavailable, match="can't start new thread"):
            engine.sync.add("k", 1)
    assert engine.sync.add("k", 1)
    fresh.end()


@pytest.mark.parametrize(
    ("owner", "name"), [(asyncio, "new_event_loop"), (threading.Thread, "start"), (threading.Event, "wait")]
)
def test_a_signal_handler_may_add_while_the_thread_is_started(
    owner: Any, name: str, server: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(number: int, frame: object) -> None:
        answers.append(engine.sync.add("k", 1, record_id="of the handler"))

    def interrupted(*args: Any) -> Any:
        patch.undo()
        os.kill(os.getpid(), signal.SIGUSR1)
        return of_python(*args)

    of_python, answers = getattr(owner, name), list[bool]()
    fresh = sync.Bridge()
    monkeypatch.setattr(sync, "_bridge", fresh)
    engine = DigestEngine(server.url, namespace=namespace, value_type=int)
    before = signal.signal(signal.SIGUSR1, add)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            answers.append(engine.sync.add("k", 1, record_id="of the thread"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert answers == [True, False]
    assert stored(server.url, namespace) == ["of the handler", "of the thread"]
    fresh.end()
    assert fresh._loop is not None
    assert fresh._loop.is_closed(), "the end has found the thread"


def test_an_add_interrupted_at_a_close_is_silent(engine: DigestEngine[int], caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> bool:
        asyncio.get_running_loop().stop()  # before the thread that waits is told
        stopped.set()
        return True

    fresh: Any = sync.Bridge()
    stopped = threading.Event()
    fresh._sessions[engine] = None  # as if it had one
    call = sync.Call(engine, end, in_task=True, is_of_main=True)
    assert fresh._submit(call)
    assert stopped.wait(DEADLINE)
    with fresh._turning:  # when the thread has ended
        fresh._loop.close()
    fresh._withdraw(call)
    assert caplog.records == []


def run(program: str, data: Path, *arguments: object) -> list[str]:
    """What a program prints (or ``-c`` and its text), which ends well, and has no complaint, even of what Python keeps
    quiet about."""
    path = program if program == "-c" else PROGRAMS / program
    command = [sys.executable, path, *map(str, arguments)]
    pipe, env = subprocess.PIPE, environment(data)
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its children
            raise
    assert (process.returncode, errors) == (0, "")
    return output.split()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "printed"),
    [
        ("returns", ["True", "False"]),
        ("ends_in_order", ["0", "left", "the", "process", "is", "ending"]),
        ("exits_in_a_thread", ["True"]),
        ("is_interrupted", ["interrupted", "False"]),
        ("leaves_daemons", []),
        ("leaves_a_server_that_hangs", []),
        ("is_outlived", ["False"]),
        ("adds_at_the_end", ["False"]),
    ],
)
def test_a_process_that_adds_may_end_in_any_way(way: str, printed: list[str], data: Path) -> None:
    port = free_port()
    with running_server("--port", str(port)) as server:
        assert server.process is not None
        url = f"redis://{USER}:{PASSWORD}@localhost:{port}/0"  # a name, which is looked up in a thread
        try:
            assert run("sync_ends.py", data, url, way, way, server.process.pid) == printed
        finally:
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.processes
def test_a_process_that_adds_to_an_embedded_server_ends_like_any_other(data: Path) -> None:
    assert run("sync_ends.py", data, f"embedded://{data / 'data'}", "embedded", "returns", 0) == ["True", "False"]
    until(lambda: not (data / "data" / "run" / "server.sock").exists(), "the server is gone")


@pytest.mark.processes
def test_an_add_imports_nothing_since_a_child_forked_meanwhile_would_wait_for_ever_to_import_it(data: Path) -> None:
    program = (
        "import sys; from aiodigest import DigestEngine\n"
        "engine = DigestEngine(sys.argv[1], namespace='imports', value_type=str); before = {*sys.modules}\n"
        "engine.sync.add('k', 'large ' * 1000); print(*{*sys.modules} - before)"
    )
    port = free_port()
    with running_server("--port", str(port), "--bind", "127.0.0.1"):
        url = f"redis://{USER}:{PASSWORD}@localhost:{port}/0"
        assert run("-c", data, program, url) == []


@pytest.mark.processes
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_forked_processes_add_by_themselves_and_leave_connections_of_their_parent_alone(busy: bool, data: Path) -> None:
    names = ["first", "second", "third", "fourth", "fifth", *([] if busy else ["sixth"])]
    with running_server() as server, server.client() as client:
        before = client.info("stats")["total_connections_received"]
        ended = run("sync_forks.py", data, server.url, "forks", *(["busy"] if busy else []))
        assert ended == ["0"] * len(names)
        connections = client.info("stats")["total_connections_received"] - before
        assert busy or connections == 1 + 5, "the parent has kept its own, and each child that adds has one"
        expected = {f"parent of {name}" for name in names} | {name for name in names if name != "third"}
        assert set(stored(server.url, "forks")) == expected
