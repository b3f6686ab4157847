"""Entry point of `python -m loramux_api`, which is the same as `loramux`."""

import signal

# Ctrl-C during the import of the first modules ends the process at once, without a traceback.
_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

from loramux_api.cli.main import main  # noqa: E402


def run() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, _interrupt)
    main()


if __name__ == "__main__":
    run()
