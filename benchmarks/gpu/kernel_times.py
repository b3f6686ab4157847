"""Measurements of each kernel alone: its correctness, its time, and the share of its floor in this time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from floors import Ceilings, Work, attention_work, lora_work
from grid import Grid, Mix
from lora_operands import LoraOperands, make_operands, reference, relative_error
from peer_kernels import PeerKernels
from tables import Report, geometric_mean
from timing import Clock

from loramux_kernels.lora import lora_expand, lora_shrink
from loramux_kernels.paged_attention import paged_attention, paged_attention_reference, write_kv
from loramux_kernels.sampling import sample, sample_reference
from loramux_kernels.tables import AttentionBatch, KvLayer, SamplingBatch

BLOCK_SIZE = 16
TOLERANCE = 1e-2
"""Largest error of bfloat16 results compared with float32 ones, as |difference| / |result|."""


class WrongResult(RuntimeError):
    """A kernel's result differs from its reference, so its time has no meaning."""


@dataclass(frozen=True)
class Bench:
    """The device, the shapes and the clock of every measurement."""

    grid: Grid
    like: torch.Tensor
    """Says the dtype and the device."""
    clock: Clock
    ceilings: Ceilings
    report: Report

    def measure(self, section: str, name: dict[str, Any], work: Work, call: Callable[[], object]) -> float:
        """Time `call`, add a row, and return the milliseconds."""
        taken, floor = self.clock.median_ms(call, self.grid.repeats), work.floor_ms(self.ceilings)
        self.report.add(section, **name, us=taken * 1e3, floor_us=floor * 1e3, of_floor=floor / taken)
        return taken


def measure_kernels(bench: Bench, peers: Mapping[str, PeerKernels]) -> None:
    """Measure all kernels over the grid."""
    _lora(bench, peers)
    _attention(bench)
    _sampling(bench)


def _lora(bench: Bench, peers: Mapping[str, PeerKernels]) -> None:
    ratios: dict[str, list[float]] = {name: [] for name in peers}
    for rows, mix, group, operands in _lora_cells(bench.grid, bench.like):
        name = {"rows": rows, "mix": mix.name, "linear": group}
        call, y = ours(operands)
        check(name, call, y, reference(operands))
        ranks = operands.ranks
        work = lora_work(
            operands.x.shape[1], operands.group.out_features, [ranks[slot] for slot in operands.slots], ranks
        )
        taken = bench.measure("LoRA shrink and expand", name | {"by": "loramux"}, work, call)
        for peer, kernels in peers.items():
            call, y = kernels.prepare(operands)
            check(name | {"by": peer}, call, y, reference(operands))
            theirs = bench.measure("LoRA shrink and expand", name | {"by": peer}, work, call)
            ratios[peer].append(theirs / taken)
    for peer, of_peer in ratios.items():
        bench.report.add(
            "Against peers", peer=peer, cells=len(of_peer), geometric_mean=geometric_mean(of_peer), least=min(of_peer)
        )


def _lora_cells(grid: Grid, like: torch.Tensor) -> Iterator[tuple[int, Mix, str, LoraOperands]]:
    prefill = {prompts * length for prompts, length in grid.prefills}
    for rows in sorted({*grid.batches, *prefill}):
        for mix in grid.mixes:
            # A prefill of as many adapters as tokens does not exist.
            if not mix.adapters and (mix.adapters == 0 or rows in prefill):
                continue
            for group, (in_features, widths) in grid.model.groups.items():
                yield rows, mix, group, make_operands(rows, mix, in_features, widths, like)


def ours(operands: LoraOperands) -> tuple[Callable[[], object], torch.Tensor]:
    """(our call, the tensor that it adds to)."""
    y = operands.y.clone()
    args = (operands.pool, operands.table, operands.group, operands.segments)

    def call() -> None:
        lora_expand(lora_shrink(operands.x, *args), *args, y)

    return call, y


def check(name: Mapping[str, Any], call: Callable[[], object], y: torch.Tensor, wanted: torch.Tensor) -> None:
    """Run once and compare; raises WrongResult."""
    call()
    error = relative_error(y, wanted)
    if not error <= TOLERANCE:
        raise WrongResult(f"{dict(name)}: relative error {error:.2g} is over {TOLERANCE}")


