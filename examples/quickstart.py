"""Five events in half a second become two messages: the first at once, the rest when the cool-down is over.

Run it with ``python examples/quickstart.py``. It needs no server: the default URL starts one of its own.
"""

import asyncio

from aiodigest import Digest, DigestEngine, Policy

mail = DigestEngine(namespace="quickstart", policy=Policy(minimum_delay=1, increment_delay=0.1, maximum_delay=5))


@mail.deliver
async def send_mail(digest: Digest) -> None:
    print(f"{digest.key} gets one message: {[record.value for record in digest.records]}")


async def main() -> None:
    async with mail.delivering():
        for number in range(1, 6):
            await mail.add("user:42", f"build {number} failed")
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)


asyncio.run(main())
