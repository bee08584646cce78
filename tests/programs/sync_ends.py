"""Add from threads without an event loop, and end in one of several ways; nothing but what stands here is printed.

Arguments: URL, namespace, way, process of the server.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import redis

url, namespace, way, server = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


def come_too_late() -> None:
    """How many connections are left, and what an add says then."""
    client: Any = redis.Redis(port=urlsplit(url).port or 0)  # redis-py's types are of no help here
    print(sum(each["user"] == "suite" for each in client.client_list()), "left")
    client.close()
    try:
        engine.sync.add("k", 3)
    except BackendUnavailable as error:
        print(error)


if way == "ends_in_order":
    atexit.register(come_too_late)  # the first that is registered is called last
from aiodigest import BackendUnavailable, DigestEngine  # noqa: E402
from aiodigest.session import sync  # noqa: E402


def new_engine() -> DigestEngine[int]:
    timeout = 600  # which no end waits for
    return DigestEngine(url, namespace=namespace, value_type=int, timeout=timeout)


engine = new_engine()


def returns() -> None:
    print(engine.sync.add("k", 1), engine.sync.add("k", 2))


def ends_in_order() -> None:
    new_engine().sync.add("l", 1)
    engine.sync.add("k", 1)


def exits_in_a_thread() -> None:
    def work() -> None:
        print(engine.sync.add("k", 1), flush=True)
        sys.exit(3)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def is_interrupted() -> None:
    """Ctrl-C comes while an add waits for a server that does not answer."""
    engine.sync.add("k", 1)
    os.kill(server, signal.SIGSTOP)

    def interrupt() -> None:
        while not sync._bridge._under_way:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        engine.sync.add("k", 2)
    except KeyboardInterrupt:
        print("interrupted")
    os.kill(server, signal.SIGCONT)
    print(engine.sync.add("k", 3))


def leaves_a_server_that_hangs() -> None:
    engine.sync.add("k", 1)
    os.kill(server, signal.SIGSTOP)
    threading.Thread(target=engine.sync.add, args=["k", 2], daemon=True).start()
    while not sync._bridge._under_way:
        time.sleep(0.01)


def leaves_daemons() -> None:
    added = threading.Semaphore(0)

    def work() -> None:
        while True:
            engine.sync.add("k", 1)
            added.release()

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(20):
        added.acquire()


def is_outlived() -> None:
    """Another thread goes on when the main one has ended, and needs a new connection."""
    engine.sync.add("k", 1)

    def work() -> None:
        threading.main_thread().join()
        print(new_engine().sync.add("k", 2), flush=True)

    threading.Thread(target=work).start()


def adds_at_the_end() -> None:
    atexit.register(lambda: print(engine.sync.add("k", 2), flush=True))
    engine.sync.add("k", 1)


globals()[way]()
