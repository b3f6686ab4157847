"""The engine on the Triton kernels: on a GPU or in Triton's interpreter, as tests/kernels/cuda is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_zoo import Zoo
from interpreted import INTERPRETED, quicken_interpreter

from loramux.engine.engine import Engine
from loramux.engine.execution import assembly
from loramux_kernels import device, packed_linear
from loramux_kernels.staged_memory import StagedMemory

quicken_interpreter()

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("gpu")


@pytest.fixture(autouse=True)
def _linears_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a GPU's linears. A CPU's are not operators of torch, so their launches would not be counted."""
    monkeypatch.setattr(assembly, "choose_format", lambda *_, **__: None)
    monkeypatch.setattr(packed_linear, "choose_format", lambda weight: packed_linear.Plain)


@pytest.fixture
def copies_of_decode_steps(monkeypatch: pytest.MonkeyPatch):
    """copies_of_decode_steps(engine): a list that gets, for each decode step, the names of its copies to the device."""
    sent: list[str] = []
    stage, send = device.stage, StagedMemory.send
    monkeypatch.setattr(device, "stage", lambda *args: sent.append("stage") or stage(*args))
    monkeypatch.setattr(StagedMemory, "send", lambda memory: sent.append("send") or send(memory))

    def watch(engine: Engine) -> list[list[str]]:
        launch, copies = engine._runner.launch, []

        def counted(step):
            sent.clear()
            flight = launch(step)
            if all(chunk.length == 1 for chunk in step.chunks):
                copies.append(list(sent))
            return flight

        monkeypatch.setattr(engine._runner, "launch", counted)
        return copies

    return watch


@pytest.fixture(scope="session")
def zoo_of(tmp_path_factory: pytest.TempPathFactory):
    """zoo_of("llama"): made once a session, of as few layers as show everything; the interpreter is slow."""
    made: dict[str, Zoo] = {}

    def get(family: str) -> Zoo:
        if family not in made:
            made[family] = Zoo(family, tmp_path_factory.mktemp(family), num_hidden_layers=2)
            made[family].make_adapters()
        return made[family]

    return get
