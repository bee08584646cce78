"""``aiodigest`` and ``python -m aiodigest``: the command line, or the one line that says how to install it."""

import sys


def main() -> None:
    """Run the command line. What it is made of (typer, rich) is an extra, which need not be installed."""
    try:
        try:
            from aiodigest.commands.app import run
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("typer", "rich"):
                raise
            sys.exit("aiodigest: the command line is not installed: pip install 'aiodigest[standard]'")
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
