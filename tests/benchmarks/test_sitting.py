"""A whole sitting over real HTTP servers: what is driven, written down, and reported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import report
from completions_server import answer, serving
from figures import Outcome
from loadgen import RETURN_TOKEN_IDS, Target
from machine import Machine
from measurements import Counters, Drive
from peers.serving import Serving, SystemFailed
from sitting import Sitting
from specs import MODELS, Setup
from systems import Served, System
from workloads import Item, comparison


@dataclass
class SmallServer:
    """The tests' completions server, seen as a system that can be compared."""

    label: str
    modes: tuple[str, ...] = ("continuous",)
    serves_adapters: bool = True
    base_name: str = "base"
    seen: list[str] = field(default_factory=list)
    drives: int = 0

    @contextmanager
    def serving(self, setup: Setup) -> Iterator[Serving]:
        with serving() as (url, seen):
            yield Serving(Target(url, base_name=self.base_name, extra_body=RETURN_TOKEN_IDS), os.getpid(), 0.5)
            self.seen += [body["model"] for body in seen.bodies]

    def counters(self, serving: Serving) -> Counters:
        self.drives += 1
        return Counters(steps=10 * self.drives, adapter_bytes_read=1000 * self.drives, weight_bytes=500)


@dataclass(frozen=True)
class AnswersLikePeft:
    """Gives the answers that the small server gives, as PEFT's reference."""

    label: str = "peft"

    def modes(self, items: Sequence[Item]) -> tuple[str, ...]:
        return ("static",)

    def drives(self, setup: Setup, runs: Sequence[tuple[str, Sequence[Item]]]) -> Iterator[Drive]:
        for _, items in runs:
            (template,) = Served(SmallServer("x")).drives(setup, [("continuous", items[:1])])
            yield msgspec.structs.replace(template, outcomes=[_outcome(i, item) for i, item in enumerate(items)])


def _outcome(place: int, item: Item) -> Outcome:
    token_ids = [answer(item.adapter or "base", item.prompt_token_ids, k) for k in range(item.max_tokens)]
    if place == 0:
        token_ids[-1] += 1
    return Outcome(id=item.id, ttft_s=0.1, total_s=0.2, output_tokens=item.max_tokens, token_ids=token_ids)


MACHINE = Machine(
    date="2026-01-01 00:00 UTC",
    commit="abc",
    cpu="a processor",
    cores=2,
    flags=["avx2"],
    memory_bytes=8 << 30,
    system="Linux",
    python="3.11",
    packages={"torch": "2.13"},
    environment={},
    bandwidth_bytes_per_s=1e9,
)


def sit(directory: Path, systems: tuple[System, ...], dtype: str = "float32", reps: int = 1) -> report.Results:
    workloads = {name: _short(comparison(name)) for name in ("w24-base", "w24-mix")}
    sitting = Sitting(directory, MACHINE, systems, workloads, reps)
    sitting.record(MACHINE)
    sitting.run(Setup(MODELS["micro"], dtype, threads=1, max_num_seqs=4, scratch=directory))
    report.write(directory)
    return report.read(directory)


def _short(items: list[Item]) -> list[Item]:
    return [msgspec.structs.replace(item, max_tokens=1 + i % 3) for i, item in enumerate(items)]


def test_every_system_runs_every_workload_in_each_of_its_modes(tmp_path: Path) -> None:
    ours = SmallServer("loramux", ("continuous", "static"))
    base_only = SmallServer("vllm-without-lora", serves_adapters=False)
    results = sit(tmp_path, (Served(ours), AnswersLikePeft(), Served(base_only)), reps=2)
    ran = [(m.case.rep, m.case.system, m.case.workload, m.case.mode) for m in results.measurements]
    first = [
        ("loramux", "w24-base", "continuous"),
        ("loramux", "w24-mix", "continuous"),
        ("loramux", "w24-base", "static"),
        ("loramux", "w24-mix", "static"),
        ("peft", "w24-base", "static"),
        ("peft", "w24-mix", "static"),
        ("vllm-without-lora", "w24-base", "continuous"),
    ]
    assert ran == [(0, *run) for run in first] + [(1, *run) for run in reversed(first)]
    assert all(m.figures.failed == m.figures.wrong_length == 0 for m in results.measurements)


