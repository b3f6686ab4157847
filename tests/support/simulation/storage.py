"""An object store in memory, which is slow and fails when the plan says so, and a validator without processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from loramux.catalog.validation.jobs import AdapterSummary, ValidationReport
from loramux.common.errors import Rejection
from loramux.common.sandbox.sandbox import SandboxDied
from loramux.data.storage.blobs import WEIGHTS_FILE
from loramux.data.storage.errors import StorageUnavailable
from loramux.data.storage.objects import Objects
from simulation.loop import current_loop
from simulation.plan import Plan

FOUND = AdapterSummary(
    peft_type="LORA",
    peft_version=None,
    base_model_name_or_path=None,
    architecture="tiny",
    rank=4,
    ranks={},
    targets={},
    layers=1,
    tensors=1,
    parameters=1,
    dtypes={},
    weights_bytes=1,
    tokens=97,
    ignored_fields={},
)


class SimulatedObjects(Objects):
    """Named bytes; the loop's thread delay stands for the network."""

    def __init__(self, plan: Plan) -> None:
        self.data: dict[str, bytes] = {}
        self._plan = plan

    def put(self, name: str, data: bytes) -> None:
        self._reach()
        self.data[name] = data

    def put_file(self, name: str, file: Path) -> None:
        self._reach()
        self.data[name] = file.read_bytes()

    def read(self, name: str, size: int = 0) -> Iterator[bytes]:
        self._reach()
        if name not in self.data:
            raise FileNotFoundError(name)
        yield self.data[name]

    def names(self, prefix: str, count: int | None = None) -> list[str]:
        self._reach()
        return sorted(name for name in self.data if name.startswith(f"{prefix}/"))[:count]

    def delete(self, names: Sequence[str]) -> None:
        self._reach()
        for name in names:
            self.data.pop(name, None)

    def _reach(self) -> None:
        now = current_loop().time()
        if any(start <= now < end for start, end in self._plan.storage_outages):
            raise StorageUnavailable("the object store: connection refused")


class SimulatedValidator:
    """Finds everything sound that does not begin with `bad`; its process dies now and then."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self._plan = plan
        self._rng = rng

    def examine(self, folder: Path, limits: object, base_model: str | None) -> ValidationReport:
        if self._rng.random() < self._plan.validator_dies:
            raise SandboxDied("the checking process was killed")
        if (folder / WEIGHTS_FILE).read_bytes().startswith(b"bad"):
            refusal = Rejection(code="weights_invalid", field=WEIGHTS_FILE, message="it is bad")
            return ValidationReport(checks=(), refusal=refusal)
        return ValidationReport(checks=(), found=FOUND, base_model=base_model or "tiny")

    def put(self, name: str, validator: object) -> None:
        pass

    def set_retired(self, bases: object) -> None:
        pass

    def close(self) -> None:
        pass
