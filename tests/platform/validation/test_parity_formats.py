"""The parity check on formats beside plain LoRA: linears by layers, the embedding and the head by tokens."""

from __future__ import annotations

import pytest
from formats import FormatZoo

from loramux.validation.parity.comparison import Comparison
from loramux.validation.parity.jobs import ParityJob, ParitySetup
from loramux_adapters import Limits, describe_base

BOTH = {"parity_of_layers": "passed", "parity_of_tokens": "passed"}
FORMATS = {
    "dora": BOTH,
    "ia3": BOTH,
    "both": BOTH,
    "tokens": BOTH,
    "head": {"parity_of_layers": "not_run", "parity_of_tokens": "passed"},
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    zoo = FormatZoo("qwen2", tmp_path_factory.mktemp("qwen2"), tuple(FORMATS))
    zoo.make_adapters()
    return zoo


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_served_right_passes(zoo: FormatZoo, name: str) -> None:
    base, folder = describe_base(zoo.base), str(zoo.adapters / name)
    comparison = Comparison.over(
        ParitySetup(model_dir=str(zoo.base), base=base, max_rank=64, whole_model_bytes=1 << 30)
    )
    report = comparison.report(ParityJob(uploaded=folder, served=folder, limits=Limits()))
    assert report.refusal is None, report.refusal
    assert {check.name: check.outcome for check in report.checks} == FORMATS[name]
    assert not report.warnings