def test_a_folder_that_holds_results_is_gone_on_with(tmp_path: Path) -> None:
    first, second = SmallServer("loramux"), SmallServer("loramux")
    sit(tmp_path, (Served(first),))
    results = sit(tmp_path, (Served(second), AnswersLikePeft()), reps=2)
    assert len(second.seen) == len(first.seen), "only the second repetition"
    assert len({m.case for m in results.measurements}) == len(results.measurements) == 8


def test_a_server_is_warmed_up_with_every_adapter_before_it_is_measured(tmp_path: Path) -> None:
    ours = SmallServer("loramux")
    sit(tmp_path, (Served(ours),))
    used = {item.adapter or "base" for item in comparison("w24-mix")}
    assert set(ours.seen[: len(used)]) == used
    assert len(ours.seen) == len(used) + 2 * 24


def test_floors_come_from_the_difference_of_the_counters(tmp_path: Path) -> None:
    results = sit(tmp_path, (Served(SmallServer("loramux")),))
    floor = results.measurements[0].floor
    assert floor is not None
    items = _short(comparison("w24-base"))
    contexts = sum(len(i.prompt_token_ids) + k for i in items for k in range(i.max_tokens))
    kv_bytes = contexts * MODELS["micro"].kv_bytes_per_token("float32")
    assert floor.steps == 10
    assert floor.omega == 1000 / (10 * 500 + kv_bytes)


@pytest.mark.parametrize(
    ("dtype", "compared"), [("float32", [("w24-base", 23, 24), ("w24-mix", 23, 24)]), ("bfloat16", [])]
)
def test_answers_are_compared_in_float32_only(tmp_path: Path, dtype: str, compared: list[tuple[str, int, int]]) -> None:
    """The reference answers one request otherwise."""
    results = sit(tmp_path, (Served(SmallServer("loramux")), AnswersLikePeft()), dtype)
    assert [(a.case.workload, a.same, a.requests) for a in results.agreements] == compared


def test_a_system_that_fails_costs_only_its_own_figures(tmp_path: Path) -> None:
    class Broken(SmallServer):
        @contextmanager
        def serving(self, setup: Setup) -> Iterator[Serving]:
            raise SystemFailed("it ended with 3\nand a long log")
            yield

    refusing = SmallServer("refusing", base_name="absent")
    results = sit(tmp_path, (Served(Broken("broken")), Served(refusing), Served(SmallServer("loramux"))))
    assert {m.case.system for m in results.measurements} == {"loramux"}
    assert [f.system for f in results.failures] == ["broken", "refusing"]
    text = (tmp_path / report.REPORT).read_text()
    assert "| micro | float32 | broken | it ended with 3 |" in text
    assert "model 'absent' does not exist" in results.failures[1].reason


def test_the_report_holds_the_machine_the_ratios_the_figures_and_a_plot(tmp_path: Path) -> None:
    sit(tmp_path, (Served(SmallServer("loramux", ("continuous", "static"))), AnswersLikePeft()))
    text = (tmp_path / report.REPORT).read_text()
    for part in ("a processor, 2 cores (avx2), 8 GiB", "commit abc", "memory read at 1.0 GB/s", "torch 2.13"):
        assert part in text
    for part in ("mix: tokens/s over peft", "mix: LoRA overhead of loramux", "our own static batching", "23 of 24"):
        assert part in text
    assert f"]({report.PLOT})" in text
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")


def test_a_busy_machine_marks_its_figures(tmp_path: Path) -> None:
    results = sit(tmp_path, (Served(SmallServer("loramux")),))
    busy = [
        msgspec.structs.replace(m, resources=msgspec.structs.replace(m.resources, other_cores=cores))
        for m, cores in zip(results.measurements, (0.0, 1.0), strict=True)
    ]
    (tmp_path / report.LINES).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in [MACHINE, *busy]))
    report.write(tmp_path)
    lines = (tmp_path / report.REPORT).read_text().splitlines()
    cells = [
        line.split(" | ") for line in lines if line.startswith("| micro | float32 | w24-") and "continuous" in line
    ]
    rows = {row[2]: row[5] for row in cells}
    assert not rows["w24-base"].endswith("*")
    assert rows["w24-mix"].endswith("*")
