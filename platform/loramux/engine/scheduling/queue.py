"""The waiting requests. Classes share the engine by weight, tenants share their class, a tenant's requests are in order
of arrival.

A flow (a tenant in a class) takes part in its class's `FairQueue` while one of its waiting requests could run. A flow
is *parked* if all its requests wait for an adapter, a place among the loads, or its tenant's quota. A parked flow has
no influence on the floor, so no other flow is suspended because of it. When the event happens, the flow returns like a
flow whose queue was empty.

A flow is forgotten when this has no effect: it has no requests, and its counter with the pending lift is not above the
class's start. A returning flow would be raised to the start anyway (rule 1 of `fairness`).
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from itertools import islice
from operator import attrgetter

from loramux.engine.memory.ranking import RankedItems
from loramux.engine.messages import Request, ServiceClass, TenantService
from loramux.engine.scheduling.estimates import QueuedWork
from loramux.engine.scheduling.fairness import ClassCounter, CounterT, FairQueue, Flow
from loramux.engine.scheduling.policy import Policy
from loramux.engine.scheduling.sequence import Sequence

LOAD_SLOT = "load slot"
"""Event: a load has ended, so another load may begin."""
MAX_FORGOTTEN = 8
"""Maximum number of flows to forget when a flow is created. This spreads the work; flows are still forgotten faster
than they are created.
"""


class RequestQueue:
    """Waiting sequences, and the counters that decide the order of admission."""

    def __init__(self, policy: Policy) -> None:
        self.num_changes = 0
        """Grows whenever a request or a counter changes: if a plan did not change this number, the next plan would be
        the same.
        """
        self.classes: Mapping[ServiceClass, ClassCounter] = {
            service_class: ClassCounter(weight=share) for service_class, share in policy.class_shares.items()
        }
        self.on_forget: Callable[[Flow], None] = lambda _: None
        """Callback for every forgotten flow, so that statistics keep its figures."""
        self._policy = policy
        self._groups: FairQueue[ClassCounter] = FairQueue()
        self._flows: dict[tuple[ServiceClass, str], Flow] = {}
        self._waiting: dict[Flow, OrderedDict[Sequence, None]] = {}
        self._by_digest: defaultdict[str, dict[Sequence, None]] = defaultdict(dict)
        self._parked: defaultdict[Hashable, dict[Flow, None]] = defaultdict(dict)
        self._inactive: dict[ServiceClass, RankedItems[Flow, float]] = {
            service_class: RankedItems(attrgetter("counted")) for service_class in self.classes
        }
        """Flows without requests, the lowest counter with its pending lift first."""
        self._length = 0
        self._unreported: dict[tuple[ClassCounter, str], float] = {}
        """Service since the last report. The next report tells it to the fleet's other engines, which count it too."""

    # questions

    def __len__(self) -> int:
        return self._length

    @property
    def flows(self) -> Collection[Flow]:
        """The flows that are remembered."""
        return self._flows.values()

    @property
    def groups(self) -> Iterable[ClassCounter]:
        """The classes."""
        return self.classes.values()

    @property
    def first(self) -> Flow | None:
        """The flow to admit from next, among those that are not skipped."""
        first = None
        for group in self.classes.values():
            flow = group.tenants.first
            if flow and (first is None or group.projected_service < first.group.projected_service):
                first = flow
        return first

    def first_near(self, flow: Flow, suits: Callable[[Flow], bool]) -> Flow | None:
        """Return the first that `suits` among `flow`, the first of its class, and the flows in its affinity window."""
        return flow.group.tenants.first_near(suits, self._policy.affinity_window, self._policy.lookahead)

    def head(self, flow: Flow, count: int = 1) -> list[Sequence]:
        """Return the first `count` waiting sequences of `flow`."""
        return list(islice(self._waiting[flow], count))

    def waiting_for(self, digest: str) -> Collection[Sequence]:
        """Return the waiting sequences of one revision, in order of arrival."""
        return tuple(self._by_digest.get(digest, ()))

    @property
    def digests(self) -> Iterable[str]:
        """The revisions that waiting sequences need."""
        return self._by_digest.keys()

    @property
    def work(self) -> QueuedWork:
        """All waiting work."""
        total = QueuedWork()
        for group in self.classes.values():
            total.add(group.queued)
        return total

    def work_before(self, flow: Flow) -> QueuedWork:
        """Return the work that is expected to be admitted before a request that joins the end of `flow` now.

        This is fluid fair queueing. Other flows of the class are served up to the counter that `flow` will have when
        the request is admitted. Other classes are served up to the counter that the class of `flow` will have at that
        time.
        """
        group = flow.group
        before = QueuedWork()
        before.add(flow.queued)
        _add_others(before, group.tenants, flow, group.tenants.entry(flow) + before.units / flow.weight)
        _add_others(before, self._groups, group, self._groups.entry(group) + before.units / group.weight)
        return before

    def may_interrupt(self, flow: Flow, other: Flow) -> bool:
        """Return whether `other` has a lower class than `flow`, and this lower class has taken and been promised more
        than its share.
        """
        return self._is_ahead(other.group, flow.group)

    def can_interrupt_any(self, flow: Flow) -> bool:
        """Return whether there is such a class for `flow`."""
        return any(self._is_ahead(group, flow.group) for group in self.classes.values())

    def _is_ahead(self, lower: ClassCounter, group: ClassCounter) -> bool:
        return lower.weight < group.weight and lower.projected_service > self._groups.entry(group)

    def background(self, now: float, *, is_blocked: bool) -> tuple[ClassCounter, float] | None:
        """Return class batch and its share of the step's tokens, if its prompts come last in the next step; otherwise
        None.

        The first token of a batch's request is not urgent. But other rows of the step, and requests that arrive during
        the step, wait for the batch's prompt. So class batch comes after each class of larger weight that runs, that
        ran within `quiet_seconds`, or that waits and may join (`is_blocked`: no class may join). At first its share is
        0, so its prompts come after all others. When class batch has half of `max_service_lead` less service than the
        other classes, it gets the share of its weight, and the difference grows no further.
        """
        batch = self.classes[ServiceClass.BATCH]
        if not batch.num_running and batch not in self._groups:
            return None
        above = [
            group
            for group in self.classes.values()
            if group.weight > batch.weight
            and group.ceiling > -math.inf  # a class that sits out has no rows in the step
            and (
                group.num_running
                or (not is_blocked if group in self._groups else now - group.left_at < self._policy.quiet_seconds)
            )
        ]
        if not above:
            return None
        if max(group.served for group in above) - batch.served <= self._policy.max_service_lead / 2:
            return batch, 0.0
        return batch, max(batch.weight / group.weight for group in above)

    # requests come and go

    def flow_of(self, request: Request) -> Flow:
        """Return the flow that `request` belongs to, with its latest weight."""
        key = (request.service_class, request.tenant)
        flow = self._flows.get(key)
        if flow is None:
            self._forget_flows(request.service_class)
            flow = Flow(weight=request.weight, tenant=request.tenant, group=self.classes[request.service_class])
            self._flows[key] = flow
            # Inactive until its first request is pushed.
            self._inactive[request.service_class].put(flow)
        flow.reweigh(request.weight)
        return flow

    def push(self, sequence: Sequence) -> None:
        """Queue `sequence` at the end of its flow."""
        flow, work = sequence.flow, _work_of(sequence)
        self._waiting.setdefault(flow, OrderedDict())[sequence] = None
        if sequence.digest is not None:
            self._by_digest[sequence.digest][sequence] = None
        self._length += 1
        self.num_changes += 1
        # Kept for `remove`, because the sequence's estimates may change while it waits.
        sequence.queued = work
        for counter in (flow, flow.group):
            counter.queued.add(work)
        self._inactive[self._class_of(flow)].drop(flow)
        self._enter(flow)

    def push_front(self, sequence: Sequence) -> None:
        """Queue `sequence` again at the head of its flow: a preempted sequence keeps its place."""
        self.push(sequence)
        self._waiting[sequence.flow].move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Remove an admitted, cancelled or failed sequence."""
        flow = sequence.flow
        waiting = self._waiting[flow]
        del waiting[sequence]
        if sequence.digest is not None:
            same = self._by_digest[sequence.digest]
            del same[sequence]
            if not same:
                del self._by_digest[sequence.digest]
        self._length -= 1
        self.num_changes += 1
        for counter in (flow, flow.group):
            counter.queued.add(sequence.queued, -1.0)
        if not waiting:
            flow.queued = QueuedWork()  # rounding errors must not accumulate
            self._leave(flow)

    def park(self, flow: Flow, events: Iterable[Hashable]) -> None:
        """Remove `flow` from the queue until one of `events` happens, because its requests cannot run before."""
        self.num_changes += 1
        for event in events:
            self._parked[event][flow] = None
        self._leave(flow)

    def unpark(self, event: Hashable) -> None:
        """Let the flows that were parked until `event` take part again."""
        if event not in self._parked:
            return
        self.num_changes += 1
        for flow in self._parked.pop(event):
            if self._waiting.get(flow):
                self._enter(flow)

    def note_idle(self, flow: Flow) -> None:
        """Allow `flow` to be forgotten if none of its requests waits or runs."""
        if not (flow.num_running or self._waiting.get(flow)):
            self._waiting.pop(flow, None)
            flow.settle()
            self._inactive[self._class_of(flow)].put(flow)

    # counters

    def update_ceilings(self) -> None:
        """Suspend, before a step, the parties that are more than `max_service_lead` ahead of a waiting party."""
        lead, floor = self._policy.max_service_lead, self._groups.floor
        for group in self.classes.values():
            group.tenants.spend_lifts(lead)
            inner = group.tenants.floor
            group.ceiling = float("inf") if inner is None else inner + lead
            if floor is not None and group.served > floor + lead:
                group.ceiling = float("-inf")

    def spend_lifts_for(self, flow: Flow) -> None:
        """Raise the counters of lifted flows to `flow`, the first in order, which would otherwise be suspended because
        of them.
        """
        group, lead = flow.group, self._policy.max_service_lead
        if group.ceiling > float("-inf") and group.tenants.spend_lifts(lead) and group.tenants.floor is not None:
            group.ceiling = group.tenants.floor + lead

    def charge(self, flow: Flow, units: float) -> None:
        """Count executed service."""
        self.charge_all({flow: units})

    def charge_all(self, units: Mapping[Flow, float]) -> None:
        """Count the executed service of many flows."""
        totals: defaultdict[ClassCounter, float] = defaultdict(float)
        for flow, charged in units.items():
            flow.group.tenants.charge(flow, charged)
            totals[flow.group] += charged
            # The key is the name: if a flow is forgotten and created again, its unreported service must not be lost and
            # must not keep the old flow alive.
            key = (flow.group, flow.tenant)
            self._unreported[key] = self._unreported.get(key, 0.0) + charged
        for group, charged in totals.items():
            self._groups.charge(group, charged)
        self.num_changes += bool(units)

    def take_service(self) -> list[TenantService]:
        """Return the service of each tenant since the last call."""
        taken, self._unreported = self._unreported, {}
        names = {group: name for name, group in self.classes.items()}
        return [TenantService(tenant, names[group], units) for (group, tenant), units in taken.items()]

    def lift(self, services: Iterable[TenantService]) -> None:
        """Count the service of tenants on other engines.

        A tenant that is unknown or forgotten has no counter to lift. Such a tenant will start at the level of the
        waiting tenants.
        """
        self.num_changes += 1
        for service in services:
            if flow := self._flows.get((ServiceClass(service.service_class), service.tenant)):
                flow.group.tenants.lift(flow, service.units, self._policy.max_lift)

    def project(self, flow: Flow, units: float) -> None:
        """Count service that is expected, or (negative) no longer is."""
        self.num_changes += 1
        flow.group.tenants.project(flow, units)
        self._groups.project(flow.group, units)

    def skip(self, flow: Flow) -> None:
        """Do not return `flow` as `first` again in this step."""
        flow.group.tenants.skip(flow)

    def reset_skips(self) -> None:
        """Begin a new step: no flow is skipped."""
        for group in self.classes.values():
            group.tenants.reset_skips()

    def _enter(self, flow: Flow) -> None:
        self._groups.enter(flow.group)
        flow.group.tenants.enter(flow)

    def _leave(self, flow: Flow) -> None:
        tenants = flow.group.tenants
        tenants.leave(flow)
        if tenants.floor is None:
            self._groups.leave(flow.group)

    def _class_of(self, flow: Flow) -> ServiceClass:
        return next(name for name, group in self.classes.items() if group is flow.group)

    def _forget_flows(self, service_class: ServiceClass) -> None:
        """Forget idle flows at or below the start of their class: on their return they would start there anyway."""
        inactive, start = self._inactive[service_class], self.classes[service_class].tenants.start
        for _ in range(MAX_FORGOTTEN):
            flow = inactive.first()
            if flow is None or flow.counted > start:
                return
            inactive.drop(flow)
            self.on_forget(flow)
            del self._flows[service_class, flow.tenant]


def _work_of(sequence: Sequence) -> QueuedWork:
    output = (sequence.expected_service - sequence.num_prompt_tokens) / 2 - sequence.num_output_tokens
    pairs = sequence.uncomputed_pairs
    return QueuedWork(1.0, sequence.num_uncomputed, max(1.0, output), sequence.likely_len, pairs)


def _add_others(before: QueuedWork, queue: FairQueue[CounterT], own: CounterT, level: float) -> None:
    """For every other party in `queue`, add the work that is due to this party before `own` has reached `level`."""
    for other in queue:
        if other is not own:
            share = other.queued.share_of((level - other.projected_service) * other.weight)
            before.add(other.queued, share)
