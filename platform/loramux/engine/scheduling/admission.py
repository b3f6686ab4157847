"""Admission: which waiting sequences join, which running sequences leave, and which adapters are loaded.

**Capacity** (`CapacityPolicy`) is a set of checks that change no state. The checks apply the page budget, and the pages
and rows that are reserved for some sequences:

- `PageBudget.reserve_share`: reserved for flows that hold few pages, so a new flow gets into a full pool immediately.
- `Policy.reserved_pages`: reserved for a class while it holds less.
- `Policy.tenant_guaranteed_pages`: a tenant borrows its pages beyond this guarantee. A tenant gives borrowed pages back
  when a tenant below its own guarantee needs them. `Policy.tenant_max_pages`: the maximum that a tenant may hold.
- Claims: the KV of sequences whose adapters are being loaded. See `has_pages`.

**Admission** goes in the order of the queue (lowest projected service first). A sequence whose adapter is in the pool
joins if a row and its pages are free. A sequence whose adapter is not in the pool starts its load instead, if two
conditions hold. Together these conditions make sure that requests progress at any ratio of adapters to memory:

- the sequence would be admitted now if its adapter were in the pool, so no adapter is loaded for a request that cannot
  run;
- the sequence fits together with all other claimants, so the requests of all loading adapters can run at the same time.

The head of the queue keeps its place. While it waits for pages, no later sequence joins, except claimants, which
already have their pages. While the head waits for a row, adapters of later sequences are loaded if these loads take
nothing from the head.

Every empty plan is followed by progress. If nothing runs and nothing is loading, all claimants are READY. Claimants
that are not suspended join, because they already have their pages. If all claimants are suspended, the sequence that
they are ahead of gets their pages: claims are revoked, the newest first, until the sequence fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import islice

from loramux.engine.memory.residency import AdapterState
from loramux.engine.messages import EngineFault, Request
from loramux.engine.scheduling.fairness import Flow
from loramux.engine.scheduling.queue import LOAD_SLOT
from loramux.engine.scheduling.sequence import Sequence, StepBuilder
from loramux.engine.scheduling.state import SchedulerState, quota_of


class CapacityPolicy:
    """Pure functions of the scheduler's state, except for two memos that avoid repeated checks."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._policy = state.policy
        self._budget = state.budget
        self._residency = state.residency
        self._rejected: dict[Sequence, tuple[int, int, int, bool, Sequence | None]] = {}
        self._tenant_pages: defaultdict[str, int] = defaultdict(int)
        self._num_counted = 0
        """Number of leading running sequences that `_tenant_pages` is the sum of."""
        self._counted_at: tuple[int, int] | None = None

    # one request

    def too_long(self, request: Request) -> str | None:
        """Return why `request` exceeds the pool's size, the model's length or the tenant's quota, with the numbers."""
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
        """Return why `sequence` could not run even in an empty pool, with the numbers."""
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
        """Return whether the sequence's tenant would hold more pages than it may. If the tenant holds no pages, the
        sequence was checked on arrival.
        """
        most = self._policy.max_pages(self._budget.num_pages)
        if most >= self._budget.num_pages:
            return False
        promised = self._promised_to_tenant(sequence)
        return promised > 0 and promised + self._likely_pages(sequence) > most

    # rows and pages

    def has_row(self, flow: Flow, builder: StepBuilder) -> bool:
        """Return whether the step has a row for `flow`."""
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
        """Return whether the pool has enough pages for `sequence` after the sequences in `leaving` have left.

        A claimant whose adapter is READY counts as if it ran, because its pages are reserved. A claimant whose adapter
        is still loading counts only if the pages are needed `to_load` another adapter. So all claimants can run at the
        same time later. Until then, requests that need no load may use these pages. `after` is a waiting sequence that
        counts too.
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
        # Only flows that hold less than the reserve may use the reserved pages.
        if likely > reserve or sequence.flow.num_pages + likely > reserve:
            reserved += reserve
        if not leaving:  # answers most calls if the pool is large
            most = state.most_pages + sum(self._budget.pages_for(s.max_len) for s in claimants)
            if self._budget.holds_all(most, sequence, adapters + reserved):
                return True
        return self._budget.admits(sequence, others, adapters, reserved)

    def has_pages_now(self, sequence: Sequence, *, to_load: bool = False, after: Sequence | None = None) -> bool:
        """Return the memoised result of `has_pages`. A rejected sequence is checked again after another sequence has
        left or the pinned adapters have changed.
        """
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
        """Return the bytes of the adapters in use, divided by the bytes that a step reads anyway. Adapters slow the
        step down at least by this ratio.
        """
        held = self._state.memory.num_kv
        return self._residency.pinned_pages() / (self._policy.weight_pages + held) if held else 0.0

    # preemption

    def preemption_candidates(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences that must yield to `sequence`; the last of the list is preempted first."""
        if not (self._policy.tenant_guaranteed_pages or self._state.queue.can_interrupt_any(sequence.flow)):
            return []
        candidates = [running for running in self._state.running if self.must_yield(running, sequence)]
        candidates.sort(key=self.retention_order, reverse=True)  # stable: among equal sequences the newest is first
        return candidates

    def must_yield(self, running: Sequence, sequence: Sequence) -> bool:
        """Return whether `running` must be preempted for `sequence`.

        `running` must yield in two cases. In the first case, its class is lower and has taken more than its share. In
        the second case, its class is not higher, its tenant has borrowed pages, and `sequence` stays within its
        tenant's guarantee. In both cases, `running` must have made progress since it began to run. Otherwise two
        sequences could preempt each other and recompute for ever.
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
        """Return the running sequence to preempt when memory runs out.

        The order is: sequences on borrowed pages first, then the class of lowest weight, then the most-served tenant;
        among equal sequences the newest.
        """
        return min(reversed(self._state.running), key=self.retention_order)

    def retention_order(self, running: Sequence) -> tuple[bool, float, float]:
        """Rank a running sequence for preemption: the sequences with the lowest value are preempted first."""
        return not self._has_borrowed(running), running.flow.group.weight, -running.flow.served

    # pages of tenants and classes

    def _likely_pages(self, sequence: Sequence) -> int:
        return self._budget.pages_for(sequence.likely_len)

    def _promised_to_tenant(self, sequence: Sequence) -> int:
        """Return the number of pages that the running sequences of the sequence's tenant hold, or are expected to hold.

        The sum is computed once per step and after a sequence leaves. Sequences that join in between are added to it.
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
            return True  # without guarantees every page is borrowed
        return self._promised_to_tenant(running) > self._guaranteed(running)

    def _kept_for_other_classes(self, sequence: Sequence, leaving: Collection[Sequence]) -> int:
        kept = 0
        for service_class, share in self._policy.reserved_pages.items():
            if share and service_class is not sequence.request.service_class:
                running = (s for s in self._state.running if s.request.service_class is service_class)
                held = sum(len(s.pages) for s in running if s not in leaving)
                kept += max(0, int(self._budget.num_pages * share) - held)
        return kept


