"""The C++ twins of the operators: compiled at first use, called through ctypes, absent where nothing compiles them."""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from loramux_kernels.native.abi import DTYPES, SIGNATURES, RuntimeAbi
from loramux_kernels.native.compiler import NativeUnavailable, compiled_library

logger = logging.getLogger(__name__)


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The compiled operators, or None; the reason is logged once."""
    try:
        library = ctypes.CDLL(str(compiled_library()))
        runtime = _runtime_of_torch()
    except (NativeUnavailable, OSError) as error:
        logger.warning("serving from the CPU with torch's operators alone, several times slower: %s", error)
        return None
    for name, argtypes in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, None
    library.loramux_use_runtime(runtime)
    return library


def native_for(tensor: torch.Tensor) -> ctypes.CDLL | None:
    """The compiled operators where they serve tensors of this device and dtype, else None."""
    if tensor.device.type != "cpu" or (library := native_library()) is None:
        return None
    return library if tensor.dtype in _served_dtypes(library) else None


@functools.cache
def multiplies_bf16_pairs() -> bool:
    """Whether the compiled operators use this processor's bf16 dot products."""
    library = native_library()
    return library is not None and bool(library.loramux_multiplies_bf16_pairs())


@functools.cache
def _served_dtypes(library: ctypes.CDLL) -> frozenset[torch.dtype]:
    bits = library.loramux_dtypes()
    return frozenset(dtype for dtype, code in DTYPES.items() if bits >> code & 1)


def _runtime_of_torch() -> RuntimeAbi:
    """The OpenMP functions as torch sees them: a second runtime would bring threads that fight torch's for the cores.

    Raises NativeUnavailable where torch runs its threads by other means.
    """
    for loaded in (None, "libgomp.so.1"):
        try:
            library = ctypes.CDLL(loaded)
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            return RuntimeAbi(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names))
        except (AttributeError, OSError):
            continue
    raise NativeUnavailable("this build of torch does not run its threads by OpenMP")
