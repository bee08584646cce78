"""Do what a test says, line by line, with the ``aiodigest`` that PYTHONPATH names; tell what was done.

Arguments: URL, namespace. The first line tells which package this is. Each command is a JSON list, and is answered by
its own line; deliveries are told as they happen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiodigest
from aiodigest import BackoffMode, Digest, DigestEngine, Entry, PartialFailure, Policy, Reject, RetryPolicy

policy = Policy(minimum_delay=0.02, increment_delay=0.005, maximum_delay=0.05, max_size=20)


def engine_of() -> DigestEngine[int]:
    return DigestEngine(
        sys.argv[1],
        namespace=sys.argv[2],
        value_type=int,
        policy=policy,
        retry=RetryPolicy(backoff=lambda _: 3600),
        backoff_mode=BackoffMode(threshold=10_000),
        timeout=60,
    )


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def fail(digest: Digest[int]) -> None:
    """Fail as the key says."""
    ids = [record.id for record in digest.records]
    match digest.key.partition("-")[0]:
        case "splits":
            tell(delivered=ids[1:])
            raise PartialFailure({ids[0]: "later"})
        case "fails":
            tell(failed=digest.key)
            raise RuntimeError("not yet")
        case "dies":
            tell(failed=digest.key)
            raise Reject("not yet")
        case _:
            tell(delivered=ids)


async def accept(digest: Digest[int]) -> None:
    tell(delivered=[record.id for record in digest.records])


async def main() -> None:
    tell(package=aiodigest.__file__)
    async with engine_of() as engine:
        worker = AsyncExitStack()
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, *arguments = json.loads(line)
            answer: Any = None
            match name:
                case "add":
                    answer = [record_id for _, record_id in arguments]
                    await engine.add_many(Entry(key, 1, record_id=record_id) for key, record_id in arguments)
                case "work":
                    callback = {"fail": fail, "accept": accept}[arguments[0]]
                    await worker.enter_async_context(engine_of().delivering(callback))
                case "rest":
                    await worker.aclose()
                case "flush":
                    answer = [await engine.flush(key) for key in arguments]
                case "replay":
                    letters = [letter.id async for letter in engine.dead_letters()]
                    answer = [await engine.replay(letter) for letter in letters]
                case "reshard":
                    answer = [None async for _ in engine.reshard(arguments[0])]
                case _:
                    stats = await engine.stats()
                    answer = {name: getattr(stats, name) for name in ("waiting", "ready", "leased", "dead", "buried")}
            tell(did=name, answer=answer)
        await worker.aclose()


asyncio.run(main())