class Admission:
    """Moves sequences between the queue and the batch. Keeps the state of the current plan, and the result of the
    latest plan.
    """

    def __init__(self, state: SchedulerState, capacity: CapacityPolicy) -> None:
        self._state = state
        self._capacity = capacity
        self._policy = state.policy
        self._queue = state.queue
        self._residency = state.residency
        self._blocked: Sequence | None = None
        """The head of the queue if it waits for pages or a row, so that no later sequence may join; None if any
        sequence may join.
        """
        self._search_affinity = True
        """True if the affinity window may hold a flow that adds no adapter to the batch."""
        self._any_sits_out = False
        """True if a running sequence has no row in this step; only then can a suspended sequence be preempted."""
        self.is_blocked = False
        """True if the latest plan ended with a head that waits for pages or a row, and not for tokens of a step."""

    def preempt_for_next(self) -> Flow | None:
        """Preempt, between two steps, the running sequences that must yield to the next sequence; return the next
        sequence's flow.

        A preemption happens only if the next sequence can then join immediately; otherwise the preemption would be
        useless.
        """
        flow = self._queue.first
        sequence = self._next_of(flow) if flow and not flow.is_suspended else None
        if sequence is None or self._is_cold(sequence) or self._capacity.is_over_quota(sequence):
            return None
        self._prepare(sequence)
        candidates = self._capacity.preemption_candidates(sequence)
        if not (candidates and self._capacity.has_pages(sequence, leaving=set(candidates))):
            return None
        running, rows = self._state.running, self._state.limits.max_num_seqs
        while candidates and not (len(running) < rows and self._capacity.has_pages(sequence)):
            candidate = candidates.pop()
            # Asked again, because each preemption changes a tenant's pages and a class's service.
            if self._capacity.must_yield(candidate, sequence):
                self._state.preempt(candidate)
        return flow

    def admit(self, builder: StepBuilder, priority_flow: Flow | None = None) -> None:
        """Fill `builder` from the queue, `priority_flow` first, and start loads for sequences that need one."""
        self._search_affinity = True
        self._any_sits_out = len(builder.chunks) < len(self._state.running)
        self._blocked = self._blocked_claimant()
        num_seen = 0
        while num_seen < self._policy.lookahead and (flow := priority_flow or self._choose(builder)):
            priority_flow = None
            num_seen += not self._admit_next(flow, builder)
            if self._blocked is not None and not self._residency.awaits_any:
                break  # no other sequence may join, and no adapter needs a load
        self._join_claimants(builder)
        if not (builder.chunks or self._state.running or self._residency.num_loading):
            self._make_room_for_first(builder)
        self.is_blocked = self._blocked is not None and builder.has_tokens_for(self._blocked)
        self._queue.reset_skips()

    def _admit_next(self, flow: Flow, builder: StepBuilder) -> bool:
        """Bring the next sequence of `flow` to its next stage. If this is not possible, park or skip the flow."""
        if flow.is_suspended:
            self._queue.spend_lifts_for(flow)
        sequence = self._next_of(flow)
        if sequence is None:
            return False
        is_cold = self._is_cold(sequence)
        if not is_cold and (not self._may_join(sequence) or builder.is_background_full(sequence)):
            self._queue.skip(flow)
            return False
        if reason := self._capacity.never_fits(sequence):
            self._state.reject(sequence, EngineFault("context_length_exceeded", reason))
            return True
        if self._capacity.is_over_quota(sequence):
            self._queue.park(flow, [quota_of(flow.tenant)])
        elif self._load(sequence, builder) if is_cold else self._try_to_join(sequence, builder):
            return True
        else:
            if self._blocked is None and not flow.is_suspended and flow is self._queue.first:
                self._blocked = sequence
            self._queue.skip(flow)
        return False

    # choosing

    def _next_of(self, flow: Flow) -> Sequence | None:
        """Return the first sequence of `flow` that waits neither for its files nor for a place among the loads.

        If all sequences wait, the flow is parked. A parked flow blocks no other flow.
        """
        events = []
        for sequence in self._queue.head(flow, self._policy.window):
            digest = sequence.digest
            state = AdapterState.READY if digest is None else self._residency.state(digest)
            if state is AdapterState.READY or (state is AdapterState.KNOWN and self._residency.may_load(flow.tenant)):
                return sequence
            events.append(LOAD_SLOT if state is AdapterState.KNOWN else digest)
        self._queue.park(flow, events)
        return None

    def _choose(self, builder: StepBuilder) -> Flow | None:
        """Return the first flow. If the batch has too many adapters, return the first flow in its affinity window that
        adds no adapter.

        The window is searched only if a sequence may join, and only once for every adapter that becomes used. Otherwise
        a plan would take time in proportion to the square of `lookahead`.
        """
        first = self._queue.first
        may_join = builder.rows_left and builder.tokens_left and self._blocked is None
        if first is None or not (may_join and self._search_affinity):
            return first
        if self._capacity.adapter_read_ratio() <= self._policy.adapter_overhead_target:
            return first
        near = self._queue.first_near(first, self._adds_no_adapter)
        self._search_affinity = near is not None
        return near or first

    def _adds_no_adapter(self, flow: Flow) -> bool:
        digest = self._queue.head(flow)[0].digest
        return digest is None or self._residency.is_in_use(digest)

    def _is_cold(self, sequence: Sequence) -> bool:
        return sequence.digest is not None and self._residency.state(sequence.digest) is AdapterState.KNOWN

    def _is_claimant(self, sequence: Sequence) -> bool:
        return sequence.digest is not None and self._state.claims.get(sequence.digest) is sequence

    def _may_join(self, sequence: Sequence) -> bool:
        return self._blocked is None or self._blocked is sequence or self._is_claimant(sequence)

    # joining

    def _prepare(self, sequence: Sequence) -> None:
        """Find the sequence's first token that the adapter serves, its cached KV, and its maximum length.

        This is repeated before the sequence joins, because pages may have been evicted. A claimant keeps the estimates
        of the time when its load was started, because its pages were computed from them.
        """
        invocation = self._residency.invocation(sequence.digest) if sequence.digest else None
        if invocation and sequence.activation is None:
            sequence.activate(invocation)
        self._state.memory.cache.look_up(sequence)
        if not self._is_claimant(sequence):
            self._state.estimate(sequence)

    def _try_to_join(self, sequence: Sequence, builder: StepBuilder) -> bool:
        flow = sequence.flow
        if not self._may_join(sequence) or flow.is_suspended:
            return False
        if not (builder.room_for(sequence) and self._capacity.has_row(flow, builder)):
            return False
        self._prepare(sequence)
        if not (self._capacity.has_pages_now(sequence) or self._preempt_suspended(sequence, builder)):
            return False
        self._join(sequence, builder)
        return True

    def _join(self, sequence: Sequence, builder: StepBuilder) -> None:
        self._state.join(sequence)
        self._search_affinity = True
        length = builder.room_for(sequence)
        end = sequence.num_computed + length
        extended = self._state.extend(sequence, end)
        assert extended, "the budget counts held pages, so that a sequence it admits has its first pages"
        self._queue.charge(sequence.flow, sequence.take_cost(sequence.num_computed, end))
        if length:  # 0: the image that follows its cached tokens waits for the next step
            builder.add(sequence, length)
        builder.joined.append(sequence)

    def _preempt_suspended(self, sequence: Sequence, builder: StepBuilder) -> bool:
        """Preempt suspended sequences until `sequence` fits: first those of the most-served tenant; among equal
        sequences the newest first.
        """
        if not self._any_sits_out:
            return False
        suspended = [s for s in self._state.running if s.flow.is_suspended and s not in builder.chunks]
        suspended.sort(
            key=lambda s: (s.flow.group.served, s.flow.served)
        )  # stable: among equal sequences, pop() takes the newest
        while suspended:
            self._state.preempt(suspended.pop())
            if self._capacity.has_pages(sequence, to_load=self._is_cold(sequence)):
                return True
        return False

    # loads and claims

    def _load(self, sequence: Sequence, builder: StepBuilder) -> bool:
        """Start the load of the adapter of `sequence` if the sequence could run and the load takes no pages from a
        blocked head.
        """
        if sequence.flow.is_suspended:
            return False
        self._prepare(sequence)
        blocked = self._blocked
        if self._capacity.has_pages_now(sequence, to_load=True, after=blocked):
            return self._start_load(sequence, spare_wanted=blocked is not None)
        if blocked is not None:
            return False
        # Sequences that must yield are preempted when this sequence joins. Until then they continue to run if the
        # adapter's pages are free.
        yielding = set(self._capacity.preemption_candidates(sequence))
        if yielding and self._capacity.has_pages(sequence, yielding, to_load=True) and self._start_load(sequence):
            return True
        return self._preempt_suspended(sequence, builder) and self._start_load(sequence)

    def _start_load(self, sequence: Sequence, *, spare_wanted: bool = False) -> bool:
        digest = sequence.digest
        assert digest is not None, "only adapters are cold"
        if not self._state.memory.load(digest, sequence.flow.tenant, claimed=True, spare_wanted=spare_wanted):
            return False
        self._state.claim(sequence, digest)
        return True

    def _ready_claimants(self) -> list[Sequence]:
        claims = self._state.claims.items()
        return [sequence for digest, sequence in claims if self._state.is_ready_claim(digest)]

    def _blocked_claimant(self) -> Sequence | None:
        """Return a claimant whose adapter is READY and whose pages were taken by other sequences during the load. No
        sequence may overtake this claimant.

        A claimant that waits for its turn or its quota blocks no other sequence.
        """
        for sequence in self._ready_claimants():
            may_join = not (sequence.flow.is_suspended or self._capacity.is_over_quota(sequence))
            if may_join and not self._capacity.has_pages_now(sequence):
                return sequence
        return None

    def _join_claimants(self, builder: StepBuilder) -> None:
        """Give remaining rows to claimants before their turn, because they already hold their memory."""
        for sequence in self._ready_claimants():
            if not self._capacity.is_over_quota(sequence):
                self._try_to_join(sequence, builder)

    def _make_room_for_first(self, builder: StepBuilder) -> None:
        """Revoke claims while nothing runs, the newest first, until the first sequence that is not suspended fits."""
        self._queue.reset_skips()
        sequence = None
        while sequence is None and (flow := self._queue.first):
            sequence = None if flow.is_suspended else self._next_of(flow)
            if sequence is None or self._capacity.is_over_quota(sequence):
                sequence = None
                self._queue.skip(flow)
        if sequence is None:
            return
        for claimant in reversed(self._ready_claimants()):
            if claimant is not sequence and claimant.digest is not None:
                self._state.revoke_claim(claimant.digest)
                self._blocked = None
                if self._load(sequence, builder) if self._is_cold(sequence) else self._try_to_join(sequence, builder):
                    return