def _attention(bench: Bench) -> None:
    grid = bench.grid
    steps = {f"decode {b} x {c}": [(1, c)] * b for b in grid.batches for c in grid.contexts}
    steps |= {f"prefill {prompts} x {length}": [(length, length)] * prompts for prompts, length in grid.prefills}
    steps["mixed"] = [(1, grid.contexts[-1])] * grid.batches[-1] + [(grid.prefills[0][1],) * 2]
    for step, spans in steps.items():
        query, layer, batch = attention_operands(bench, spans)
        scaling = query.shape[2] ** -0.5
        output = paged_attention(query, layer, batch, scaling)
        error = relative_error(output, paged_attention_reference(query, layer, batch, scaling))
        if not error <= TOLERANCE:
            raise WrongResult(f"attention, {step}: relative error {error:.2g} is over {TOLERANCE}")
        work = attention_work(grid.model, spans)
        bench.measure(
            "Paged attention, one layer",
            {"step": step},
            work,
            lambda q=query, kv=layer, b=batch, s=scaling: paged_attention(q, kv, b, s),
        )
        key, value = query.new_empty(2, len(query), grid.model.num_key_value_heads, grid.model.head_dim).normal_()
        moved = Work(4 * key.numel() * key.element_size())
        bench.measure(
            "KV write, one layer",
            {"step": step},
            moved,
            lambda k=key, v=value, kv=layer, b=batch: write_kv(k, v, kv, b.slot_mapping),
        )


def attention_operands(bench: Bench, spans: list[tuple[int, int]]) -> tuple[torch.Tensor, KvLayer, AttentionBatch]:
    """(query, one layer's cache, the batch) for (query rows, context) spans, pages in a random order."""
    model, like = bench.grid.model, bench.like
    blocks = [-(-context // BLOCK_SIZE) for _, context in spans]
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    block_table = torch.zeros(len(spans), max(blocks), dtype=torch.int32)
    slots, first = [], 0
    for row, (count, context) in enumerate(spans):
        block_table[row, : blocks[row]] = order[first : first + blocks[row]]
        first += blocks[row]
        at = torch.arange(context - count, context)
        slots.append(block_table[row][at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE)
    shape = (2, sum(blocks), model.num_key_value_heads, BLOCK_SIZE, model.head_dim)
    batch = AttentionBatch(
        cu_seqlens=torch.tensor([0] + [count for count, _ in spans]).cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in spans], dtype=torch.int32),
        block_table=block_table.to(like.device),
        slot_mapping=torch.cat(slots).to(like.device),
    )
    rows = sum(count for count, _ in spans)
    query = like.new_empty(rows, model.num_attention_heads, model.head_dim).normal_()
    return query, KvLayer(*like.new_empty(shape).normal_()), batch


def _sampling(bench: Bench) -> None:
    rows, vocab = bench.grid.batches[-1], bench.grid.model.vocab_size
    logits = bench.like.new_empty(rows, vocab).normal_(0, 3)
    ones = torch.ones(rows, device=logits.device)
    kinds = {"greedy": (0.0, 1.0), "temperature": (1.0, 1.0), "top_p 0.9": (1.0, 0.9)}
    for kind, (temperature, top_p) in kinds.items():
        batch = SamplingBatch(
            temperature=ones * temperature,
            top_k=torch.zeros_like(ones, dtype=torch.int32),
            top_p=ones * top_p,
            min_p=torch.zeros_like(ones),
            seed=torch.arange(rows, device=logits.device),
            step=torch.zeros_like(ones, dtype=torch.int32),
            num_rows=torch.full_like(ones[:1], rows, dtype=torch.int32),
            is_steered=torch.zeros_like(ones, dtype=torch.int32),
        )
        tokens, wanted = torch.zeros(2, rows, dtype=torch.int64, device=logits.device)
        sample(logits, batch, tokens)
        sample_reference(logits, batch, wanted)
        agreed = (tokens == wanted).float().mean().item()
        if agreed < 0.95:  # rounding decides a draw now and then
            raise WrongResult(f"sampling, {kind}: {agreed:.0%} of the tokens are the reference's")
        work = Work(logits.numel() * logits.element_size())
        bench.measure("Sampling", {"rows": rows, "kind": kind}, work, lambda b=batch, t=tokens: sample(logits, b, t))
