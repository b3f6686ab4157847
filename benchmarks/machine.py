"""The measured machine: its description, its memory bandwidth, and the resources that a run uses."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import msgspec
import psutil
from measurements import Resources
from specs import BENCHMARKS, ITEM_SIZES

TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
TELLING_VARIABLES = ("OMP_", "KMP_", "MKL_", "ONEDNN_", "ATEN_", "CXX")
"""Beginnings of the names of variables that change threads, instructions or the compiled operators."""
PACKAGES = ("torch", "transformers", "peft")
SAMPLE_SECONDS = 2.0
"""Between two looks at memory; reading a large tree's page tables costs tens of milliseconds."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, tag="machine"):
    """The machine and the versions of a comparison."""

    date: str
    commit: str
    cpu: str
    cores: int
    flags: list[str]
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    environment: dict[str, str]
    bandwidth_bytes_per_s: float
    operations_per_s: dict[str, float] = {}
    """Operations per second of a product of matrices as large as a prompt's, by dtype."""


def describe(threads: int) -> Machine:
    """Describe this machine, and measure its memory bandwidth for a second or two."""
    cpuinfo = _cpuinfo()
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    return Machine(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commit=_commit(),
        cpu=cpuinfo.get("model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        flags=[flag for flag in TELLING_FLAGS if flag in flags],
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        environment={k: v for k, v in sorted(os.environ.items()) if k.startswith(TELLING_VARIABLES)},
        bandwidth_bytes_per_s=reading_rate(threads),
        operations_per_s={dtype: multiplying_rate(threads, dtype) for dtype in ITEM_SIZES},
    )


def reading_rate(threads: int) -> float:
    """Bytes a second that `threads` threads read from memory."""
    import torch

    from loramux_kernels.format_choice import read_bandwidth

    torch.set_num_threads(threads)
    return read_bandwidth(1 << 30)


def multiplying_rate(threads: int, dtype: str, tries: int = 5) -> float:
    """Operations a second of torch's product of 512 rows with a layer's weights; the best of `tries`."""
    import torch

    torch.set_num_threads(threads)
    rows, width, columns = 512, 1280, 3840
    x, w = (torch.randn(count, width).to(getattr(torch, dtype)) for count in (rows, columns))
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        seconds.append(time.perf_counter() - start)
    return 2 * rows * width * columns / min(seconds)


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=BENCHMARKS, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit or 'unknown'}{' with local changes' if git('status', '--porcelain') else ''}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


# ---- the resources of a window of time


class Watch:
    """Measures, from entering to leaving, a process tree's peak memory and the processor time of this tree and of other
    processes.

    `resources` is available after leaving. The load generator's own process counts as processor time, not as memory.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._peak = 0
        self.resources: Resources

    def __enter__(self) -> Watch:
        self._start = time.perf_counter()
        self._own, self._all = self._own_seconds(), _busy_seconds()
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall = time.perf_counter() - self._start
        own, busy = self._own_seconds() - self._own, _busy_seconds() - self._all
        self._done.set()
        self._sampler.join()
        self._peak = max(self._peak, tree_pss(self._process))
        self.resources = Resources(
            peak_pss_bytes=self._peak, own_cores=own / wall, other_cores=max(0.0, (busy - own) / wall)
        )

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, tree_pss(self._process))

    def _own_seconds(self) -> float:
        processes = {p.pid: p for p in (*_tree(self._process), psutil.Process())}
        return sum(_cpu_seconds(p) for p in processes.values())


def tree_pss(root: psutil.Process) -> int:
    """Return the bytes of `root` and its descendants. Pages that processes share are divided among them."""
    return sum(_pss(process) for process in _tree(root))


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _pss(process: psutil.Process) -> int:
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0)


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "softirq", 0.0))
