"""Options for the tests that can be made longer."""

import os

import pytest

# Before torch is imported: threads that spin as they wait make a test on a busy machine take a hundred times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load the native operators before a test's own libraries: late in a long run they could not be loaded."""
    if hasattr(session.config, "workerinput"):
        from loramux_kernels.native.loader import native_library

        native_library()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=1, help="kill -9 each database's server so often (tests/e2e/test_kills.py)"
    )
