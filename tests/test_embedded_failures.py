"""The embedded server after a crash, on a full disk, and with its files deleted, moved, replaced or damaged under it.

It is up again; nothing that it acknowledged is lost without a word, and there are no two servers for long.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions
from embedded_users import (
    NewUser,
    all_told,
    lives,
    opened_by,
    pid_of,
    processes_of,
    seconds_used,
    serve_by,
    started,
    supervisor_of,
    waits,
    works,
)
from replicas import until
from servers import UNLIMITED, limit_files

from aiodigest import DigestEngine, data_folder
from aiodigest.backends.embedded.server import EmbeddedServer, find_binary
from aiodigest.errors import BackendUnavailable, ConfigurationError

pytestmark = pytest.mark.server_faults

FOLDER = "its folder {}, or the lock in it, was deleted, moved or replaced"
APPEND_ONLY = "an append-only file in {} was deleted or replaced"
SOCKET = "its socket {}/run/keeper.sock was deleted or replaced"
LONG = "a name that is too long for a socket " * 5


def move(path: Path) -> Path:
    return path.rename(path.with_name("moved"))


def delete(path: Path) -> None:
    """Its name is gone at once: the processes that use a folder may put something into it meanwhile."""
    moved = move(path)
    if moved.is_dir():
        shutil.rmtree(moved, ignore_errors=True)
    else:
        moved.unlink()


def replace(path: Path) -> None:
    """By a copy."""
    moved = move(path)
    if moved.is_dir():
        shutil.copytree(moved, path, ignore=shutil.ignore_patterns("*.sock"))
    else:
        shutil.copy(moved, path)


async def fill(folder: Path) -> Path:
    """The file with what 100 adds wrote; the server is gone."""
    async with started(folder) as (_, client):
        for number in range(100):
            await client.rpush("list", f"value {number}")
    (file,) = folder.rglob("*.incr.aof")
    return file


async def write_until_it_fails(client: redis.asyncio.Redis, size: int = 1) -> int:
    """The number of writes that were acknowledged."""
    acknowledged = 0
    with suppress(redis.exceptions.RedisError, OSError):
        while True:
            acknowledged = await client.rpush("list", "x" * size)
    return acknowledged


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


async def test_a_server_that_keeps_crashing_is_started_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_crowd_that_waits_is_no_sign_of_an_orphan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodigest.backends.embedded.server._ORPHANED_AFTER", 0.05)
    async with started(folder) as (server, client):
        first = pid_of(server)
        supervisor, crowd = supervisor_of(first), list[socket.socket]()
        other, tries = EmbeddedServer(folder), list[None]()
        connect = other._connect

        def counted() -> object:
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


async def test_the_server_itself_holds_the_lock_of_its_folder(folder: Path) -> None:
    async with started(folder) as (server, _):
        assert str(folder / "lock") in opened_by(pid_of(server))


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


async def test_when_the_disk_refuses_writes_the_reason_is_told_until_it_takes_them(folder: Path, hasty: None) -> None:
    async with started(folder) as (server, client):
        assert await client.rpush("list", "x")
        supervisor = supervisor_of(pid_of(server))
        for pid in (supervisor, pid_of(server)):
            limit_files(pid, 20_000)
        acknowledged = await write_until_it_fails(client)
        await until(lambda: server.why_down() is not None)
        reason = f"embedded server in {folder} is down: exit status 1: .* writing to the AOF .* MB are free on the disk"
        assert re.search(reason, server.why_down() or "")
        with pytest.raises(BackendUnavailable, match=reason):
            await EmbeddedServer(folder).start()
        limit_files(supervisor, UNLIMITED)
        await until(lambda: server.why_down() is None)
        assert await client.llen("list") in (acknowledged, acknowledged + 1)
        assert await client.rpush("list", "y")


async def test_a_start_on_a_full_disk_says_so_and_leaves_nothing(folder: Path, new_user: NewUser) -> None:
    said = await new_user(before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))").says()
    assert said.startswith(f"BackendUnavailable the embedded server in {folder} is down: exit status 1: ")
    assert "File too large" in said


def leave_no_descriptor(pid: int) -> tuple[int, int]:
    """What it may have, so that it can be given back."""
    taken, limits = set(map(int, os.listdir(f"/proc/{pid}/fd"))), resource.prlimit(pid, resource.RLIMIT_NOFILE)
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, limits[1]))
    return limits


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
        assert supervisor_of(pid_of(server)) == supervisor


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


@pytest.mark.parametrize(
    ("name", "lose", "reason"),
    [
        *(("", lose, FOLDER) for lose in (delete, move, replace)),
        *(("lock", lose, FOLDER) for lose in (delete, replace)),
        *(("appendonlydir", lose, APPEND_ONLY) for lose in (delete, replace)),
        *(("appendonlydir/appendonly.aof.1.incr.aof", lose, APPEND_ONLY) for lose in (delete, replace)),
        ("appendonlydir/appendonly.aof.manifest", delete, APPEND_ONLY),
        ("run", delete, SOCKET),
        ("run/keeper.sock", delete, SOCKET),
        ("run/server.sock", delete, "its socket {}/run/server.sock was deleted or replaced"),
    ],
)
async def test_a_server_whose_files_are_gone_is_killed_with_the_reason_and_another_started(
    folder: Path, name: str, lose: Callable[[Path], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(folder) as (server, _):
        told, first = all_told(server, monkeypatch), pid_of(server)
        lose(folder / name)
        await until(lambda: told)
        assert reason.format(folder) in (told[0][1] or "")
        await until(lambda: not lives(first))
        if not name.startswith("appendonlydir/"):  # what is left of those may not do for a start
            await until(lambda: server.pid != first and server.why_down() is None)


async def test_what_was_acknowledged_until_the_folder_was_moved_is_in_the_moved_folder(folder: Path) -> None:
    async with started(folder) as (_, client):
        for _ in range(100):
            await client.rpush("list", "x")
        move(folder)
        acknowledged = max(100, await write_until_it_fails(client))
    async with started(folder.with_name("moved")) as (_, client):
        assert await client.llen("list") in (acknowledged, acknowledged + 1)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["sockets in the folder", "sockets elsewhere"])
async def test_who_comes_after_a_replaced_folder_gets_the_server_that_stays(folder: Path, elsewhere: bool) -> None:
    folder = folder / LONG if elsewhere else folder
    async with started(folder) as (server, _):
        first = pid_of(server)
        delete(folder)
        if elsewhere:
            folder.mkdir()
            server.socket.with_name("keeper.sock").unlink()  # so that the other does not join it
        async with started(folder) as (other, client):
            second = other.pid
            assert second != first
            await client.set("key", "value")
            await until(lambda: not lives(first) and server.pid == second)
            await client.connection_pool.disconnect()  # its socket is still there for new connections
            assert await client.get("key") == "value"
            assert other.pid == second
    await until(lambda: not server.socket.parent.exists())


async def test_a_slow_server_is_not_taken_for_up_by_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder / LONG
    async with started(folder) as (server, _):
        old = supervisor_of(pid_of(server))
        os.kill(old, signal.SIGSTOP)  # it is slow to see that its folder is gone
        try:
            delete(folder)
            folder.mkdir()
            server.socket.with_name("keeper.sock").unlink()
            go = folder / "go"
            slow = f"""[ "$*" = --version ] || until [ -e '{go}' ]; do sleep 0.01; done; exec {find_binary()} "$@\""""
            serve_by(monkeypatch, folder / "server", f"#!/bin/sh\n{slow}")
            other = EmbeddedServer(folder)
            starting = asyncio.create_task(other.start())
            await until(lambda: other.pid or starting.done())
            if not starting.done():
                new = supervisor_of(other.pid or 0)
                began = waits(new)
                await until(lambda: waits(new) > began + 5 or starting.done())  # it has asked several times
            assert not starting.done()
            go.touch()
            async with redis.asyncio.Redis.from_url(await starting) as client:
                assert (await client.info("server"))["process_id"] == other.pid
            await other.stop()
        finally:
            os.kill(old, signal.SIGCONT)


