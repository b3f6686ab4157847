"""The choice of a format: by times that are given, by a check of rows that is run, and by a file that is kept."""

from __future__ import annotations

import logging

import msgspec
import pytest
import torch
from torch.nn import functional

from loramux_kernels import format_choice
from loramux_kernels.format_choice import (
    CHECKED_ROWS,
    MARGIN,
    ROWS,
    FormatUnavailable,
    LinearsShape,
    Measurement,
    choose,
    choose_for_base,
    dependence_of,
    kept_or_measured,
    row_dependence,
)
from loramux_kernels.packed_linear import FORMATS, OneDnn, Panels, Plain, formats_of

SHAPES = [LinearsShape(64, 96, 24), LinearsShape(48, 64, 2)]


def measured(seconds: dict[str, tuple[float, ...]], refused: dict[str, str] | None = None) -> Measurement:
    return Measurement(machine="a machine", seconds=seconds, refused=refused or {}, bandwidth=2e10)


@pytest.mark.parametrize(
    ("seconds", "refused", "wanted"),
    [
        pytest.param({"panels": (2, 3, 40), "onednn": (1, 2, 30), "torch": (3, 4, 50)}, {}, "onednn", id="the fastest"),
        pytest.param({"panels": (1.2, 2.3, 34), "onednn": (1, 2, 30)}, {}, "panels", id="a tie keeps the one call"),
        pytest.param({"onednn": (1, 2, 30), "torch": (1, 2, 30)}, {}, "onednn", id="a tie without the one call"),
        pytest.param({"panels": (8, 8, 4), "torch": (1, 1, 40)}, {}, "torch", id="each number of rows weighs the same"),
        pytest.param({"panels": (9, 9, 99), "onednn": (1, 2, 3)}, {"onednn": "why"}, "panels", id="a refused format"),
        pytest.param({"onednn": (1, 2, 3), "torch": (2, 3, 4)}, {"onednn": "a", "torch": "b"}, "onednn", id="no other"),
    ],
)
def test_choice_by_given_times(seconds, refused, wanted):
    choice = choose(measured(seconds, refused), SHAPES)
    assert (choice.name, choice.form) == (wanted, FORMATS[wanted])
    weights = 24 * 64 * 96 + 2 * 48 * 64
    assert choice.gflops == pytest.approx(2 * 256 * weights / seconds[wanted][-1] / 1e9)
    assert choice.bandwidth == 2e10


def test_choice_leaves_the_one_call_only_for_more_than_the_margin():
    for factor, wanted in ((0.99, "panels"), (1.01, "onednn")):
        times = tuple(MARGIN * factor * seconds for seconds in (1, 2, 3))
        assert choose(measured({"panels": times, "onednn": (1, 2, 3)}), SHAPES).name == wanted


def test_choice_can_be_forced():
    assert choose(measured({"panels": (1, 2, 3), "torch": (9, 9, 9)}), SHAPES, "torch").form is Plain


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [LinearsShape(1536, 576, 30), LinearsShape(577, 96, 1)])
def test_panels_keep_a_row_independent_where_sums_are_rounding_errors(shape, dtype):
    if not Panels.holds(torch.empty(1, shape.in_features, dtype=dtype)):
        pytest.skip("this processor multiplies no pairs, or the width is odd")
    assert dependence_of(Panels, [shape], dtype) is None


