"""The engine on the Triton kernels: on a GPU or in Triton's interpreter, as tests/kernels/cuda is run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from adapter_zoo import Zoo
from image_prompts import RECIPES, ImageZoo
from interpreted import INTERPRETED, quicken_interpreter

from loramux.engine.engine import Engine
from loramux.engine.execution import assembly
from loramux_adapters.ranks import Ranks
from loramux_kernels import device, packed_linear
from loramux_kernels.staged_memory import StagedMemory

quicken_interpreter()

ALL_LINEAR = {"tower": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}}
"""An adapter that changes the vision tower too."""

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


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    """Return the names and shapes of the collectives of each rank, in their order."""
    seen: dict[int, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name in ("all_reduce", "gather_columns", "broadcast"):
        called = getattr(Ranks, name)

        def watched(ranks: Ranks, x: torch.Tensor, name=name, called=called) -> torch.Tensor:
            seen[ranks.rank].append((name, tuple(x.shape)))
            return called(ranks, x)

        monkeypatch.setattr(Ranks, name, watched)
    return seen


@pytest.fixture(scope="session")
def images_of(tmp_path_factory: pytest.TempPathFactory):
    """images_of("qwen3_vl"): made once, of few layers, because the interpreter is slow."""
    made: dict[str, ImageZoo] = {}

    def get(family: str) -> ImageZoo:
        if family not in made:
            layers = {} if family.startswith(("gemma", "qwen3_5")) else {"num_hidden_layers": 2}
            zoo = Zoo(family, tmp_path_factory.mktemp(family), max_position_embeddings=512, **layers)
            for seed, (name, recipe) in enumerate((RECIPES | ALL_LINEAR).items()):
                zoo.make_adapter(name, recipe, seed)
            made[family] = ImageZoo(zoo)
        return made[family]

    return get
