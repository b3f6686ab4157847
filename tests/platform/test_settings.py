"""Settings: every mistake is named with its file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.settings import Settings, SettingsError, load_settings

GOOD = '[model]\npath = "base"\nserved_model_name = "demo"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "server.toml"
    path.write_text(text)
    return path


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, GOOD + '[records]\nurl = "sqlite:///rows.db"\n'))
    assert settings.model.path == str(tmp_path / "base")
    assert settings.records.url == f"sqlite:///{tmp_path}/rows.db"
    assert settings.records.blobs == str(tmp_path / "var/blobs")


def test_a_postgresql_url_is_left_alone(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, GOOD + '[records]\nurl = "postgresql://u@h/db"\n'))
    assert settings.records.url == "postgresql://u@h/db"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "model"),
        (GOOD + "[engine]\nmax_num_seqs = 0\n", "max_num_seqs"),
        (GOOD + "[engine]\nmax_num_seq = 3\n", "max_num_seq"),
        (GOOD + "[engine]\ngpu_memory_utilization = 1.5\n", "gpu_memory_utilization"),
        (GOOD + "[server]\nport = 70000\n", "port"),
        (GOOD + "[scheduler]\ntau = -1\n", "scheduler.tau"),
        (GOOD + "[scheduler]\ntenant_max_pages = 0\n", "scheduler.tenant_max_pages"),
        (GOOD + "[scheduler.reserved_pages]\ninteractive = 0.6\nbatch = 0.4\n", "reserved_pages add up to 1"),
        (GOOD + "[scheduler.class_shares]\nbatch = 0\n", "class_shares.batch"),
        (GOOD + "[scheduler.deadlines_ms]\ninteractive = 0\n", "deadlines_ms.interactive"),
        ("[model\n", "TOML"),
    ],
)
def test_mistakes_name_the_file_and_the_field(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        load_settings(write(tmp_path, text))
    assert "server.toml" in str(caught.value)


def test_a_missing_file_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="configs/"):
        load_settings(tmp_path / "absent.toml")


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_settings_are_valid(path: Path) -> None:
    assert isinstance(load_settings(path), Settings)