async def test_who_finds_no_socket_gets_into_the_same_folder_all_the_same(folder: Path) -> None:
    """As when /tmp was cleaned of old files."""
    folder = folder / LONG
    async with started(folder) as (server, client):
        await client.set("key", "value")
        delete(server.socket.parent)
        async with started(folder) as (other, client):
            assert await client.get("key") == "value"
            await until(lambda: server.pid == other.pid)


async def test_append_only_files_that_the_server_itself_replaces_are_not_missed(folder: Path) -> None:
    async with started(folder) as (server, client):
        first = pid_of(server)
        supervisor = supervisor_of(first)
        for name in "ab":
            await client.set(name, "x" * 1000)
            await client.bgrewriteaof()
            async with asyncio.timeout(60):
                while (await client.info("persistence"))["aof_rewrite_in_progress"]:
                    pass
            begin = waits(supervisor)
            await until(lambda begin=begin: waits(supervisor) > begin + 3)  # it has looked, twice at least
        assert (server.pid, supervisor_of(first)) == (first, supervisor)
        assert (folder / "appendonlydir" / "appendonly.aof.3.incr.aof").exists()


async def test_damage_that_the_server_does_not_understand_is_told_and_kept(folder: Path) -> None:
    file = await fill(folder)
    damaged = file.read_bytes().replace(b"value 50", b"\0GARBAGE\0" * 3)
    file.write_bytes(damaged)
    with pytest.raises(ConfigurationError, match=r"Bad file format .*-check-aof --fix .* or move .* away"):
        await EmbeddedServer(folder).start()
    assert file.read_bytes() == damaged
    with pytest.raises(ConfigurationError, match="Bad file format"):  # and nobody waits for it to come back
        async with DigestEngine(f"embedded://{folder}", namespace="damaged"):
            pass


