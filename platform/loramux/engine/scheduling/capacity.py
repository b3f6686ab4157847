"""Capacity checks: does a sequence fit, and which running sequences must yield to it? They change no state.

The page budget, with the pages and rows that are kept for some and from others:

- `PageBudget.reserve_share`: kept for flows that hold few, so that a newcomer gets into a full pool at once.
- `Policy.reserved_pages`: kept for a class while it holds less.
- `Policy.tenant_guaranteed_pages`: pages beyond it are borrowed, and given back when a tenant that holds less than its
  guarantee needs them. `Policy.tenant_max_pages`: the most that a tenant may hold.
- Claims: the KV of sequences whose adapters are being loaded. See `has_pages`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import islice

from loramux.engine.request import Request
from loramux.engine.scheduling.fairness import Flow
from loramux.engine.scheduling.sequence import Sequence
from loramux.engine.scheduling.state import SchedulerState
from loramux.engine.scheduling.step import StepBuilder


class CapacityPolicy:
    """Pure functions of the scheduler's state, but for two memos that spare asking the same again."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._policy = state.policy
        self._budget = state.budget
        self._residency = state.residency
        self._rejected: dict[Sequence, tuple[int, int, int, bool, Sequence | None]] = {}
        self._tenant_pages: defaultdict[str, int] = defaultdict(int)
        self._num_counted = 0
        """The leading running sequences that `_tenant_pages` is the sum of."""
        self._counted_at: tuple[int, int] | None = None

    # one request

    def too_long(self, request: Request) -> str | None:
        """Return why no pool of this size, model or quota could hold `request`, with the numbers."""
        prompt, max_tokens = len(request.prompt_token_ids), request.max_output
        by_quota = self._budget.tokens_in(self._policy.max_pages(self._budget.num_pages))
        limit = min(self._state.limits.max_model_len, by_quota)
        if prompt + max_tokens <= limit:
            return None
        return (
            f"The prompt has {prompt} tokens and max_tokens is {max_tokens}: together {prompt + max_tokens}, more than "
            f"the {limit} that this server can hold. Shorten the prompt or max_tokens."
        )

    def never_fits(self, sequence: Sequence) -> str | None:
        """Return why `sequence` could not run in an empty pool either, with the numbers."""
        digest, budget = sequence.digest, self._budget
        adapter_pages = self._residency.num_pages(digest) if digest else 0
        kept = self._residency.kept_pages(besides=digest)
        if budget.fits_alone(sequence.max_len, adapter_pages + kept):
            return None
        return (
            f"The request needs {budget.pages_for(sequence.max_len)} pages of KV and its adapter {adapter_pages}; the "
            f"pool has {budget.num_pages}, of which pinned adapters hold {kept}. Lower max_tokens, or ask the operator "
            f"for a larger engine.pool_bytes."
        )

    def is_over_quota(self, sequence: Sequence) -> bool:
        """Would its tenant hold more than it may? A tenant that holds nothing was checked on arrival."""
        most = self._policy.max_pages(self._budget.num_pages)
        if most >= self._budget.num_pages:
            return False
        promised = self._promised_to_tenant(sequence)
        return promised > 0 and promised + self._likely_pages(sequence) > most

    # rows and pages

    def has_row(self, flow: Flow, builder: StepBuilder) -> bool:
        """Has the step a row for `flow`?"""
        reserved = int(builder.num_rows * self._budget.reserve_share)
        return builder.rows_left > reserved or (builder.rows_left > 0 and flow.num_running < reserved)

    def has_pages(
        self,
        sequence: Sequence,
        leaving: Collection[Sequence] = (),
        *,
        to_load: bool = False,
        after: Sequence | None = None,
    ) -> bool:
        """Has the pool room for `sequence`, once `leaving` have left?

        Claimants whose adapter is READY count as if they ran: their room is theirs. Those whose adapter is still
        loading count only where the room is wanted `to_load` another one: then all claimants can run side by side one
        day, and requests that need no load may use the room meanwhile. `after`: a waiting sequence that counts as well.
        """
        state = self._state
        others = [s for s in state.running if s not in leaving] if leaving else state.running
        claimants = [
            claimant
            for digest, claimant in state.claims.items()
            if claimant is not sequence and (to_load or state.is_ready_claim(digest))
        ]
        if after is not None:
            claimants.append(after)
        if claimants:
            others = [*others, *claimants]
        adapters = self._residency.pinned_pages(sequence.digest)
        reserved, reserve = self._kept_for_other_classes(sequence, leaving), self._budget.reserve
        likely = self._likely_pages(sequence)
        if likely > reserve or sequence.flow.num_pages + likely > reserve:
            reserved += reserve
        if not leaving:  # most of the asking, where the pool is large
            most = state.most_pages + sum(self._budget.pages_for(s.max_len) for s in claimants)
            if self._budget.holds_all(most, sequence, adapters + reserved):
                return True
        return self._budget.admits(sequence, others, adapters, reserved)

    def has_pages_now(self, sequence: Sequence, *, to_load: bool = False, after: Sequence | None = None) -> bool:
        """Memoised `has_pages`: a rejected sequence is checked again once a sequence left or other adapters are
        pinned."""
        state = self._state
        version = (state.num_departures, self._residency.pinned_pages(), len(state.claims), to_load, after)
        if self._rejected.get(sequence) == version:
            return False
        if self.has_pages(sequence, to_load=to_load, after=after):
            self._rejected.pop(sequence, None)
            return True
        if len(self._rejected) > 4 * self._policy.lookahead:
            self._rejected.clear()
        self._rejected[sequence] = version
        return False

    def adapter_read_ratio(self) -> float:
        """Bytes of the adapters in use over the bytes that a step reads anyway: at least so much do they slow it
        down."""
        held = self._state.memory.num_kv
        return self._residency.pinned_pages() / (self._policy.weight_pages + held) if held else 0.0

    # preemption

    def preemption_candidates(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that must yield to `sequence`; the last of the list is preempted first."""
        if not (self._policy.tenant_guaranteed_pages or self._state.queue.can_interrupt_any(sequence.flow)):
            return []
        candidates = [running for running in self._state.running if self.must_yield(running, sequence)]
        candidates.sort(key=self.retention_order, reverse=True)  # stable: of equals the newest goes first
        return candidates

    def must_yield(self, running: Sequence, sequence: Sequence) -> bool:
        """Must `running` make place for `sequence`?

        It must where it is of a lower class that has taken more than its share, and where it is of no higher class, its
        tenant has borrowed, and `sequence` asks for no more than its own tenant is guaranteed. In either case only
        after it made progress with the place it has: two that displace each other would else recompute for ever.
        """
        if not running.made_progress:
            return False
        if self._state.queue.may_interrupt(sequence.flow, running.flow):
            return True
        higher = running.flow.group.weight > sequence.flow.group.weight  # else two could displace each other in turn
        if higher or not self._policy.tenant_guaranteed_pages or running.flow.tenant == sequence.flow.tenant:
            return False
        own = self._promised_to_tenant(sequence) + self._likely_pages(sequence)
        return own <= self._guaranteed(sequence) and self._has_borrowed(running)

    def victim(self) -> Sequence:
        """The running sequence to preempt when memory runs out.

        Sequences on borrowed pages first, then the lowest-weight class, then the newest sequence of the most-served
        tenant.
        """
        return min(reversed(self._state.running), key=self.retention_order)

    def retention_order(self, running: Sequence) -> tuple[bool, float, float]:
        """Rank a running sequence for preemption: the sequences with the lowest value are preempted first."""
        return not self._has_borrowed(running), running.flow.group.weight, -running.flow.served

    # pages of tenants and classes

    def _likely_pages(self, sequence: Sequence) -> int:
        return self._budget.pages_for(sequence.likely_len)

    def _promised_to_tenant(self, sequence: Sequence) -> int:
        """Pages that its tenant's running sequences hold or are expected to.

        Summed once a step and after a departure; of sequences that join meanwhile each is added once.
        """
        state, now = self._state, (self._state.num_departures, self._state.num_commits)
        if self._counted_at != now:
            self._tenant_pages.clear()
            self._num_counted, self._counted_at = 0, now
        for running in islice(state.running, self._num_counted, None):
            pages = self._budget.pages_for(len(running.token_ids) + running.likely_left)
            self._tenant_pages[running.flow.tenant] += pages
        self._num_counted = len(state.running)
        return self._tenant_pages.get(sequence.flow.tenant, 0)

    def _guaranteed(self, sequence: Sequence) -> int:
        share = self._policy.tenant_guaranteed_pages * sequence.flow.weight
        return int(self._budget.num_pages * share)

    def _has_borrowed(self, running: Sequence) -> bool:
        if not self._policy.tenant_guaranteed_pages:
            return True  # whatever it holds is more than nothing
        return self._promised_to_tenant(running) > self._guaranteed(running)

    def _kept_for_other_classes(self, sequence: Sequence, leaving: Collection[Sequence]) -> int:
        kept = 0
        for service_class, share in self._policy.reserved_pages.items():
            if share and service_class is not sequence.request.service_class:
                running = (s for s in self._state.running if s.request.service_class is service_class)
                held = sum(len(s.pages) for s in running if s not in leaving)
                kept += max(0, int(self._budget.num_pages * share) - held)
        return kept
