"""The bounds of planning, frozen: the limits of a step, the operator's policy, and the page budget.

`PageBudget` computes the exact maximum of pages that a set of sequences will hold at one time, and decides if another
sequence fits. vLLM and S-LoRA assume the maximum length of all sequences at once, which leaves a third of a pool
unused. In fact, sequences grow by one token per step and end one after the other, so their peak is lower. `kv_peak`
computes this peak exactly.
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

import msgspec

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings
from loramux.common.units import QUIET_SECONDS
from loramux.engine.memory.pages import CachedPage
from loramux.engine.messages import Request, ServiceClass, StepLimits
from loramux.engine.scheduling.sequence import Sequence

CPU_MIXED_PREFILL_TOKENS = 256
"""Maximum number of prompt tokens in a CPU's step in which sequences decode. More tokens would not be faster per token,
also not in adapters. This number of tokens takes a third of a second with a model of 0.5B parameters.
"""

GPU_MIXED_PREFILL_TOKENS = 512
"""The same for a GPU. A model of 8B parameters computes these tokens in about twice the time of reading its weights."""

FEW_ROWS, FEW_TOKENS = 64, 1024
"""Sequences and tokens of the largest step on a CPU, and on a GPU of little memory."""
MANY_ROWS, MANY_TOKENS = 256, 2048
"""Sequences and tokens of the largest step on a GPU of at least LARGE_GPU_BYTES. A decode step there reads the weights
once for all its rows, so more rows cost mostly their KV. A step of 2,048 tokens is the largest that is recorded."""
LARGE_GPU_BYTES = 40_000_000_000
"""Bytes of GPU memory of one engine from which the KV of more than FEW_ROWS sequences fits next to a usual base."""

ATTENTION_COST = 2.0
"""Time of a multiplication in a CPU's attention, with its part of the softmax, over the time of one in its products. On
a Zen 5, with 2, chunks of few tokens after a long context took as long as chunks of many tokens after none."""

GPU_ROW_TILE = 128
"""Rows that a product's kernels take at once on a GPU: recorded steps of so many rows have buckets of these sizes."""


def default_mixed_prefill_tokens(*, on_cpu: bool) -> int:
    """Return the default for the maximum number of prompt tokens in a step in which sequences decode."""
    return CPU_MIXED_PREFILL_TOKENS if on_cpu else GPU_MIXED_PREFILL_TOKENS


def token_context(products: float, attention: float) -> float | None:
    """Return the tokens of context whose attention costs a token of a CPU as much as its products with the weights;
    None if no layer reads the whole context.

    `products`: multiplications of a token with the weights. `attention`: multiplications of a token with one token of
    its context, over all layers that read the whole context.
    """
    return products / (ATTENTION_COST * attention) if attention else None


def step_limits(engine: EngineSettings, gpu_bytes: int | None) -> StepLimits:
    """Return the limits of a step: the operator's settings, and the defaults of the device for the others.

    `gpu_bytes` is the part of a GPU's memory that one engine gets; None on a CPU.
    """
    is_large = gpu_bytes is not None and gpu_bytes >= LARGE_GPU_BYTES
    rows, tokens = (MANY_ROWS, MANY_TOKENS) if is_large else (FEW_ROWS, FEW_TOKENS)
    return StepLimits(
        engine.max_num_seqs or rows,
        engine.max_num_batched_tokens or tokens,
        engine.max_mixed_prefill_tokens or default_mixed_prefill_tokens(on_cpu=gpu_bytes is None),
        engine.max_draft_tokens if engine.speculation != "off" else 0,
    )


