"""Markers by cost, the order of the tests, and options for the tests that can be made longer.

`make check` leaves out every marker of COSTS, `make test` leaves out `slow` alone, `make test-all` nothing.
"""

import functools
import os
from pathlib import Path

import httpx._config as httpx_config
import httpx._transports.default as httpx_transports
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Before torch is imported: threads that spin as they wait make a test on a busy machine take a hundred times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Every client of httpx and of OpenAI reads the certificates of the machine in 17 ms, and thousands of these clients
# speak plain HTTP.
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)

# Five seconds are too short for an answer on a machine that runs much else.
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx_config.DEFAULT_TIMEOUT_CONFIG, phase, 120.0)

# Hypothesis draws the same examples in every run, so a run without a change of code has the same outcome. Nightly runs,
# which leave out no marker, draw others. No example has a deadline, and no draw is too slow: other processes run too.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
hypothesis_settings.register_profile("same", derandomize=True, **UNTIMED)
hypothesis_settings.register_profile("random", **UNTIMED)

COSTS = {
    "server": ("tests/api/", "tests/attacks/", "tests/e2e/", "tests/demo/test_demo", "tests/simulation/"),
    "browser": ("tests/console/",),
    "interpreter": (
        *("tests/kernels/cuda/", "tests/kernels/test_cuda_interpreted", "tests/kernels/test_compile_check"),
        *("tests/kernels/test_narrower_processors", "tests/platform/engine/cuda/"),
    ),
    "families": ("tests/platform/engine/", "tests/platform/catalog/validation/", "tests/adapters/convert/"),
    "slow": ("tests/benchmarks/", "tests/console/test_screenshots"),
}
"""Markers of whole files, by the beginnings of their paths. A test that runs on PostgreSQL is `postgres`, too."""

LONGEST = (
    "tests/kernels/test_cuda_interpreted.py::test_gpu_code_passes_in_the_interpreter[engine]",
    "tests/kernels/test_cuda_interpreted",
    "tests/kernels/test_narrower_processors",
    "tests/kernels/test_compile_check",
    "tests/e2e/test_upgrade",
    "tests/e2e/test_batch_kills",
    "tests/e2e/test_training",
)
"""Beginnings of the ids of the tests that take longest, in their order: they go first, so no worker ends with one."""
DIVISIBLE = ("tests/kernels/test_cuda_interpreted",)
"""Files whose tests go to any worker, each alone. The tests of every other file share fixtures, and go together."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load the native operators before a test's own libraries: late in a long run they could not be loaded."""
    if hasattr(session.config, "workerinput"):
        from loramux_kernels.native.loader import native_library

        native_library()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") is None:
        hypothesis_settings.load_profile("same" if config.option.markexpr else "random")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=1, help="kill -9 each database's server so often (tests/e2e/test_kills.py)"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose marker the run leaves out: that takes longer than the tests of `make check`."""
    place = collection_path.relative_to(config.rootpath).as_posix()
    expression = config.option.markexpr
    return any(f"not {marker}" in expression and place.startswith(places) for marker, places in COSTS.items()) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by what it costs."""
    for item in items:
        for marker, places in COSTS.items():
            if item.nodeid.startswith(places):
                item.add_marker(marker)
        callspec = getattr(item, "callspec", None)
        uses_postgres = "postgres" in getattr(item, "fixturenames", ()) and callspec is None
        if uses_postgres or (callspec is not None and "postgresql" in callspec.params.values()):
            item.add_marker("postgres")
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    return next((place for place, path in enumerate(LONGEST) if item.nodeid.startswith(path)), len(LONGEST))


class ByFile(LoadFileScheduling):
    """Give a worker the next file of the order above."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(DIVISIBLE) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)
