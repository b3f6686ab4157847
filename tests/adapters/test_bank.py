"""Resident adapters: the tables point at the file's weights, and the linears add them to the right rows."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loramux_adapters import bank as bank_module
from loramux_adapters.bank import AdapterBank, PagedRows, Site, StepExtras
from loramux_adapters.components import AdapterPlan, LinearVector, LoraPair, VectorKind
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.modules import LoraLinear, install_linears
from loramux_adapters.prepared import prepare_pages
from loramux_adapters.weights import AdapterWeights, LoraWeights, Matrix, MatrixKind
from loramux_kernels.device import kept_for_steps
from loramux_kernels.tables import NO_VECTORS, Segments

PAGE = 16 * 48
NUM_PAGES = 40


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 48)
        self.k_proj = nn.Linear(32, 16, bias=False)
        self.v_proj = nn.Linear(32, 16)
        self.o_proj = nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x) * self.k_proj(x).sum(-1, keepdim=True)) + self.v_proj(x).mean()


def bank_for(model: nn.Module) -> AdapterBank:
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    sites = {name: Site(i, m.in_features, m.out_features) for i, (name, m) in enumerate(linears)}
    return AdapterBank(torch.full((NUM_PAGES * PAGE,), float("nan")), PAGE, sites, max_rank=64, max_slots=8)


def random_adapter(bank: AdapterBank, ranks: dict[str, int], seed: int) -> AdapterWeights:
    torch.manual_seed(seed)
    pairs, modules = [], {}
    for name, rank in ranks.items():
        site = bank.sites[name]
        pairs.append(LoraPair(name, rank, 0.5 + seed, site.in_features, site.out_features))
        modules[name] = LoraWeights(
            torch.randn(rank, site.in_features), torch.randn(site.out_features, rank), 0.5 + seed
        )
    return AdapterWeights(AdapterPlan(tuple(pairs), 0), modules)


def install(bank: AdapterBank, weights: AdapterWeights, pages: list[int]) -> int:
    adapter = bank.prepare(weights)
    return bank.install(adapter, pages[: adapter.layout.num_pages])


@torch.no_grad()
def test_bank_rows_get_their_own_adapter_and_base_rows_none() -> None:
    torch.manual_seed(0)
    model = Attention()
    original = Attention()
    original.load_state_dict(model.state_dict())
    bank = bank_for(model)
    first = random_adapter(bank, {"q_proj": 5, "o_proj": 33, "v_proj": 16}, seed=1)
    second = random_adapter(bank, {"k_proj": 17}, seed=2)
    pages = torch.randperm(NUM_PAGES).tolist()
    slots = install(bank, first, pages[:20]), install(bank, second, pages[20:])
    install_linears(model, bank)
    assert isinstance(model.q_proj, LoraLinear)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    for rows in ((2, 3, 1), (1, 1, 4)):
        x = torch.randn(1, sum(rows), 32)
        a, b, c = x.split(rows, dim=1)
        with bank.serving(Segments((0, rows[0], rows[0] + rows[1]), slots)):
            parts = model.q_proj(x), model.k_proj(x), model.v_proj(x)
        for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
            expected = []
            for rows_in, weights in ((a, first), (b, second), (c, None)):
                y = original.get_submodule(name)(rows_in)
                if weights and (m := weights.modules.get(name)):
                    y = y + m.scale * rows_in @ m.a.T @ m.b.T
                expected.append(y)
            torch.testing.assert_close(part, torch.cat(expected, dim=1), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_bank_outside_a_forward_serves_the_base_alone() -> None:
    torch.manual_seed(0)
    model = Attention()
    x = torch.randn(1, 4, 32)
    expected = model(x)
    install_linears(model, bank_for(model))
    torch.testing.assert_close(model(x), expected)


@torch.no_grad()
def test_grouped_linears_with_different_inputs_stay_apart() -> None:
    model = Attention()
    x, z = torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    expected = model.q_proj(x), model.k_proj(z), model.v_proj(x)
    install_linears(model, bank_for(model))
    for got, want in zip((model.q_proj(x), model.k_proj(z), model.v_proj(x)), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_bank_dropped_slot_is_reused_clean() -> None:
    bank = bank_for(Attention())
    slot = install(bank, random_adapter(bank, {"q_proj": 5, "k_proj": 4}, 1), list(range(NUM_PAGES)))
    bank.drop(slot)
    again = install(bank, random_adapter(bank, {"v_proj": 3}, 2), list(range(NUM_PAGES)))
    assert again == slot
    assert bank.table.ranks[again].tolist() == [0, 0, 3, 0]


def test_bank_of_another_rank_has_each_slot_once() -> None:
    """Rank 0 assigns the slots, and each drop gives one back."""
    bank = bank_for(Attention())
    weights = bank.prepare(random_adapter(bank, {"q_proj": 3}, 1))
    for _ in range(20):
        bank.drop(bank.install(weights, list(range(NUM_PAGES)), slot=5))
    slots = [bank.install(weights, list(range(NUM_PAGES))) for _ in range(8)]
    assert sorted(slots) == list(range(8))
    with pytest.raises(RuntimeError, match="every adapter slot is taken"):
        bank.install(weights, list(range(NUM_PAGES)))


def test_bank_failed_install_gives_its_slot_back(monkeypatch) -> None:
    bank = bank_for(Attention())
    weights = random_adapter(bank, {"q_proj": 3}, 1)

    def fail(*_: object) -> None:
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(AdapterBank, "_write_rows", fail)
    for _ in range(20):
        with pytest.raises(RuntimeError, match="the copy failed"):
            install(bank, weights, list(range(NUM_PAGES)))
    monkeypatch.undo()
    assert len({install(bank, weights, list(range(NUM_PAGES))) for _ in range(8)}) == 8, "all slots are free"


def test_bank_pages_composed_on_the_host_hold_what_blocks_do() -> None:
    """On a GPU there is one copy a page. An adapter may get one page more than it fills; this page is not changed."""
    bank, other = bank_for(Attention()), bank_for(Attention())
    weights = random_adapter(bank, {"q_proj": 20, "k_proj": 3, "o_proj": 17}, 1)
    layout = bank.plan_layout(weights.plan)
    pages = [30, 4, 22, 7, 11, 2, 9, 8][: layout.num_pages + 1]
    bank.install(bank.prepare(weights), pages)
    prepare_pages(weights, layout, other.pool).copy_into(other.pool, PAGE, pages)
    assert torch.equal(bank.pool.nan_to_num(7.0), other.pool.nan_to_num(7.0))
    assert bank.pool.view(NUM_PAGES, PAGE)[pages[-1]].isnan().all()


def test_bank_lays_out_adapters_of_one_shape_once() -> None:
    bank = bank_for(Attention())
    first, second = (bank.plan_layout(random_adapter(bank, {"q_proj": 11}, seed).plan) for seed in (1, 2))
    assert first.blocks is second.blocks


def test_bank_vectors_leave_with_their_slot() -> None:
    bank = bank_for(Attention())
    weights = random_adapter(bank, {"k_proj": 4}, 1)
    plan = dataclasses.replace(
        weights.plan,
        vectors=(LinearVector("k_proj", VectorKind.OUTPUT, 16), LinearVector("o_proj", VectorKind.INPUT, 48)),
    )
    columns, inputs = torch.randn(2, 16), torch.randn(2, 48)
    held = dataclasses.replace(weights, plan=plan, columns={"k_proj": columns}, inputs={"o_proj": inputs})
    slot = install(bank, held, list(range(NUM_PAGES)))
    segments = Segments((0, 2), (slot,))
    assert bank.extras_of(segments, np.arange(2)) == StepExtras(segments, segments, None, (), ())
    for offsets, site, vectors in ((bank.vectors.columns, 1, columns), (bank.vectors.inputs, 3, inputs)):
        start = int(offsets[slot, site])
        assert torch.equal(bank.pool[start : start + vectors.numel()], vectors.flatten())
        assert (offsets[slot] == NO_VECTORS).sum() == 3
    bank.drop(slot)
    assert install(bank, weights, list(range(NUM_PAGES))) == slot
    assert bank.extras_of(segments, np.arange(2)) is None
    assert (bank.vectors.columns[slot] == NO_VECTORS).all()
    assert (bank.vectors.inputs[slot] == NO_VECTORS).all()


def test_bank_rank_above_the_tables_is_refused() -> None:
    bank = bank_for(Attention())
    with pytest.raises(AdapterRejected, match="up to 64") as caught:
        bank.plan_layout(random_adapter(bank, {"q_proj": 65}, 1).plan)
    assert caught.value.code == "rank_too_large"


class FakeStream:
    """A copy stream that notes the launched steps whose end it waits for."""

    def __init__(self) -> None:
        self.waited_for: list[int] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited_for.append(event.steps)


class FakeEvent:
    """An event at the end of the steps that were launched before it was recorded."""

    launched = 0
    waits = 0
    """Waits of the host."""

    def record(self, _: object) -> None:
        self.steps = FakeEvent.launched

    def synchronize(self) -> None:
        FakeEvent.waits += 1


@pytest.fixture
def copy_stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(FakeEvent, "launched", 0)
    monkeypatch.setattr(FakeEvent, "waits", 0)
    return FakeStream()


def test_install_waits_for_the_last_step_that_read_its_slot(copy_stream: FakeStream) -> None:
    """The slot is freed after the fence of the load that takes it, by a step that still runs."""
    bank = bank_for(Attention())
    bank._stream = copy_stream  # type: ignore[assignment]
    first, second = (random_adapter(bank, {"q_proj": 5}, seed) for seed in (1, 2))
    slot = bank.install(bank.prepare(first), [0, 1, 2], bank.fence())
    fence = bank.fence()  # of the load of `second`, into pages that are free
    FakeEvent.launched = 7  # a step of `first`
    bank.drop(slot)  # its last token is planned; the step still runs
    copy_stream.waited_for.clear()
    assert bank.install(bank.prepare(second), [9, 10, 11], fence) == slot
    assert copy_stream.waited_for == [0, 7]


class CountedOperators(TorchDispatchMode):
    """The names of torch's operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **kwargs or {})


