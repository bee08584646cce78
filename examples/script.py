"""A script, as cron or a build would call it, that adds a result for the service of service.py to mail:

python examples/script.py ann@example.org shop 7 failed
"""

import sys

from pydantic import BaseModel

from aiodigest import AiodigestError, DigestEngine


class Build(BaseModel):
    repo: str
    number: int
    status: str


builds = DigestEngine(namespace="builds", value_type=Build)


def main() -> None:
    _, person, repo, number, status = sys.argv
    try:
        # the same build again replaces what waits, so that a script that is tried again tells nobody twice
        due = builds.sync.add(person, Build(repo=repo, number=int(number), status=status), record_id=f"{repo}-{number}")
    except AiodigestError as error:
        sys.exit(f"not added: {error}")
    print("it is mailed now" if due else "it is mailed with others")


if __name__ == "__main__":
    main()