@pytest.mark.parametrize("unfinished", [b"", b"*3\r\n$3\r\nSET\r\n$3\r\nke"], ids=["", "an unfinished write"])
@pytest.mark.parametrize("zeros", [1, 200_000])
async def test_zeros_at_the_end_of_the_file_are_cut_off(folder: Path, unfinished: bytes, zeros: int) -> None:
    """What a power cut leaves where the size of a file was written and its blocks were not."""
    file = await fill(folder)
    whole = file.read_bytes()
    damaged = whole + unfinished + bytes(zeros)
    file.write_bytes(damaged)
    async with started(folder) as (_, client):
        assert await client.llen("list") == 100
    assert file.read_bytes().startswith(whole)
    assert not file.read_bytes().endswith(b"\0")
    copies = sorted(folder.glob("*.before-repair"))
    assert copies[0].read_bytes() == damaged
    async with started(folder) as (_, client):
        assert await client.llen("list") == 100
    assert sorted(folder.glob("*.before-repair")) == copies


async def test_without_room_for_the_copy_zeros_are_kept(folder: Path, new_user: NewUser) -> None:
    file = await fill(folder)
    with file.open("ab") as end:
        end.write(bytes(100))
    whole = file.read_bytes()
    limited = new_user(before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))")
    said = await limited.says()
    assert said.startswith("BackendUnavailable")
    assert "before it is repaired it must be copied: " in said
    assert file.read_bytes() == whole


async def test_data_of_a_newer_version_or_another_program_is_told_and_kept(folder: Path) -> None:
    await fill(folder)
    (file,) = folder.rglob("*.base.rdb")
    newer = b"REDIS0999" + file.read_bytes()[9:]
    for data, told in ((newer, "Can't handle RDB format version 999"), (b"x" * 99, "Bad file format")):
        file.write_bytes(data)
        with pytest.raises(ConfigurationError, match=f"{told} .*AIODIGEST_SERVER"):
            await EmbeddedServer(folder).start()
        assert file.read_bytes() == data


async def test_who_comes_after_the_files_were_put_back_is_not_refused_for_what_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(folder) as (server, client):
        await client.set("key", "value")
        told = all_told(server, monkeypatch)
        (file,) = folder.rglob("*.base.rdb")
        whole = file.read_bytes()
        file.write_bytes(b"x" * 99)
        os.kill(pid_of(server), signal.SIGKILL)
        await until(lambda: any("Bad file format" in (reason or "") for _, reason in told))
        with pytest.raises(ConfigurationError, match="Bad file format"):
            await EmbeddedServer(folder).start()
        file.write_bytes(whole)
        async with started(folder) as (_, client):
            assert await client.get("key") == "value"
        await until(lambda: server.why_down() is None)


