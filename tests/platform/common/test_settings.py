"""Settings: every mistake is named with its file and field."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest

from loramux.common.settings import file
from loramux.common.settings.file import Settings, SettingsError, ensure_files, load_settings

SINK = '[[sinks]]\nname = "a"\nkind = "stripe"\nurl = "https://a.example"\nsecret_file = "s"\n'
HUB = '[[uploads.hubs]]\nname = "h"\nurl = "https://h"\n'
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


def test_postgresql_url_is_left_alone(tmp_path: Path) -> None:
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
        (GOOD + "[scheduler]\nmax_service_lead = -1\n", "scheduler.max_service_lead"),
        (GOOD + "[scheduler]\ntenant_max_pages = 0\n", "scheduler.tenant_max_pages"),
        (
            GOOD + "[scheduler.reserved_pages]\ninteractive = 0.6\nbatch = 0.4\n",
            "reserved_pages sum to 1; the maximum is 0.9",
        ),
        (GOOD + "[scheduler.class_shares]\nbatch = 0\n", "class_shares.batch"),
        (GOOD + '[training]\ndevice = "cuda"\n', "Set training.local_trainer to false"),
        (GOOD + "[scheduler.deadlines_ms]\ninteractive = 0\n", "deadlines_ms.interactive"),
        ("[model\n", "TOML"),
        (GOOD.replace('"demo"', '""'), "served_model_name"),
        (GOOD + "[engine]\nnum_threads = 1000000\n", "num_threads"),
        (GOOD + "[adapters]\nmax_rank = 1000000\n", "max_rank"),
        (GOOD + "[server]\nlame_duck_seconds = 1e300\n", "lame_duck_seconds"),
        (GOOD + SINK.replace("https://a.example", "a.example"), r"sinks\[0\].url"),
        (GOOD + SINK + SINK, "sinks: 'a' is there twice"),
        (GOOD + HUB.replace("//h", "//h:99999"), r"uploads.hubs\[0\]"),
        (GOOD + HUB + HUB, "uploads.hubs: 'h' is there twice"),
    ],
)
def test_settings_mistake_names_the_file_and_the_field(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        load_settings(write(tmp_path, text))
    assert "server.toml" in str(caught.value)


TWO = '[[bases]]\nname = "a"\npath = "x"\n[[bases]]\nname = "b"\npath = "y"\n'


def test_bases_take_what_they_leave_out_from_the_common_engine_settings(tmp_path: Path) -> None:
    text = "[engine]\nmax_num_seqs = 3\nblock_size = 8\n" + TWO + "[bases.engine]\nblock_size = 32\n"
    settings = load_settings(write(tmp_path, text))
    first, second = settings.served_bases
    assert (first.engine.max_num_seqs, first.engine.block_size) == (3, 8)
    assert (second.engine.max_num_seqs, second.engine.block_size) == (3, 32)
    assert second.path == str(tmp_path / "y")
    assert settings.of_base(second).model.served_model_name == "b"


def test_model_is_one_base_with_one_engine(tmp_path: Path) -> None:
    (base,) = load_settings(write(tmp_path, GOOD + "[engine]\nmax_num_seqs = 3\n")).served_bases
    assert (base.name, base.engines.min, base.engine.max_num_seqs) == ("demo", 1, 3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD + TWO, "both are set"),
        (TWO + 'former_names = ["a"]\n', "former name"),
        (TWO + "engines = { min = 3, max = 2 }\n", "less than engines.min"),
        ("bases = []\n", "model"),
        (TWO.replace('"b"', '"a"'), "is the name, or a former name, of 2 bases; rename one"),
        (TWO + "engines = { max = 0 }\n", r"bases\[1\].engines.max must be a whole number of at least 1, not 0"),
        (TWO + 'engines = { adresses = ["tcp://h:1"] }\n', r"bases\[1\].engines has no setting `adresses`"),
        (TWO + 'engines = { addresses = ["tcp://h:1", "tcp://h:1"] }\n', "has an address twice"),
        (TWO + '[fleet]\nlauncher = "kubernetes"\n', "fleet.launcher"),
        (TWO + "[fleet]\nlease_s = 0.5\n", "fleet.lease_s must be a number of seconds .*1.* not 0.5"),
    ],
)
def test_bases_mistake_names_the_file_and_the_field(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        load_settings(write(tmp_path, text))
    assert "server.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HUB + 'token_file = "absent"\n', "uploads.hubs.h.token_file: .*absent cannot be read"),
        ('[billing]\nfont = "absent.ttf"\n', "billing.font: .*absent.ttf cannot be read"),
        ('[billing]\nfont = "server.toml"\n', "billing.font: .* is no TrueType"),
        ('[adapters]\nlocal_root = "absent"\n', "adapters.local_root: .* is no folder"),
    ],
)
def test_files_of_the_settings_are_looked_for_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    settings = load_settings(write(tmp_path, GOOD + text))
    with pytest.raises(SettingsError, match=said):
        ensure_files(settings)


def test_missing_settings_file_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="loramux init"):
        load_settings(tmp_path / "absent.toml")


def test_old_scheduler_settings_are_accepted_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = GOOD + "[scheduler]\ntau = 5\nquantum = 6\noverhead_target = 0.5\n"
    scheduler = load_settings(write(tmp_path, text)).scheduler
    assert (scheduler.max_service_lead, scheduler.affinity_window, scheduler.adapter_overhead_target) == (5, 6, 0.5)
    assert len(caplog.records) == 3


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[3] / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_settings_are_valid(path: Path) -> None:
    assert isinstance(load_settings(path), Settings)


def test_old_spelling_is_accepted_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file, "RENAMED_SETTINGS", {"engine.max_seqs": "engine.max_num_seqs"})
    settings = load_settings(write(tmp_path, GOOD + "[engine]\nmax_seqs = 3\n[server]\nport = 81\n"))
    assert (settings.engine.max_num_seqs, settings.server.port) == (3, 81)
    assert "engine.max_seqs is now called engine.max_num_seqs" in caplog.text
    assert len(caplog.records) == 1


def test_old_and_new_spelling_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "RENAMED_SETTINGS", {"engine.max_seqs": "engine.max_num_seqs"})
    with pytest.raises(SettingsError, match=r"engine\.max_seqs is the old spelling of engine\.max_num_seqs"):
        load_settings(write(tmp_path, GOOD + "[engine]\nmax_seqs = 3\nmax_num_seqs = 4\n"))


def test_old_spelling_with_a_wrong_value_names_the_new_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "RENAMED_SETTINGS", {"engine.max_seqs": "engine.max_num_seqs"})
    with pytest.raises(SettingsError, match="max_num_seqs"):
        load_settings(write(tmp_path, GOOD + "[engine]\nmax_seqs = 0\n"))
    with pytest.raises(SettingsError, match="engine"):
        load_settings(write(tmp_path, GOOD.replace("[model]", "engine = 3\n[model]")))


def test_every_renamed_setting_exists_under_its_new_spelling() -> None:
    for new in file.RENAMED_SETTINGS.values():
        *sections, field = new.split(".")
        kind: type = Settings
        for section in sections:
            kind = get_type_hints(kind)[section]
        assert field in get_type_hints(kind)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD + "[server]\nprot = 1\n", "did you mean `port`?"),
        (GOOD + "[enginee]\n", "did you mean `engine`?"),
        (GOOD + "[engine]\nmax_num_seq = 3\n", "did you mean `max_num_seqs`?"),
        (GOOD + "[engine]\nmax_rank = 8\n", "`max_rank` belongs to [adapters]"),
        (GOOD + "[fleet.ray]\nadress = 'x'\n", "did you mean `address`?"),
        (GOOD + SINK.replace("secret_file", "secretfile"), "did you mean `secret_file`?"),
        ("[[bases]]\nname = 'a'\npath = 'b'\nengine = { pool_byte = 1 }\n", "did you mean `pool_bytes`?"),
        ("[[bases]]\nname = 'a'\npath = 'b'\nengines = { minimum = 1 }\n", "bases[0].engines has no setting `minimum`"),
    ],
)
def test_unknown_setting_names_the_one_that_was_meant(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(write(tmp_path, text))
    assert told in str(refused.value)
    assert "no setting" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[server]\nport = '80'\n",
            'server.port must be a whole number from 1 to 65535, not "80"; write 80 without quotes',
        ),
        ("[engine]\npool_bytes = '2GB'\n", 'a whole number of bytes of at least 1, not "2GB"; write the number alone'),
        ("[server]\ndrain_seconds = '30s'\n", "server.drain_seconds must be a number of seconds from 0 to 604800"),
        ("[scheduler.deadlines_ms]\nbatch = '1s'\n", "deadlines_ms.batch must be a whole number of milliseconds"),
        (
            "[logging]\nlevel = 'warn'\n",
            'one of "debug", "error", "info", "warning", not "warn"; did you mean "warning"?',
        ),
        (
            "[adapters]\npreload = 'acme/x'\n",
            'a list in brackets, each item text in quotes, not "acme/x"; write ["acme/x"]',
        ),
        ("[billing]\ntax_percent = 19\n", 'billing.tax_percent must be text in quotes, not 19; write "19"'),
        (
            "[validation]\nparity = 'yes'\n",
            'validation.parity must be true or false, not "yes"; write it without quotes',
        ),
        ("[sinks]\nname = 'a'\n", "sinks must be a list of tables, each below a line [[sinks]], not a table"),
        (SINK.replace('kind = "stripe"\n', ""), "sinks[0] needs `kind`, which has no default"),
        ("[server.x]\n", "[server] has no setting `x`"),
        (HUB.replace("https://h", "ftp://me:secret@h"), 'not "ftp://...@h"'),
    ],
)
def test_wrong_value_names_the_setting_what_it_takes_and_what_was_found(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(write(tmp_path, GOOD + text))
    assert said in str(refused.value)


def test_section_written_as_a_value_names_the_line_that_begins_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"engine must be a table, not 3") as refused:
        load_settings(write(tmp_path, "engine = 3\n" + GOOD))
    assert "did you mean" not in str(refused.value)


def test_unknown_setting_that_is_like_nothing_has_no_suggestion(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(write(tmp_path, GOOD + "[server]\nzzz = 1\n"))
    assert "did you mean" not in str(refused.value)


def test_settings_that_no_page_lists_are_accepted(tmp_path: Path) -> None:
    """Files of earlier releases have them."""
    hidden = (
        "[engine]\nin_process = true\n[scheduler]\naffinity_window = 1\nadapter_overhead_target = 0.2\nmax_lift = 3\n"
    )
    settings = load_settings(write(tmp_path, GOOD + hidden))
    assert (settings.engine.in_process, settings.scheduler.affinity_window) == (True, 1)
    assert (settings.scheduler.adapter_overhead_target, settings.scheduler.max_lift) == (0.2, 3)
