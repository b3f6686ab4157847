"""A server's memory does not grow with what is uploaded to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from s3_server import S3

PROGRAM = Path(__file__).parents[2] / "support" / "upload_memory.py"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("where", "size", "most_growth"),
    [
        ("folder", 160 * MIB, 96 * MIB),
        pytest.param("folder", 2048 * MIB, 96 * MIB, marks=pytest.mark.slow),
        pytest.param("s3", 2048 * MIB, 160 * MIB, marks=pytest.mark.slow),  # with the parts that are on their way
    ],
)
def test_memory_is_constant(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, size: int, most_growth: int
) -> None:
    kept, options = str(tmp_path / "blobs"), {}
    if where == "s3":
        s3: S3 = request.getfixturevalue("s3")
        kept, options = f"{s3.url}/{tmp_path.name}", s3.options
    command = [sys.executable, str(PROGRAM), str(tmp_path), str(size), kept, json.dumps(options)]
    told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert (told["state"], told["stored"]) == ("ready", size)
    assert (told["peak"] - told["before"]) * MIB < most_growth, told
