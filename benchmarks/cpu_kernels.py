"""Cost of one step on this CPU, operator by operator: loramux's operators compared with the fastest that torch offers
for the same work.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/cpu_kernels.py [--threads 2] [--dtype bfloat16] [--layers 24]

The model is Llama-shaped, 0.5B parameters; sixteen adapters of ranks 8, 16, 32, 64 touch every linear. A row of the
table is the total time of one operator in a step (all layers). Times are medians of alternating runs. GB/s are the
bytes that must be read once, divided by this time, and `memory` is the share of this machine's measured read bandwidth.
For torch the fastest variant counts: joined linears, packed by oneDNN or plain; LoRA by addmm over rows sorted by
adapter; attention by SDPA over gathered pages. Other work on the machine affects both sides, but not equally.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from loramux_kernels import packed_linear
from loramux_kernels.format_choice import read_bandwidth
from loramux_kernels.lora import lora_expand, lora_shrink
from loramux_kernels.packed_linear import PackedLinear
from loramux_kernels.paged_attention import paged_attention, write_kv
from loramux_kernels.tables import RANK_TILE, AttentionBatch, KvLayer, LoraGroup, LoraTable, Segments

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 1280, 3840, 20, 4, 64, 16
KV = KV_HEADS * HEAD_DIM
GROUPS = (  # in_features, out_features of the linears that read it
    (HIDDEN, (HIDDEN, KV, KV)),
    (HIDDEN, (HIDDEN,)),
    (HIDDEN, (FEED_FORWARD, FEED_FORWARD)),
    (FEED_FORWARD, (HIDDEN,)),
)
RANKS = (8, 16, 32, 64) * 4
Step = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    name: str
    bytes_read: int
    ours: float
    torch: float


def median(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Return the median seconds of each step. The steps alternate, so that a busy moment affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def linears(dtype: torch.dtype, layers: int, rows: list[int], repeats: int) -> list[Result]:
    weights = [
        [torch.randn(out, width).to(dtype) * width**-0.5 for out in outs]
        for _ in range(layers)
        for width, outs in GROUPS
    ]
    candidates = {"plain": [packed_linear.Plain(w, None) for w in weights]}
    if dtype == torch.bfloat16:
        candidates["onednn"] = [packed_linear.OneDnn(w, None) for w in weights]
    candidates["ours"] = [PackedLinear(w, [None] * len(w)) for w in weights]
    total = sum(weight.nbytes for group in weights for weight in group)
    results = []
    for count in rows:
        inputs = {width: torch.randn(count, width).to(dtype) for width, _ in GROUPS}

        def run(forms, inputs=inputs):
            for form, group in zip(forms, weights, strict=True):
                form(inputs[group[0].shape[1]])

        times = median({name: lambda forms=forms: run(forms) for name, forms in candidates.items()}, repeats)
        ours = times.pop("ours")
        best = min(times, key=times.__getitem__)
        results.append(Result(f"linears, {count} rows (torch: {best})", total, ours, times[best]))
    return results


@dataclass(frozen=True)
class Adapters:
    """Resident adapters in a pool, and the same matrices as tensors for torch."""

    pool: torch.Tensor
    table: LoraTable
    groups: list[tuple[int, LoraGroup]]
    a: list[list[torch.Tensor]]
    b: list[list[torch.Tensor]]

    def bytes_of(self, slots: tuple[int, ...]) -> int:
        return sum(m.nbytes for slot in slots for m in (*self.a[slot], *self.b[slot]))


def load_adapters(dtype: torch.dtype, layers: int) -> Adapters:
    widths = [(width, out) for _ in range(layers) for width, outs in GROUPS for out in outs]
    shape = (len(RANKS), len(widths), -(-max(RANKS) // RANK_TILE))
    a_offsets, b_offsets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    pool = torch.randn(sum(rank * (i + o) for rank in RANKS for i, o in widths)).to(dtype) * 0.02
    a: list[list[torch.Tensor]] = [[] for _ in RANKS]
    b: list[list[torch.Tensor]] = [[] for _ in RANKS]
    end = 0
    for slot, rank in enumerate(RANKS):
        for site, site_widths in enumerate(widths):
            for offsets, matrices, width in zip((a_offsets, b_offsets), (a, b), site_widths, strict=True):
                matrices[slot].append(pool[end : end + rank * width].view(rank, width))
                for tile in range(-(-rank // RANK_TILE)):
                    offsets[slot, site, tile] = end + tile * RANK_TILE * width
                end += rank * width
    ranks = torch.tensor(RANKS, dtype=torch.int32)[:, None].repeat(1, len(widths))
    table = LoraTable(a_offsets, b_offsets, ranks, torch.ones(shape[:2]))
    groups, site = [], 0
    for _ in range(layers):
        for width, outs in GROUPS:
            groups.append((width, LoraGroup(tuple(range(site, site + len(outs))), outs)))
            site += len(outs)
    return Adapters(pool, table, groups, a, b)


def lora(adapters: Adapters, name: str, slots: tuple[int, ...], rows_each: int, repeats: int) -> Result:
    segments = Segments(tuple(range(0, rows_each * len(slots) + 1, rows_each)), slots)
    dtype, rows = adapters.pool.dtype, segments.rows
    inputs = {width: torch.randn(rows, width).to(dtype) for width, _ in GROUPS}
    outputs = [torch.randn(rows, group.out_starts[-1]).to(dtype) for _, group in adapters.groups]

    def ours() -> None:
        for (width, group), y in zip(adapters.groups, outputs, strict=True):
            v = lora_shrink(inputs[width], adapters.pool, adapters.table, group, segments)
            lora_expand(v, adapters.pool, adapters.table, group, segments, y)

    def sorted_addmm() -> None:
        for (width, group), y in zip(adapters.groups, outputs, strict=True):
            for slot, start, stop in segments.spans:
                for site, first, last in zip(group.sites, group.out_starts, group.out_starts[1:], strict=False):
                    v = inputs[width][start:stop] @ adapters.a[slot][site].T
                    y[start:stop, first:last].addmm_(v, adapters.b[slot][site])

    times = median({"ours": ours, "torch": sorted_addmm}, repeats)
    return Result(f"LoRA, {name}", adapters.bytes_of(slots), times["ours"], times["torch"])


def attention(dtype: torch.dtype, layers: int, name: str, rows: list[int], context: int, repeats: int) -> Result:
    """Every sequence has `context` tokens after the step, of which its `rows` are new."""
    pages = -(-context // BLOCK)
    pool = torch.randn(len(rows) * pages, layers, 2, KV_HEADS, BLOCK, HEAD_DIM).to(dtype)
    cache = [KvLayer(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(layers)]
    table = torch.randperm(len(rows) * pages).view(len(rows), pages)
    starts = [0, *accumulate(rows)]
    slots = [table[s, p // BLOCK] * BLOCK + p % BLOCK for s, n in enumerate(rows) for p in range(context - n, context)]
    batch = AttentionBatch(
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.full((len(rows),), context, dtype=torch.int32),
        block_table=table.int(),
        slot_mapping=torch.stack(slots),
    )
    query = torch.randn(HEADS, starts[-1], HEAD_DIM).to(dtype).transpose(0, 1)
    key, value = torch.randn(2, KV_HEADS, starts[-1], HEAD_DIM).to(dtype).transpose(1, 2)
    scaling = HEAD_DIM**-0.5

    def ours() -> None:
        for layer in cache:
            write_kv(key, value, layer, batch.slot_mapping)
            paged_attention(query, layer, batch, scaling)

    page_of, offset_of = batch.slot_mapping // BLOCK, batch.slot_mapping % BLOCK

    def gathered_sdpa() -> None:
        output = torch.empty(starts[-1], HEADS, HEAD_DIM, dtype=dtype)
        for layer in cache:
            layer.key[page_of, :, offset_of] = key
            layer.value[page_of, :, offset_of] = value
            for s, (start, stop, _) in enumerate(batch.spans):
                k, v = (
                    cache.index_select(0, table[s]).transpose(0, 1).flatten(1, 2)[:, :context][None]
                    for cache in (layer.key, layer.value)
                )
                output[start:stop] = _sdpa(query[start:stop], k, v, scaling)

    times = median({"ours": ours, "torch": gathered_sdpa}, repeats)
    read = 2 * len(rows) * context * KV * dtype.itemsize * layers
    return Result(f"attention, {name}, context {context}", read, times["ours"], times["torch"])


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute one sequence. In decode the query heads of a group become rows, so that the keys need not be repeated."""
    rows, context = query.shape[0], key.shape[2]
    if rows == 1:
        folded = query.view(1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        return functional.scaled_dot_product_attention(folded, key, value, scale=scaling).reshape(1, HEADS, HEAD_DIM)
    mask = None if rows == context else torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
    q = query.transpose(0, 1)[None]
    output = functional.scaled_dot_product_attention(
        q, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype, layers, repeats = getattr(torch, options.dtype), options.layers, options.repeats
    with torch.inference_mode():
        bandwidth = read_bandwidth()
        print(f"{options.threads} threads, {options.dtype}, {layers} layers; memory reads {bandwidth / 1e9:.1f} GB/s\n")
        print(f"{'a whole step of':44} {'MB':>6} {'ours ms':>8} {'torch ms':>9} {'ratio':>6} {'GB/s':>6} {'memory':>7}")
        for result in _results(dtype, layers, repeats):
            rate = result.bytes_read / result.ours
            print(
                f"{result.name:44} {result.bytes_read / 1e6:6.0f} {result.ours * 1e3:8.2f} {result.torch * 1e3:9.2f} "
                f"{result.torch / result.ours:6.2f} {rate / 1e9:6.1f} {rate / bandwidth:7.0%}"
            )


def _results(dtype: torch.dtype, layers: int, repeats: int) -> Iterator[Result]:
    yield from linears(dtype, layers, [1, 16, 256], repeats)
    adapters = load_adapters(dtype, layers)
    everyone = tuple(range(len(RANKS)))
    yield lora(adapters, "1 row, rank 16", (1,), 1, repeats)
    yield lora(adapters, "16 rows, 16 adapters", everyone, 1, repeats)
    yield lora(adapters, "16 rows, 1 adapter of rank 16", (1,), 16, repeats)
    yield lora(adapters, "256 rows, 1 adapter of rank 16", (1,), 256, repeats)
    yield lora(adapters, "256 rows, 16 adapters", everyone, 16, repeats)
    del adapters
    for context in (128, 512):
        yield attention(dtype, layers, "1 row", [1], context, repeats)
        yield attention(dtype, layers, "16 rows", [1] * 16, context, repeats)
    yield attention(dtype, layers, "prefill of 256", [256], 256, repeats)
    yield attention(dtype, layers, "last 256 rows", [256], 2048, repeats)


if __name__ == "__main__":
    main()
