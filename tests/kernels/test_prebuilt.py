"""Native operators that were compiled ahead: which one a processor loads."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from loramux_kernels.native import compiler, prebuilt

pytestmark = pytest.mark.skipif(platform.machine() not in prebuilt.LEVELS, reason="no levels for this architecture")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with an empty library for each level."""
    for level in prebuilt.LEVELS[platform.machine()]:
        place = prebuilt._place(tmp_path, level)
        place.parent.mkdir(parents=True)
        place.touch()
    return tmp_path


def test_prebuilt_library_is_that_of_the_highest_level_of_the_processor(root: Path) -> None:
    for level in prebuilt.LEVELS[platform.machine()]:
        library = prebuilt.prebuilt_library(root, level.features)
        assert library is not None
        assert library.parent.name == level.name


def test_prebuilt_library_of_an_older_processor_is_none(root: Path) -> None:
    assert prebuilt.prebuilt_library(root, {"sse2"}) is None


def test_prebuilt_library_of_other_sources_is_ignored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = root / "other.cpp"
    source.write_text("int other;")
    monkeypatch.setattr(prebuilt, "sources", lambda: [source])
    level = prebuilt.LEVELS[platform.machine()][0]
    assert prebuilt.prebuilt_library(root, level.features) is None


def test_prebuilt_libraries_are_compiled_for_each_level_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        compiler.find_compiler()
    except compiler.NativeUnavailable:
        pytest.skip("there is no C++ compiler")
    source = tmp_path / "a.cpp"
    source.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 7; }\n')
    monkeypatch.setattr(prebuilt, "sources", lambda: [source])
    made = prebuilt.build(tmp_path / "made")
    assert [library.parent.name for library in made] == [level.name for level in prebuilt.LEVELS[platform.machine()]]
    library = prebuilt.prebuilt_library(tmp_path / "made")
    if library is not None:
        assert ctypes.CDLL(str(library)).answer() == 7
