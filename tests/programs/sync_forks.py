"""Fork in several ways, add in parent and children, and write how each child has ended.

Arguments: URL, namespace, and "busy" if other threads are in the middle of their adds meanwhile.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable

from aiodigest import DigestEngine

url, namespace, busy = sys.argv[1], sys.argv[2], sys.argv[3:] == ["busy"]
warnings.filterwarnings("ignore", ".* multi-threaded", DeprecationWarning)  # of forks, since Python 3.12
engine = DigestEngine(url, namespace=namespace, value_type=int)


def add(name: str) -> None:
    engine.sync.add("k", 1, record_id=name)


def fork(name: str, forks: Callable[[], int] = os.fork, work: Callable[[str], None] = add) -> None:
    """A child that ends as a server's worker does, with all that Python does at the end of a process."""
    child = forks()
    if child == 0:
        work(name)
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
    add(f"parent of {name}")


def work(over: threading.Event, name: str) -> None:
    number = 0
    while not over.is_set():
        engine.sync.add("others", 1, record_id=f"{name}-{number}")
        number += 1


def main() -> None:
    getpid = os.getpid
    fork("first")  # nothing has been added before
    fork("second")
    fork("third", work=lambda name: None)  # it only ends
    process = multiprocessing.get_context("fork").Process(target=add, args=["fourth"])
    process.start()
    process.join()
    print(process.exitcode, flush=True)
    add("parent of fourth")
    number = os.getpid()
    os.getpid = lambda: number  # a number may come again that a process before has had
    fork("fifth")
    os.getpid = getpid
    if not busy:  # Python itself is not made for what comes now while other threads run
        fork("sixth", ctypes.PyDLL(None).fork)  # as a C program does that does not tell Python


over = threading.Event()
threads = [threading.Thread(target=work, args=[over, f"thread-{number}"]) for number in range(4 if busy else 0)]
for thread in threads:
    thread.start()
main()
over.set()
for thread in threads:
    thread.join()