def test_install_of_a_prepared_adapter_is_one_copy_a_page_and_one_wait(copy_stream: FakeStream) -> None:
    """Its blocks are copied once, by one operator, however often it is installed."""
    bank = bank_for(Attention())
    bank._stream = copy_stream  # type: ignore[assignment]
    weights = random_adapter(bank, {"q_proj": 20, "k_proj": 3, "o_proj": 17}, 1)
    with CountedOperators() as preparing:
        adapter = bank.prepare(weights)
    assert (preparing.names.count("_foreach_copy_"), preparing.names.count("copy_")) == (1, 0)
    rows = 7  # of the tables
    assert adapter.layout.num_pages > 2
    for _ in range(2):
        FakeEvent.waits = 0
        with CountedOperators() as installing:
            slot = bank.install(adapter, list(range(NUM_PAGES)), bank.fence())
        assert installing.names.count("copy_") == adapter.layout.num_pages + rows
        assert "_foreach_copy_" not in installing.names
        assert FakeEvent.waits == 1
        bank.drop(slot)


def test_prepared_pages_count_the_bytes_that_are_pinned_for_them() -> None:
    """torch pins powers of two."""
    bank = bank_for(Attention())
    weights = random_adapter(bank, {"q_proj": 5}, 1)
    layout = bank.plan_layout(weights.plan)
    (page,) = (prepared := prepare_pages(weights, layout, bank.pool)).source
    assert page.nbytes == 4 * (5 * 32 + 5 * 48)
    assert prepared.nbytes == 2048
    assert bank.prepare(weights).nbytes == weights.nbytes


def test_index_tensors_of_an_adapter_outlive_the_steps_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(bank_module, "kept_for_steps", lambda tensor: kept.append(tensor) or tensor)
    pages = PagedRows(torch.zeros(4 * 64), 64, [3, 1], Matrix("head", MatrixKind.ROWS, 5, 16))
    assert [tensor for tensor in kept if tensor is pages._pages]


def test_freed_memory_waits_for_the_steps_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCard:
        is_cuda, device, recorded = True, torch.device("cuda", 0), ()

        def record_stream(self, stream: object) -> None:
            self.recorded = (stream,)

    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"steps of {device}")
    tensor = OnCard()
    assert kept_for_steps(tensor) is tensor  # type: ignore[arg-type]
    assert tensor.recorded == ("steps of cuda:0",)
