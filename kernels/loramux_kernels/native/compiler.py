"""Compiles the C++ operators for this machine's processor, once, into a cache that later processes share."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
"""Commands to look for on PATH, in this order, after the variable CXX."""

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast", "-w")
"""Flags of every compiler. GCC contracts `a + b * c` to one instruction by itself; clang only within one expression of
plain numbers, and then multiplies and adds a vector's halves separately, at half the speed."""

LIBRARIES = ("-lstdc++",) if sys.platform == "linux" else ()
"""Libraries to link. A $CXX of `gcc` compiles C++ but does not link its library: the result could not be loaded.

PEFT's BOFT sets CXX for the whole process while it builds its own kernel (`get_fbd_cuda` in
peft/tuners/boft/layer.py).
"""


class NativeUnavailable(RuntimeError):
    """The C++ operators cannot be built here; the message names the program to install or repair."""


def compiled_library() -> Path:
    """Return the shared library for this processor, compiled if the cache does not hold it.

    Raises NativeUnavailable without a compiler, or if the compiler fails.
    """
    compiler, files = find_compiler(), sources()
    command = (*compiler, *FLAGS, _tuned_for_this_processor())
    target = cache_directory() / _fingerprint((*command, *LIBRARIES), files) / "libloramux.so"
    if not target.exists():
        logger.info("compiling the C++ operators for this processor: this takes minutes, once on a machine")
        compile_library([*command, *(str(s) for s in files if s.suffix == ".cpp"), *LIBRARIES], target)
    return target


def find_compiler() -> tuple[str, ...]:
    """Return the C++ compiler's command; raises NativeUnavailable if none is installed."""
    chosen = os.environ.get("CXX", "").split()
    for command in (chosen, *((name,) for name in COMPILERS)):
        if command and (path := shutil.which(command[0])):
            return (path, *command[1:])
    raise NativeUnavailable(
        "no C++ compiler on PATH (looked for $CXX, c++, g++, clang++); install one, such as the packages "
        "g++ (Debian, Ubuntu), gcc-c++ (Fedora) or the Xcode command line tools (macOS)"
    )


def cache_directory() -> Path:
    """Return the folder of compiled libraries: LORAMUX_CACHE_DIR, or ~/.cache/loramux."""
    chosen = os.environ.get("LORAMUX_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "loramux"


def sources() -> list[Path]:
    """Return the files that the library is made of."""
    return sorted(Path(__file__).parent.glob("*.[ch]pp"))


def _tuned_for_this_processor() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _fingerprint(command: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a name that changes with everything that the compiled code depends on."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout  # noqa: S603 - as found
    digest = hashlib.sha256("\0".join(command).encode() + version + processor_facts())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def processor_facts() -> bytes:
    """Return the processor's features: several kinds of machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    facts = (b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(sorted({line for line in lines if line.startswith(facts)}))


def compile_library(command: Sequence[str], target: Path) -> None:
    """Run a compiler's command and move its output to `target`. Raises NativeUnavailable.

    Another process may compile the same library at the same time. Each process writes a separate file, and the last
    rename wins.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            output = Path(folder) / target.name
            done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True, check=False)  # noqa: S603
            if done.returncode != 0:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                raise NativeUnavailable(f"{command[0]} failed: {first}")
            output.replace(target)
    except OSError as error:
        raise NativeUnavailable(f"{target.parent}: {error}; set LORAMUX_CACHE_DIR to a writable folder") from error