def limits_with_images(limits: StepLimits, whole_tokens: int) -> StepLimits:
    """Return limits with which a step holds, next to any number of decoding sequences, an image of `whole_tokens`, the
    most of an image that cannot be cut; 0: images can be cut."""
    if not whole_tokens:
        return limits
    return msgspec.structs.replace(
        limits,
        max_num_batched_tokens=max(limits.max_num_batched_tokens, whole_tokens + limits.max_num_seqs),
        max_mixed_prefill_tokens=max(limits.max_mixed_prefill_tokens, whole_tokens),
    )


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The usual limits of a step and of a sequence."""

    max_num_seqs: int
    """Maximum number of rows in a step."""
    max_num_batched_tokens: int
    max_model_len: int
    max_mixed_prefill_tokens: int = sys.maxsize
    """Most prompt tokens of a step in which sequences decode; by default only the other limits apply."""
    row_tile: int = 1
    """Rows that a product takes at once: a tile that is begun costs as much as a full one."""
    whole_prompts: bool = False
    """True if each prompt is computed whole in one step, because its tokens see later ones."""
    whole_tokens: int = 0
    """Most tokens of an image that is computed whole in one step, because its tokens see later ones of the image; 0:
    images can be cut."""
    token_context: float = math.inf
    """Tokens of context whose attention costs a token as much as its products. `max_mixed_prefill_tokens` are tokens
    without context, and fewer after a long context, so that a step takes the same time; inf: attention is not counted,
    not in predictions either."""

    def prefill_tokens(self, decoding: int) -> int:
        """Return the most prompt tokens of a step in which `decoding` sequences decode.

        Up to a quarter is left for the next step if the rows then fill whole tiles, but never so much that a whole
        image has no room: as long as as many sequences decode, it would have none in the next steps either.
        """
        left = max(0, self.max_num_batched_tokens - decoding)
        if not decoding:
            return left
        most = min(left, self.max_mixed_prefill_tokens)
        begun = (most + decoding) % self.row_tile
        return most - begun if 4 * begun <= most and most - begun >= self.whole_tokens else most

    @classmethod
    def of(
        cls,
        step: StepLimits,
        max_model_len: int,
        *,
        on_cpu: bool,
        whole_prompts: bool = False,
        whole_tokens: int = 0,
        token_context: float = math.inf,
    ) -> SchedulerLimits:
        """Return the limits of `step` for one device. A step holds the longest whole prompt."""
        tile = 1 if on_cpu else GPU_ROW_TILE
        tokens = max(step.max_num_batched_tokens, max_model_len if whole_prompts else 0)
        mixed = step.max_mixed_prefill_tokens
        return cls(
            step.max_num_seqs,
            tokens,
            max_model_len,
            mixed,
            tile,
            whole_prompts,
            whole_tokens,
            token_context=token_context,
        )


def _shares() -> dict[ServiceClass, float]:
    return {ServiceClass.INTERACTIVE: 8.0, ServiceClass.STANDARD: 3.0, ServiceClass.BATCH: 1.0}


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's choices. Service is in units: a computed prompt token is one, a generated token two (VTC, OSDI
    2024)."""

    class_shares: Mapping[ServiceClass, float] = field(default_factory=_shares)
    """Weights of the classes, never strict priority: every class with work makes progress."""
    max_service_lead: float = 8192.0
    """Maximum lead of a party over a waiting party, in units divided by weight. A party further ahead is suspended. The
    lead should exceed the units of one large request. Otherwise requests are preempted very often (a fifth of the
    requests of the Azure conversation trace).
    """
    max_lift: float = 131_072.0
    """Maximum distance, in units divided by weight, by which service on other engines puts a tenant after the first
    waiting tenant of this engine. So the tenant waits for at most this much service of other tenants, which is some
    seconds of a GPU.
    """
    affinity_window: float = 512.0
    """Maximum units, divided by weight, by which a flow may be admitted early because its adapter is already in the
    batch. The window applies if the batch's adapters cost more than `adapter_overhead_target`.
    """
    adapter_overhead_target: float = 0.1
    """Ratio of the bytes of a step's adapters to the bytes that the step reads anyway, above which `affinity_window`
    applies.
    """
    weight_pages: float = math.inf
    """Number of pages of the base's weights, which every step reads. Infinite if unknown; adapters then count as free.
    """
    reserved_pages: Mapping[ServiceClass, float] = field(default_factory=dict)
    """Share of the pool that is reserved for a class while it holds less."""
    tenant_guaranteed_pages: float = 0.0
    """Guaranteed share of the pool per weight of a tenant. A tenant gets these pages back from tenants that hold more
    than their guarantee.
    """
    tenant_max_pages: float = 1.0
    """Share of the pool that a tenant may hold, guaranteed and borrowed pages together."""
    deadlines_ms: Mapping[ServiceClass, int] = field(default_factory=dict)
    """Milliseconds to the first token; applies to requests of a class that set no deadline themselves."""
    background_prefill_tokens: int = 128
    """Maximum number of prompt tokens of class batch in a step that also serves a higher class
    (`RequestQueue.background`).
    """
    background_step_share: float = 0.25
    """Share of a step's fixed time by which prompt tokens of class batch may lengthen the step. A GPU that reads 16 GB
    of weights computes about 80 tokens in this time, a CPU far fewer.
    """
    quiet_seconds: float = QUIET_SECONDS
    """Seconds for which class batch still comes after a class that has run. Between two questions of a conversation no
    request of it runs, and the next question must wait for the step that is running on its arrival.
    """
    load_units_per_page: float = 1.0
    """Units charged for each page of a loaded adapter: a page crosses the host link in about the time of one token's
    prefill. Copying 2 MiB at 50 GB/s takes 42 microseconds; computing 16 GFLOP at 400 TFLOP/s takes 40 microseconds.
    """
    prefix_cache: bool = False
    """True to keep full pages of KV for requests that begin with the same tokens."""
    cache_answers: bool = True
    """True to keep pages of answers too. False if a token has another state in an answer than in a prompt."""
    max_draft_tokens: int = 0
    """Longest draft of a sequence in a step, in tokens; 0: no speculative decoding."""
    lookahead: int = 32
    """Maximum number of tenants whose requests a step examines, in addition to the admitted ones, to start loads of
    their adapters.
    """
    window: int = 8
    """Maximum number of requests of one tenant that a step examines to find a request whose adapter is ready."""

    def max_pages(self, num_pages: int) -> int:
        """Return the maximum number of pages, of `num_pages`, that one tenant may hold."""
        return int(num_pages * self.tenant_max_pages)

    @classmethod
    def from_settings(cls, settings: Settings, weight_pages: float, max_draft_tokens: int = 0) -> Policy:
        """Return the operator's settings. `weight_pages` is the size of the model's weights in pages, and
        `max_draft_tokens` the longest draft that the model allows."""
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
            max_draft_tokens=max_draft_tokens,
        )

    def deadline_ms(self, request: Request) -> int | None:
        """Return the deadline of `request`, which is that of its class if it sets none itself."""
        asked = request.deadline_ms
        return self.deadlines_ms.get(request.service_class) if asked is None else asked


