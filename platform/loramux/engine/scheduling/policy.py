"""The bounds of planning, frozen: the limits of a step, the operator's policy, and the page budget.

`PageBudget` computes exactly the most pages that a set of sequences will hold at once, and says whether one more
sequence fits. The bound of vLLM and S-LoRA takes every sequence at its longest, which leaves a third of a pool unused.
Sequences grow by a token a step and end one after the other; their peak is lower and can be computed exactly: see
`kv_peak`.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings
from loramux.common.units import QUIET_SECONDS
from loramux.engine.memory.pages import CachedPage
from loramux.engine.messages import ServiceClass
from loramux.engine.scheduling.sequence import Sequence

CPU_MIXED_PREFILL_TOKENS = 256
"""Most prompt tokens of a CPU's step in which sequences decode. More would not be faster per token, in adapters either.
These take a third of a second with a model of 0.5B parameters."""

GPU_MIXED_PREFILL_TOKENS = 512
"""The same for a GPU. A model of 8B parameters computes these tokens in about twice the time of reading its weights."""


GPU_ROW_TILE = 128
"""Rows that a product's kernels take at once on a GPU: recorded steps of so many rows have buckets of these sizes."""


def default_mixed_prefill_tokens(*, on_cpu: bool) -> int:
    """Return the most prompt tokens of a step in which sequences decode, if the operator sets none."""
    return CPU_MIXED_PREFILL_TOKENS if on_cpu else GPU_MIXED_PREFILL_TOKENS


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The usual limits of a step and of a sequence."""

    max_num_seqs: int
    """Most rows of a step."""
    max_num_batched_tokens: int
    max_model_len: int
    max_mixed_prefill_tokens: int = sys.maxsize
    """Most prompt tokens of a step in which sequences decode; by default only the other limits apply."""
    row_tile: int = 1
    """Rows that a product takes at once: a tile that is begun costs as much as a full one."""

    def prefill_tokens(self, decoding: int) -> int:
        """Return the most prompt tokens of a step in which `decoding` sequences decode.

        Up to a quarter is left for the next step if the rows then fill whole tiles.
        """
        left = max(0, self.max_num_batched_tokens - decoding)
        if not decoding:
            return left
        most = min(left, self.max_mixed_prefill_tokens)
        begun = (most + decoding) % self.row_tile
        return most - begun if 4 * begun <= most else most

    @classmethod
    def from_settings(cls, engine: EngineSettings, max_model_len: int, *, on_cpu: bool) -> SchedulerLimits:
        """Return the operator's settings, with the defaults of the device."""
        mixed = engine.max_mixed_prefill_tokens or default_mixed_prefill_tokens(on_cpu=on_cpu)
        tile = 1 if on_cpu else GPU_ROW_TILE
        return cls(engine.max_num_seqs, engine.max_num_batched_tokens, max_model_len, mixed, tile)


