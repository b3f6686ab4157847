"""The operators in C++: they are compiled at first use, called through ctypes, and absent if they cannot be compiled.

A failure is not final: a full disk may have space a minute later, and a compiler that was killed may run. A server
without these operators is several times slower. So a later call tries again in the background, at growing intervals.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from loramux_kernels.native.abi import DTYPES, SIGNATURES, RuntimeAbi
from loramux_kernels.native.compiler import NativeUnavailable, compiled_library
from loramux_kernels.native.prebuilt import prebuilt_library

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 10.0
MAX_RETRY_SECONDS = 600.0

NO_TILES = -1


class NativeLoader:
    """Compiles and loads the operators. After a failure it tries again later, without making a caller wait."""

    def __init__(self, find: Callable[[], Path], clock: Callable[[], float] = time.monotonic) -> None:
        """`find` returns the compiled library, compiling it if needed; raises NativeUnavailable."""
        self._find = find
        self._clock = clock
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._failures = 0
        self._retry_at = 0.0
        self.retrying: threading.Thread | None = None

    def library(self) -> ctypes.CDLL | None:
        """Return the operators, or None; only the first call waits for the compiler."""
        if self._library is not None:
            return self._library
        with self._lock:
            if self._library is None and self._clock() >= self._retry_at:
                if self._failures == 0:
                    self._try()
                else:
                    self._retry_at = float("inf")  # until this attempt has ended
                    self.retrying = threading.Thread(target=self._try, daemon=True, name="native-operators")
                    self.retrying.start()
        return self._library

    def _try(self) -> None:
        try:
            library = _load(self._find())
        except (NativeUnavailable, OSError) as error:
            wait = min(FIRST_RETRY_SECONDS * 2**self._failures, MAX_RETRY_SECONDS)
            level = logging.WARNING if self._failures else logging.ERROR
            logger.log(
                level,
                "the CPU is served by torch's operators alone, several times slower: %s; trying again in %.0f seconds",
                error,
                wait,
            )
            self._failures += 1
            self._retry_at = self._clock() + wait
            return
        if self._failures:
            logger.warning(
                "the C++ operators are there now and serve LoRA and attention; restart to have linears use them too"
            )
        self._library = library


def _load(path: Path) -> ctypes.CDLL:
    """Load the library and give it torch's OpenMP runtime."""
    library = ctypes.CDLL(str(path))
    runtime = _runtime_of_torch()
    for name, argtypes in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, None
    library.loramux_use_runtime(runtime)
    return library


_loader = NativeLoader(lambda: prebuilt_library() or compiled_library())


def native_library() -> ctypes.CDLL | None:
    """Return the compiled operators, or None; the reason is logged."""
    return _loader.library()


def native_for(tensor: torch.Tensor) -> ctypes.CDLL | None:
    """Return the compiled operators if they serve tensors of this device and dtype, else None."""
    if tensor.device.type != "cpu" or (library := native_library()) is None:
        return None
    return library if tensor.dtype in _served_dtypes(library) else None


def bf16_unit() -> int:
    """Return the number of inputs that panels of bfloat16 multiply together: 2, or 4 on Arm.

    0 if the processor has no products of bfloat16, or there are no compiled operators.
    """
    library = native_library()
    return 0 if library is None else int(library.loramux_bf16_unit())


def has_tiles() -> bool:
    """Return whether this process may multiply by tiles (Intel's AMX). If the kernel refuses, the reason is logged."""
    library = native_library()
    found = NO_TILES if library is None else int(library.loramux_find_tiles())
    if found > 0:
        _log_refused_tiles(found)
    return found == 0


@functools.cache
def _log_refused_tiles(error: int) -> None:
    logger.warning("the processor multiplies tiles (AMX), but the kernel refuses them: %s", os.strerror(error))


@functools.cache
def _served_dtypes(library: ctypes.CDLL) -> frozenset[torch.dtype]:
    bits = library.loramux_dtypes()
    return frozenset(dtype for dtype, code in DTYPES.items() if bits >> code & 1)


def _runtime_of_torch() -> RuntimeAbi:
    """Return the OpenMP functions that torch uses: a second runtime's threads would compete with torch's for the cores.

    Raises NativeUnavailable if torch does not run its threads by OpenMP.
    """
    for loaded in (None, *loaded_libraries("libgomp"), "libgomp.so.1"):
        try:
            library = ctypes.CDLL(loaded)
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            return RuntimeAbi(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names))
        except (AttributeError, OSError):
            continue
    raise NativeUnavailable("this build of torch does not run its threads by OpenMP")


def loaded_libraries(name: str) -> list[str]:
    """Return the files of this process's libraries whose names begin with `name`; none if the system does not say.

    torch's wheels for Arm hold GCC's runtime under another name, such as `libgomp-a49a47f9.so.1.0.0`.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return sorted(file for file in files if Path(file).name.startswith(name))