@pytest.mark.parametrize("form", [OneDnn, Plain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_finds_every_dependence_that_a_plain_comparison_finds(form, dtype):
    """With 1,536 inputs, a row alone is another sum in oneDNN and MKL on most processors."""
    if not form.holds(torch.empty(1, 2, dtype=dtype)):
        pytest.skip("this machine has no such format")
    linear = form([(torch.randn(576, 1536) * 1536**-0.5).to(dtype)], None)
    x = torch.randn(ROWS[-1], 1536).to(dtype)
    whole = linear(x)
    differs = any(not torch.equal(linear(x[:rows].clone()), whole[:rows]) for rows in CHECKED_ROWS)
    found = dependence_of(form, [LinearsShape(1536, 576, 30)], dtype)
    assert found is not None or not differs


class Independent(Plain):
    """A format that multiplies row by row."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([functional.linear(row[None], self._weight) for row in x])


class Dependent(Plain):
    """A format whose sums go the other way for few rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flip = [1] if len(x) < 16 else []
        return torch.cat([functional.linear(row[None].flip(flip), self._weight.flip(flip)) for row in x])


def test_row_that_depends_on_the_number_of_rows_is_found():
    weights, x = [torch.randn(40, 64)], torch.randn(ROWS[-1], 64)
    reason = row_dependence(Dependent(weights, None), x)
    assert reason == "with 64 inputs and 40 outputs, a row's result among 1 rows is not its result among 256"
    assert row_dependence(Independent(weights, None), x) is None


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an empty cache, which measures every base, quickly."""
    monkeypatch.setenv("LORAMUX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(format_choice, "WORTH_MEASURING", 0)
    monkeypatch.setattr(format_choice, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(format_choice, "UNCACHED_BYTES", 1 << 16)
    return tmp_path


def test_format_that_fails_the_check_is_not_offered_and_the_log_has_the_reason(machine, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(format_choice, "FORMATS", {"onednn": Dependent, "torch": Independent})
    monkeypatch.setattr(format_choice, "formats_of", lambda _: ["onednn", "torch"])
    times = {"onednn": (1.0, 1.0, 1.0), "torch": (2.0, 2.0, 2.0)}
    monkeypatch.setattr(format_choice, "_times", lambda *_: times)
    choice = choose_for_base(SHAPES, torch.float32)
    assert choice.name == "torch"
    assert "the format onednn is not offered: with 64 inputs and 96 outputs, a row's result among 1 rows" in caplog.text
    caplog.clear()
    assert choose_for_base(SHAPES, torch.float32, "onednn").name == "onednn"
    assert "answers may depend on their neighbours in the format onednn: with 64 inputs" in caplog.text


def test_measurement_is_kept_and_made_again_when_the_machine_changes(machine, monkeypatch):
    measure, made = format_choice.measure, []

    def counted(*arguments):
        made.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(format_choice, "measure", counted)
    first = kept_or_measured(SHAPES, torch.float32)
    assert first.seconds.keys() == set(formats_of(torch.empty(2, 2)))
    assert all(len(seconds) == len(ROWS) and min(seconds) > 0 for seconds in first.seconds.values())
    assert kept_or_measured(SHAPES[::-1], torch.float32) == first
    assert choose_for_base(SHAPES, torch.float32).name in formats_of(torch.empty(2, 2))
    assert len(made) == 1
    kept_or_measured(SHAPES, torch.float32, anew=True)
    kept_or_measured(SHAPES, torch.bfloat16)
    kept_or_measured([*SHAPES, LinearsShape(8, 8, 1)], torch.float32)
    assert len(made) == 4
    torch.set_num_threads(1)
    kept_or_measured(SHAPES, torch.float32)
    assert len(made) == 5
    for name, other in (("processor_facts", lambda: b"another"), ("native_library", lambda: None)):
        with monkeypatch.context() as patch:
            patch.setattr(format_choice, name, other)
            kept_or_measured(SHAPES, torch.float32)
        kept_or_measured(SHAPES, torch.float32)
    assert len(made) == 7
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        kept_or_measured(SHAPES, torch.float32)
    assert len(made) == 8


@pytest.mark.parametrize("content", [b"", b"{}", b'{"machine": "another"}', b"\xff"])
def test_measurement_whose_file_is_damaged_is_made_again(machine, content):
    kept_or_measured(SHAPES, torch.float32)
    (file,) = machine.glob("formats-*.json")
    whole = msgspec.json.decode(file.read_bytes(), type=Measurement)
    file.write_bytes(content)
    assert kept_or_measured(SHAPES, torch.float32).machine == whole.machine
    assert msgspec.json.decode(file.read_bytes(), type=Measurement).machine == whole.machine


def test_measurement_without_a_folder_to_keep_it_still_chooses(machine, monkeypatch, caplog):
    (machine / "file").write_text("")
    monkeypatch.setenv("LORAMUX_CACHE_DIR", str(machine / "file" / "below"))
    assert choose_for_base(SHAPES, torch.float32, "measure").name is not None
    assert "will be measured again at the next start" in caplog.text


def test_small_base_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("LORAMUX_CACHE_DIR", str(tmp_path))
    choice = choose_for_base(SHAPES, torch.float32)
    assert choice.name == formats_of(torch.empty(2, 2))[0]
    assert (choice.gflops, choice.bandwidth, list(tmp_path.iterdir())) == (None, None, [])


def test_quantized_base_has_no_format_and_a_bandwidth(machine):
    choice = choose_for_base(SHAPES, torch.float32, is_quantized=True)
    assert (choice.name, choice.form) == (None, None)
    assert choice.bandwidth > 0


def test_format_that_the_machine_lacks_is_refused_with_those_it_has(machine):
    with pytest.raises(
        FormatUnavailable, match=r"onednn does not multiply torch.float32 here; this machine has .*torch"
    ):
        choose_for_base(SHAPES, torch.float32, "onednn")