def _shares() -> dict[ServiceClass, float]:
    return {ServiceClass.INTERACTIVE: 8.0, ServiceClass.STANDARD: 3.0, ServiceClass.BATCH: 1.0}


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's choices. Service is in units: a computed prompt token is one, a generated token two (VTC, OSDI
    2024)."""

    class_shares: Mapping[ServiceClass, float] = field(default_factory=_shares)
    """Weights of the classes, never strict priority: every class with work makes progress."""
    max_service_lead: float = 8192.0
    """Units over weight that a party may be ahead of another that waits; further ahead it sits out. It should exceed
    the units of one large request, else requests are preempted all the time: a fifth of the requests of the Azure
    conversation trace then are."""
    max_lift: float = 131_072.0
    """Units over weight by which service on other engines may put a tenant after the first that waits here. So the
    tenant waits for at most that much service of others: some seconds of a GPU."""
    affinity_window: float = 512.0
    """Units over weight by which a flow may be admitted early because its adapter is in the batch already. It applies
    once the batch's adapters cost more than `adapter_overhead_target`."""
    adapter_overhead_target: float = 0.1
    """Bytes of a step's adapters, over the bytes that it reads anyway, above which `affinity_window` applies."""
    weight_pages: float = math.inf
    """Pages of the base's weights, which every step reads; infinite if unknown: adapters then cost nothing."""
    reserved_pages: Mapping[ServiceClass, float] = field(default_factory=dict)
    """Share of the pool kept for a class while it holds less."""
    tenant_guaranteed_pages: float = 0.0
    """Share of the pool, times its weight, that a tenant gets back from tenants that hold more than theirs."""
    tenant_max_pages: float = 1.0
    """Share of the pool that a tenant may hold, guaranteed and borrowed pages together."""
    deadlines_ms: Mapping[ServiceClass, int] = field(default_factory=dict)
    """Milliseconds to the first token; applies to requests of a class that set no deadline themselves."""
    background_prefill_tokens: int = 128
    """Most prompt tokens of class batch in a step that also serves a class above it (`RequestQueue.background`)."""
    background_step_share: float = 0.25
    """Share of a step's fixed time by which those prompt tokens may lengthen the step. A GPU that reads 16 GB of
    weights computes about 80 tokens in that time, a CPU far fewer."""
    quiet_seconds: float = QUIET_SECONDS
    """Seconds for which class batch still gives way to a class that has run. Between two questions of a conversation
    nothing runs, and the next question must wait for the step that is running when it comes."""
    load_units_per_page: float = 1.0
    """Units charged for each page of a loaded adapter: a page crosses the host link in about the time of one token's
    prefill. 2 MiB at 50 GB/s take 42 microseconds, 16 GFLOP at 400 TFLOP/s take 40."""
    prefix_cache: bool = False
    """True to keep full pages of KV for requests that begin with the same tokens."""
    max_draft_tokens: int = 0
    """Longest draft of a sequence in a step, in tokens; 0: no speculative decoding."""
    lookahead: int = 32
    """Tenants that a step looks at in addition to those that it admits, to have their adapters loaded."""
    window: int = 8
    """Requests of one tenant that a step looks at to find one whose adapter is ready."""

    def max_pages(self, num_pages: int) -> int:
        """Return the most pages, of `num_pages`, that one tenant may hold."""
        return int(num_pages * self.tenant_max_pages)

    @classmethod
    def from_settings(cls, settings: Settings, weight_pages: float) -> Policy:
        """Return the operator's settings; the model's weights are as large as `weight_pages` pages."""
        asked = settings.scheduler
        return cls(
            class_shares={c: getattr(asked.class_shares, c) for c in ServiceClass},
            max_service_lead=asked.max_service_lead,
            max_lift=asked.max_lift,
            affinity_window=asked.affinity_window,
            adapter_overhead_target=asked.adapter_overhead_target,
            weight_pages=weight_pages,
            reserved_pages={c: getattr(asked.reserved_pages, c) for c in ServiceClass},
            tenant_guaranteed_pages=asked.tenant_guaranteed_pages,
            tenant_max_pages=asked.tenant_max_pages,
            deadlines_ms={c: limit for c in ServiceClass if (limit := getattr(asked.deadlines_ms, c)) is not None},
            prefix_cache=settings.engine.prefix_cache,
            max_draft_tokens=settings.engine.max_draft_tokens if settings.engine.speculation == "ngram" else 0,
        )


