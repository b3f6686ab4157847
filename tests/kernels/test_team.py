"""The threads of one piece of work (`native/parallel.hpp`), in a separate program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loramux_kernels.native import compiler

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(sys.platform != "linux", reason="links GCC's OpenMP"),
]


def test_each_share_is_done_once_though_threads_come_late(tmp_path):
    """A share that is done twice or never shows as a wrong count, one that is waited for in vain as a timeout."""
    program, headers = tmp_path / "team_rounds", Path(compiler.__file__).parent
    flags = ("-std=c++17", "-O2", "-pthread", f"-I{headers}", str(Path(__file__).with_name("team_rounds.cpp")))
    subprocess.run([*compiler.find_compiler(), *flags, "-o", str(program), "-l:libgomp.so.1", "-lstdc++"], check=True)
    for _ in range(5):
        done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout
