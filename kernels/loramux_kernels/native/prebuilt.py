"""Libraries compiled in advance, one for each level of an architecture. A container image holds them next to the
sources.

    python -m loramux_kernels.native.prebuilt        compile every level of this machine's architecture

A level is a set of instructions that compilers and `/proc/cpuinfo` name. A process loads the library of the highest
level that its processor has. Without such a library, the process compiles a library for its processor
(`loramux_kernels.native.compiler`).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from loramux_kernels.native.compiler import FLAGS, LIBRARIES, compile_library, find_compiler, sources

ROOT = Path(__file__).parent / "prebuilt"


class Level(NamedTuple):
    """A set of instructions, as a compiler's flags and as the features in `/proc/cpuinfo` that it needs."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_ARM = {"asimd", "asimdhp", "asimddp"}
LEVELS = {
    "x86_64": (
        Level("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"), frozenset(_BF16)),
        Level("x86-64-v4", ("-march=x86-64-v4",), frozenset(_V4)),
        Level("x86-64-v3", ("-march=x86-64-v3",), frozenset(_V3)),
    ),
    "aarch64": (
        Level("armv8.2-bf16", ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",), frozenset(_ARM | {"bf16", "i8mm"})),
        Level("armv8.2", ("-march=armv8.2-a+fp16+dotprod",), frozenset(_ARM)),
    ),
}
"""The levels of each architecture, the highest first."""


def prebuilt_library(root: Path = ROOT, features: Collection[str] | None = None) -> Path | None:
    """Return the library of the highest level that a processor with `features` runs; None if no library is suitable.

    If `features` is None, the features of this processor are used. Libraries of other sources are ignored.
    """
    if not root.is_dir():
        return None
    found = processor_features() if features is None else features
    for level in LEVELS.get(platform.machine(), ()):
        library = _place(root, level)
        if level.features.issubset(found) and library.is_file():
            return library
    return None


def build(root: Path = ROOT) -> list[Path]:
    """Compile every level of this machine's architecture, and return the libraries. Raises NativeUnavailable."""
    compiler, made = find_compiler(), []
    units = [str(source) for source in sources() if source.suffix == ".cpp"]
    for level in LEVELS.get(platform.machine(), ()):
        library = _place(root, level)
        compile_library([*compiler, *FLAGS, *level.flags, *units, *LIBRARIES], library)
        library.chmod(0o755)
        made.append(library)
    return made


def processor_features() -> frozenset[str]:
    """Return the features that `/proc/cpuinfo` lists for this processor; empty if the file cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return frozenset(
        feature for name, _, value in named if name.strip() in ("flags", "Features") for feature in value.split()
    )


def _place(root: Path, level: Level) -> Path:
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.name.encode() + source.read_bytes())
    return root / digest.hexdigest()[:16] / level.name / "libloramux.so"


if __name__ == "__main__":
    for library in build():
        print(library)