@dataclass(frozen=True, slots=True)
class PageBudget:
    """The pool's size and the shares that admission leaves free. No method changes state."""

    num_pages: int
    block_size: int
    state_pages: int = 0
    """Pages before a sequence's KV, which hold its recurrent states (`execution.attention`)."""
    watermark_share: float = 0.01
    """Share of the pool kept free at admission: rounding and exceeded estimates then rarely cost a preemption."""
    reserve_share: float = 0.05
    """Share of the pool, and of the rows, that only flows holding less than this share may take. So a new flow gets
    into a full pool without waiting for, or preempting, another."""

    @property
    def watermark(self) -> int:
        """Pages kept free at admission."""
        return int(self.num_pages * self.watermark_share)

    @property
    def reserve(self) -> int:
        """Pages kept for flows that hold few."""
        return int(self.num_pages * self.reserve_share)

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that hold `num_tokens` tokens of one sequence, and its states."""
        return self.state_pages - (-num_tokens // self.block_size)

    def tokens_in(self, num_pages: int) -> int:
        """Return the tokens of one sequence that `num_pages` pages hold."""
        return max(0, num_pages - self.state_pages) * self.block_size

    def kv_peak(self, sequences: Iterable[Sequence], reused: Items[CachedPage] = ()) -> int:
        """Return the most pages that the sequences hold at once if each generates its expected tokens, one a step.

        The sum peaks when one of them ends. When the i-th longest ends, it and the i - 1 longer ones have all grown by
        the `left` tokens that it had left. A sequence of q full pages and r tokens then holds q + ceil((r + left) /
        block_size) pages, so it is enough to count the longer ones by r. This takes O(n log n + n * block_size).

        A page that several sequences share is counted for the one that holds it longest, so the sum stays exact.
        `reused` are pages that one of them does not hold yet and will. Sequences whose drafts are accepted grow faster
        than the others and are counted at their ends; then the sum is an upper bound. Drafts themselves hold no page
        from one plan to the next.
        """
        size = self.block_size
        # Sequences counted so far, by the number of tokens in their last page.
        remainders = [0] * size
        full_pages, peak, already, count = 0, 0, 0, 0
        counted: set[CachedPage] = set()
        about_to = set(reused)
        runs = sorted(
            ((s.outruns_others, s.likely_left, len(s.token_ids), s.prefix_pages) for s in sequences),
            key=itemgetter(0, 1),
            reverse=True,
        )
        for outruns, left, held, prefix in runs:
            growth = 0 if outruns else left
            if outruns:
                full_pages += self.pages_for(held + left)
            else:
                full_pages += self.state_pages + held // size
                remainders[held % size] += 1
                count += 1
            if prefix and (prefix[0].users > 1 or prefix[0] in about_to):
                already = _length_inside(prefix, counted, already)
                full_pages -= already
                for page in islice(prefix, already, None):
                    if page.users < 2 and page not in about_to:
                        break
                    counted.add(page)
            # With r tokens in the last page, r + rest tokens take one page, two if they exceed
            # `size`, and none if both are 0.
            grown, rest = divmod(growth, size)
            over = sum(remainders[size - rest + 1 :]) if rest else -remainders[0]
            peak = max(peak, full_pages + count * (grown + 1) + over)
        return peak

    def fits_alone(self, num_tokens: int, adapter_pages: int) -> bool:
        """Return whether a request of `num_tokens` (prompt and output) could ever run, in an otherwise empty pool."""
        return self.pages_for(num_tokens) + adapter_pages <= self.num_pages

    def holds_all(self, most_pages: int, candidate: Sequence, reserved: int) -> bool:
        """Return whether `candidate` fits at its longest while the others hold `most_pages`, their pages at their
        longest."""
        return most_pages + self.pages_for(candidate.max_len) <= self.num_pages - self.watermark - reserved

    def admits(self, candidate: Sequence, running: Items[Sequence], adapter_pages: int, reserved: int = 0) -> bool:
        """Return whether the peak of KV with `candidate`, and the pinned adapters with its own, stay in the pool.

        Adapters and cached KV that are not in use are evictable and therefore not counted, unless the candidate would
        use them. Pages that it shares with running sequences cost it nothing. `reserved` pages are kept from it. An
        empty pool admits whatever fits alone.
        """
        if not running:
            return self.kv_peak([candidate]) + adapter_pages <= self.num_pages
        limit = self.num_pages - self.watermark - reserved - adapter_pages
        found = bisect_left(candidate.prefix_pages, True, key=_unused)
        if sum(map(_own_pages, running)) + self.pages_for(len(candidate.token_ids)) - found > limit:
            return False  # in a full pool this spares most computations of a peak
        if sum(map(self._pages_at_end, running)) + self._pages_at_end(candidate) <= limit:
            return True  # in an empty pool this spares most: no sequence holds more than at its end
        return self.kv_peak([*running, candidate], candidate.prefix_pages[:found]) <= limit

    def _pages_at_end(self, sequence: Sequence) -> int:
        return self.pages_for(len(sequence.token_ids) + sequence.likely_left)


def _unused(page: CachedPage) -> bool:
    return not page.users


def _unshared(page: CachedPage) -> bool:
    return page.users < 2


def _own_pages(sequence: Sequence) -> int:
    """Return the number of pages that no other sequence uses."""
    prefix = sequence.prefix_pages
    shared = bisect_left(prefix, True, key=_unshared) if prefix and prefix[0].users > 1 else 0
    return len(sequence.pages) - shared


def _length_inside(prefix: Items[CachedPage], counted: set[CachedPage], guess: int) -> int:
    """Count the leading pages of `prefix` that are in `counted`; fast if `guess` is right."""
    if guess < len(prefix) and prefix[guess] not in counted and (not guess or prefix[guess - 1] in counted):
        return guess
    return bisect_left(prefix, True, key=lambda page: page not in counted)
