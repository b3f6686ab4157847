"""Options for the tests that can be made longer."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=1, help="kill -9 each database's server so often (tests/e2e/test_kills.py)"
    )
