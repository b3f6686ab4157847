"""`python -m loramux_api` is `loramux`."""

import signal

# Ctrl-C while the first modules are imported ends the process at once, without a traceback.
_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

from loramux_api.cli.main import main  # noqa: E402


def run() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, _interrupt)
    main()


if __name__ == "__main__":
    run()
