"""``aiodigest`` and ``python -m aiodigest``: the command line, or the one line that says how to install it."""

import signal
import sys


def main() -> None:
    """Run the command line. Its libraries (typer, rich) are an extra, which may not be installed."""
    try:
        from aiodigest.cli.app import run

        sys.exit(run())
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit("aiodigest: the command line is not installed: pip install 'aiodigest[standard]'")
    except KeyboardInterrupt:  # while the command loads: later it ends in its own way
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