async def test_a_server_that_knows_no_folder_of_files_does_not_begin_with_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(folder)
    serve_by(monkeypatch, folder.parent / "server", "#!/bin/sh\necho 'Redis server v=6.2.5 sha=0'")
    with pytest.raises(ConfigurationError, match=f"what is in {folder} is of a newer server than .*AIODIGEST_SERVER"):
        await EmbeddedServer(folder).start()


async def test_the_only_file_of_another_server_is_not_taken_for_nothing(folder: Path) -> None:
    folder.mkdir()
    (folder / "dump.rdb").write_bytes(b"REDIS0011")
    with pytest.raises(ConfigurationError, match=f"dump.rdb in {folder} is of another server"):
        await EmbeddedServer(folder).start()
    assert not (folder / "appendonlydir").exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.EPERM, errno.ENOTSUP], ids=errno.errorcode.get)
async def test_a_folder_that_cannot_hold_sockets_is_told_so(
    folder: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some that are mounted into a container are. There is none here, so the system call's answer is made up."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(
        ConfigurationError, match=f"the file system of {folder}/run cannot hold sockets .* AIODIGEST_DATA"
    ):
        await EmbeddedServer(folder).start()


async def test_before_a_server_cuts_off_the_end_of_its_file_there_is_a_copy(folder: Path) -> None:
    """A damaged length makes all that follows look like one write that was not completed."""
    file = await fill(folder)
    damaged = file.read_bytes().replace(b"$8\r\nvalue 50", b"$9999999\r\nvalue 50")
    file.write_bytes(damaged)
    async with started(folder) as (_, client):
        assert await client.llen("list") == 50
        assert await client.config_get("aof-load-truncated") == {"aof-load-truncated": "yes"}
    (copy,) = folder.glob("*.before-repair")
    assert copy.read_bytes() == damaged
    assert f"what it was is kept as {copy.name}" in (folder / "server.log").read_text()
    async with started(folder) as (_, client):
        assert await client.llen("list") == 50
        assert await client.config_get("aof-load-truncated") == {"aof-load-truncated": "no"}
    assert list(folder.glob("*.before-repair")) == [copy]


async def test_without_room_for_the_copy_nothing_is_cut_off(folder: Path, new_user: NewUser) -> None:
    file = await fill(folder)
    with file.open("ab") as end:
        end.write(b"*3\r\n$3\r\nSET\r\n$3\r\nke")
    whole = file.read_bytes()
    limited = new_user(before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))")
    assert "before it is repaired it must be copied: " in await limited.says()
    assert file.read_bytes() == whole
    assert not list(folder.glob("*.before-repair"))


async def test_files_without_their_manifest_are_not_taken_for_nothing(folder: Path) -> None:
    file = await fill(folder)
    whole = file.read_bytes()
    manifest = file.with_name("appendonly.aof.manifest")
    move(manifest)
    server = EmbeddedServer(folder)
    with pytest.raises(ConfigurationError, match=r"appendonly\.aof\.manifest is missing: put it back, or move"):
        await server.start()
    await until(lambda: not processes_of(server))
    assert file.read_bytes() == whole
    manifest.with_name("moved").rename(manifest)
    async with started(folder) as (_, client):
        assert await client.llen("list") == 100


@pytest.mark.parametrize(
    "death",
    [
        "EmbeddedServer._run_supervisor = lambda *_: os.kill(os.getpid(), 9)",
        """
run = EmbeddedServer._run_supervisor
EmbeddedServer._run_supervisor = lambda *a: (run(*a), os.kill(os.getpid(), 9))
""",
    ],
    ids=["before there is a supervisor", "before it is in"],
)
async def test_a_user_who_dies_at_a_launch_stands_in_nobodys_way(folder: Path, new_user: NewUser, death: str) -> None:
    assert await new_user(before=death).says() == ""
    async with started(folder) as (server, client):
        assert await client.set("key", "value")
    await until(lambda: not processes_of(server))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many containers: a user id without an entry, and no HOME."""

    def find_nobody(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in ("HOME", "XDG_DATA_HOME", "AIODIGEST_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", find_nobody)
    with pytest.raises(ConfigurationError, match="set AIODIGEST_DATA"):
        data_folder()