@dataclass(frozen=True, slots=True)
class PageBudget:
    """The pool's size and the shares that admission leaves free. No method changes state."""

    num_pages: int
    block_size: int
    state_pages: int = 0
    """Pages before a sequence's KV, which hold its recurrent states (`execution.attention`)."""
    watermark_share: float = 0.01
    """Share of the pool that is kept free at admission, so that rounding and exceeded estimates rarely cause a
    preemption.
    """
    reserve_share: float = 0.05
    """Share of the pool, and of the rows, that only flows holding less than this share may take. So a new flow gets
    into a full pool without waiting and without preempting another flow.
    """

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
        """Return the maximum number of pages that the sequences hold at one time, if each generates its expected
        tokens, one per step.

        The sum has its maximum when one of the sequences ends. When the sequence with the i-th most remaining tokens
        ends, this sequence and the i - 1 longer sequences have all grown by its remaining tokens, `left`. A sequence of
        q full pages and r tokens then holds q + ceil((r + left) / block_size) pages, so it is enough to count the
        longer sequences by r. This takes O(n log n + n * block_size).

        A page that several sequences share is counted for the sequence that holds it longest, so the sum stays exact.
        `reused` are pages that a sequence does not hold yet but will hold. Sequences whose drafts are accepted grow
        faster than other sequences and are counted at their full length; the sum is then an upper bound. Drafts
        themselves hold no page from one plan to the next.
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
        """Return whether `candidate` fits at its full length while the other sequences hold `most_pages`, their pages
        at full length.
        """
        return most_pages + self.pages_for(candidate.max_len) <= self.num_pages - self.watermark - reserved

    def admits(self, candidate: Sequence, running: Items[Sequence], adapter_pages: int, reserved: int = 0) -> bool:
        """Return whether the peak of KV with `candidate`, and the pinned adapters with its own, stay in the pool.

        Adapters and cached KV that are not in use are evictable and therefore not counted, unless the candidate would
        use them. Pages that the candidate shares with running sequences count only once. The candidate cannot use the
        `reserved` pages. An empty pool admits every sequence that fits alone.
        """
        if not running:
            return self.kv_peak([candidate]) + adapter_pages <= self.num_pages
        limit = self.num_pages - self.watermark - reserved - adapter_pages
        found = bisect_left(candidate.prefix_pages, True, key=_unused)
        if sum(map(_own_pages, running)) + self.pages_for(len(candidate.token_ids)) - found > limit:
            return False  # in a full pool this test avoids most computations of a peak
        if sum(map(self._pages_at_end, running)) + self._pages_at_end(candidate) <= limit:
            return True  # avoids most computations in an empty pool: a sequence never holds more pages
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
