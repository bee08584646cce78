"""``aiodigest`` and ``python -m aiodigest``: the command line, or the one line that says how to install it."""

import sys

from aiodigest._interrupt import INTERRUPTED, loaded


def main() -> None:
    """Run the command line. Its libraries (typer, rich) are an extra, which may not be installed."""
    try:
        try:
            from aiodigest.cli.app import run
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("typer", "rich"):
                raise
            sys.exit("aiodigest: the command line is not installed: pip install 'aiodigest[standard]'")
        loaded()
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
