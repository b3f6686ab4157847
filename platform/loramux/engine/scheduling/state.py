"""The scheduler's state, and every transition of a sequence in one place.

    add -> waiting -> join -> running -> finish
              ^--- preempt ----'   (waiting sequences finish too: cancelled, refused, failed)

`Scheduler`, `Admission`, `CapacityPolicy` and `Deadlines` share this one object and keep no other state except memos. A
transition keeps the queue, the counters of fairness, the pages, the adapters' pins and the claims consistent.

**Claims.** An adapter is loaded for one waiting sequence, its claimant; `claims` maps the revision to its claimant. The
revision stays pinned until a sequence joins under it. If the claimant ends first, another waiting sequence of the
revision inherits the claim; if no other sequence waits, the claim is released.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter

from loramux.engine.memory.memory import Memory
from loramux.engine.memory.ranking import RankedItems
from loramux.engine.memory.residency import AdapterState
from loramux.engine.messages import EngineFault, Request, TokenEvent
from loramux.engine.metrics import Counters
from loramux.engine.scheduling.estimates import OutputLengths, StepTimeModel
from loramux.engine.scheduling.policy import PageBudget, Policy, SchedulerLimits
from loramux.engine.scheduling.queue import RequestQueue
from loramux.engine.scheduling.sequence import BASE_SLOT, RequestGroup, Sequence

MAX_ENDED_GROUPS = 1024
"""Maximum number of ended request groups to remember, because a choice may arrive after the other choices of its
request have ended.
"""


class SchedulerState:
    """Sequences that wait and run, with everything that planning reads and changes."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy,
        budget: PageBudget,
        memory: Memory,
        step_time: StepTimeModel,
        clock: Callable[[], float],
        counters: Counters,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.budget = budget
        self.memory = memory
        self.residency = memory.residency
        self.clock = clock
        self.counters = counters
        self.queue = RequestQueue(policy)
        self.running: list[Sequence] = []
        """Sequences that hold memory, in order of admission."""
        self.sequences: dict[str, Sequence] = {}
        """Sequences that have not ended, by request id."""
        self.claims: dict[str, Sequence] = {}
        """The waiting sequence for which each revision is loading or loaded; the oldest claim first."""
        self.events: list[TokenEvent] = []
        """Events of requests that ended outside a step: refusals, cancellations, failed adapters."""
        self.starts: list[TokenEvent] = []
        """Events which report that the load of an adapter begins. Only requests with `report_start` get them."""
        self.step_time = step_time
        self.output_lengths = OutputLengths()
        self.num_departures = 0
        """Sequences that have left `running`, since the start."""
        self.num_commits = 0
        """Steps whose tokens were appended, since the start."""
        self.most_pages = 0
        """Pages that the running sequences could ever hold, each at its longest."""
        self.groups: dict[str, RequestGroup] = {}
        self.deadlines: RankedItems[RequestGroup, float] = RankedItems(attrgetter("start_by"))
        """Groups that have a deadline and have not begun, the next deadline first."""
        self._ended_groups: OrderedDict[str, RequestGroup] = OrderedDict()

    # a request's way

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.sequences[sequence.id] = sequence
        if (group := sequence.group) is not None:
            group.waiting.add(sequence)
            self.groups[group.id] = group
        if sequence.request.adapter is not None:
            self.residency.acquire(sequence.request.adapter)
        self.queue.push(sequence)

    def join(self, sequence: Sequence) -> None:
        """Admit a waiting `sequence` after its KV was looked up in the cache or saved. The sequence's adapter must be
        READY.
        """
        self.queue.remove(sequence)
        # Pinned before the claim is released: the revision must not become evictable in between.
        sequence.slot = BASE_SLOT if sequence.digest is None else self.residency.pin(sequence.digest)
        if sequence.digest in self.claims:
            self._release_claim(sequence.digest)
        self.memory.resume(sequence)
        sequence.units_at_start = sequence.units
        flow = sequence.flow
        flow.num_running += 1
        flow.group.num_running += 1
        flow.num_pages += len(sequence.pages)
        if sequence.swap_slots:
            extended = self.extend(sequence, sequence.num_saved)
            assert extended, "the budget counts every token, so that saved tokens have their pages"
            self.memory.swap.restore(sequence)
        self.running.append(sequence)
        self.most_pages += self.budget.pages_for(sequence.max_len)
        self.queue.project(flow, sequence.expected_service - sequence.units)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take pages for the first `num_tokens` tokens, and evict idle contents if necessary. Return False if there are
        not enough pages.
        """
        missing = self.budget.pages_for(num_tokens) - len(sequence.pages)
        if missing > 0:
            if (pages := self.memory.take_kv(missing)) is None:
                return False
            sequence.pages.extend(pages)
            sequence.flow.num_pages += missing
        return True

    def trim(self, sequence: Sequence) -> None:
        """Give back pages after the tokens of a running `sequence`, which drafts had taken."""
        needed = self.budget.pages_for(len(sequence.token_ids))
        if surplus := sequence.pages[needed:]:
            del sequence.pages[needed:]
            sequence.num_unchanged_pages = min(sequence.num_unchanged_pages, needed)
            self.memory.give_back_kv(surplus)
            sequence.flow.num_pages -= len(surplus)

    def preempt(self, sequence: Sequence) -> None:
        """Return a running `sequence` to the head of its queue; its KV is saved on the host or computed again."""
        self.memory.swap.save(sequence)
        self._leave(sequence)
        self.queue.push_front(sequence)
        sequence.num_preemptions += 1
        self.counters.preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whether it runs or waits."""
        # Only running sequences hold pages.
        if sequence.pages:
            self._leave(sequence)
        else:
            self.queue.remove(sequence)
            self.memory.swap.discard(sequence)
            if sequence.digest is not None and self.claims.get(sequence.digest) is sequence:
                self._hand_over_claim(sequence.digest)
        if sequence.group is not None:
            self._close_member(sequence.group, sequence)
        if sequence.digest is not None:
            self.memory.release(sequence.digest)
        # A load is normally charged together with progress. If there was no progress, the load is charged here;
        # otherwise it would be free.
        if sequence.load_units:
            self.queue.charge(sequence.flow, sequence.load_units)
        del self.sequences[sequence.id]
        self.queue.note_idle(sequence.flow)

    def reject(self, sequence: Sequence, fault: EngineFault) -> None:
        """End a waiting sequence with a fault."""
        self.finish(sequence)
        self.report_end(sequence.id, "error", fault)

    def report_end(self, request_id: str, finish_reason: str, fault: EngineFault | None = None) -> None:
        """Report an end that no step causes."""
        self.events.append(TokenEvent(request_id=request_id, finish_reason=finish_reason, fault=fault))

    def _leave(self, sequence: Sequence) -> None:
        """Give back the pages of a running sequence, and the service that was projected and not received."""
        self.running.remove(sequence)
        self.num_departures += 1
        self.most_pages -= self.budget.pages_for(sequence.max_len)
        flow = sequence.flow
        flow.num_running -= 1
        flow.group.num_running -= 1
        flow.group.left_at = self.clock()
        flow.num_pages -= len(sequence.pages)
        self.memory.cache.release(sequence)
        if sequence.digest is not None:
            self.residency.unpin(sequence.digest)
        self.queue.project(flow, sequence.units - sequence.expected_service)
        self.queue.unpark(quota_of(flow.tenant))

    # claims

    def claim(self, sequence: Sequence, digest: str) -> None:
        """Note that `digest` is being loaded for `sequence`, and keep the units of the load to be charged later."""
        self.claims[digest] = sequence
        if sequence.request.report_start:
            self.starts.append(TokenEvent(request_id=sequence.id, is_worked_on=True))
        sequence.num_loads += 1
        units = self.residency.num_pages(digest) * self.policy.load_units_per_page
        sequence.load_units += units
        self.queue.project(sequence.flow, units)

    def revoke_claim(self, digest: str) -> None:
        """Release a READY revision before any sequence has run under it."""
        self.counters.claims_revoked += 1
        self._release_claim(digest)

    def drop_failed_claim(self, digest: str) -> None:
        """Forget the claim on a revision whose load has failed."""
        self.claims.pop(digest, None)
        self.queue.num_changes += 1

    def _release_claim(self, digest: str) -> None:
        del self.claims[digest]
        self.queue.num_changes += 1
        self.residency.release_claim(digest)

    def _hand_over_claim(self, digest: str) -> None:
        if heirs := self.queue.waiting_for(digest):
            self.claims[digest] = next(iter(heirs))
        else:
            self._release_claim(digest)

    def is_ready_claim(self, digest: str) -> bool:
        """Return whether a claimed revision is READY."""
        return self.residency.state(digest) is AdapterState.READY

    # estimates

    def estimate(self, sequence: Sequence) -> None:
        """Set the expected length (for memory) and the expected service (for shares) of `sequence`, from its
        history."""
        expected = 0.0
        if sequence.request.pooling is None:
            expected = self.output_lengths.expect(history_key(sequence), sequence.request.sampling.max_tokens)
        sequence.likely_len = sequence.num_prompt_tokens + math.ceil(expected)
        outputs = max(expected, sequence.num_output_tokens + 1)
        sequence.expected_service = sequence.num_prompt_tokens + 2 * outputs

    def record_length(self, sequence: Sequence) -> None:
        """Note the length of an answer that was not cancelled; the next answers of its revision are expected to have
        the same length.
        """
        self.output_lengths.record(history_key(sequence), sequence.num_output_tokens)

    # groups

    def group_of(self, request: Request) -> RequestGroup:
        """Return the group of `request`, which may have ended or have been refused already."""
        key = request.group_id or request.id
        group = self.groups.get(key) or self._ended_groups.get(key)
        return group or RequestGroup(key, is_shared=bool(request.group_id))

    def start_group(self, group: RequestGroup) -> None:
        """Note that a sequence of the group runs: from now on no deadline ends any member."""
        group.is_started = True
        self.deadlines.drop(group)

    def close_group(self, group: RequestGroup) -> None:
        """Remember a group without open sequences for a while, because further choices may come late."""
        self.deadlines.drop(group)
        self.groups.pop(group.id, None)
        if group.is_shared:
            self._ended_groups[group.id] = group
            if len(self._ended_groups) > MAX_ENDED_GROUPS:
                self._ended_groups.popitem(last=False)

    def _close_member(self, group: RequestGroup, sequence: Sequence) -> None:
        group.waiting.discard(sequence)
        if not group.waiting:
            self.close_group(group)


def quota_of(tenant: str) -> tuple[str, str]:
    """Return the event that a part of the tenant's quota has become free."""
    return "quota", tenant


def history_key(sequence: Sequence) -> tuple[str, str | None]:
    """Return the tenant and revision that a sequence's answers are remembered under."""
    return sequence.request.tenant, sequence.digest
