"""Who is next: classes share the engine by weight, within a class its tenants do, and a tenant's requests are FIFO."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from loramux.engine.fairness import AccountT, Contest, Flow, Group
from loramux.engine.load import Load
from loramux.engine.policy import Policy
from loramux.engine.request import Request, ServiceClass
from loramux.engine.sequence import Sequence


class RequestQueue:
    """Waiting sequences, and the accounts that say in which order they should be admitted.

    A flow (a tenant in a class) takes part in the contest while something of its is waiting that could run. Where all
    it has waits for adapters, or its tenant has used up its quota, it stands out, and comes back, as one whose queue
    was empty, when an adapter arrives or a request of the tenant ends.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._classes: Contest[Group] = Contest()
        self._groups = {c: Group(weight=share) for c, share in policy.class_shares.items()}
        self._flows: dict[tuple[ServiceClass, str], Flow] = {}
        self._waiting: dict[Flow, deque[Sequence]] = {}
        self._standing_out: defaultdict[Hashable, list[Flow]] = defaultdict(list)
        self._length = 0

    # questions

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, flow by flow in no particular order."""
        for waiting in self._waiting.values():
            yield from tuple(waiting)

    @property
    def flows(self) -> Iterable[Flow]:
        """Every tenant seen, by class."""
        return self._flows.values()

    @property
    def groups(self) -> Iterable[Group]:
        """The classes."""
        return self._groups.values()

    @property
    def classes(self) -> Mapping[ServiceClass, Group]:
        """The classes by name."""
        return self._groups

    @property
    def first(self) -> Flow | None:
        """The flow to admit from next, of those not set aside."""
        first = None
        for group in self._groups.values():
            if (flow := group.contest.first) and (first is None or group.booked < first.group.booked):
                first = flow
        return first

    def waiting(self, flow: Flow) -> deque[Sequence]:
        """What waits in `flow`, in order."""
        return self._waiting[flow]

    def ahead_of(self, flow: Flow) -> Load:
        """What is expected to be admitted before a request that comes to the end of `flow` now.

        Fluid fair queueing: the others of its class are served up to the counter that `flow` will have reached by then,
        and the other classes up to the counter that its class will have.
        """
        group = flow.group
        ahead = Load()
        ahead.add(flow.queued)
        _add_others(ahead, group.contest, flow, group.contest.entry(flow) + ahead.units / flow.weight)
        _add_others(ahead, self._classes, group, self._classes.entry(group) + ahead.units / group.weight)
        return ahead

    def first_near(self, flow: Flow, suits: Callable[[Flow], bool]) -> Flow | None:
        """Of `flow`, which is the first of its class, and those within a quantum of it, the first that `suits`."""
        return flow.group.contest.first_near(suits, self._policy.quantum, self._policy.lookahead)

    def may_interrupt(self, flow: Flow, other: Flow) -> bool:
        """Whether `other` is of a lower class than `flow`, and that class has taken and booked more of its share."""
        return self._has_overtaken(other.group, flow.group)

    def any_to_interrupt(self, flow: Flow) -> bool:
        """Whether there is any class of which that is true."""
        return any(self._has_overtaken(group, flow.group) for group in self._groups.values())

    def _has_overtaken(self, lower: Group, group: Group) -> bool:
        return lower.weight < group.weight and lower.booked > self._classes.entry(group)

    def backlogged(self, flow: Flow) -> bool:
        """Whether something of `flow` waits that could run."""
        return flow in flow.group.contest

    # requests come and go

    def flow_of(self, request: Request) -> Flow:
        """The account that `request` belongs to, with its latest weight."""
        key = (request.service_class, request.tenant)
        flow = self._flows.get(key)
        if flow is None:
            group = self._groups[request.service_class]
            flow = self._flows[key] = Flow(weight=request.weight, tenant=request.tenant, group=group)
            self._waiting[flow] = deque()
        flow.reweigh(request.weight)
        return flow

    def push(self, sequence: Sequence) -> None:
        """Queue at the end of its flow."""
        self._waiting[sequence.flow].append(sequence)
        self._count(sequence, _load_of(sequence))

    def push_front(self, sequence: Sequence) -> None:
        """Queue again at the head: it was preempted and keeps its place."""
        self._waiting[sequence.flow].appendleft(sequence)
        self._count(sequence, _load_of(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take out an admitted, cancelled or failed sequence."""
        waiting = self._waiting[sequence.flow]
        waiting.remove(sequence)
        self._length -= 1
        for account in (sequence.flow, sequence.flow.group):
            account.queued.add(sequence.queued, -1.0)
        if not waiting:
            sequence.flow.queued = Load()  # no rounding error outlives a queue
            self._leave(sequence.flow)

    def stand_out(self, flow: Flow, events: Iterable[Hashable]) -> None:
        """Nothing of `flow` can run before one of `events`."""
        for event in events:
            self._standing_out[event].append(flow)
        self._leave(flow)

    def call_back(self, event: Hashable) -> None:
        """`event` has come: look again at the flows that stood out for it."""
        for flow in self._standing_out.pop(event, ()):
            if self._waiting[flow]:
                self._enter(flow)

    # accounts

    def draw_ceilings(self) -> None:
        """Before a step: who is more than tau ahead of one who waits sits it out."""
        tau, floor = self._policy.tau, self._classes.floor
        for group in self._groups.values():
            inner = group.contest.floor
            group.ceiling = float("inf") if inner is None else inner + tau
            if floor is not None and group.served > floor + tau:
                group.ceiling = float("-inf")

    def charge(self, flow: Flow, units: float) -> None:
        """Count executed service."""
        flow.group.contest.charge(flow, units)
        self._classes.charge(flow.group, units)

    def book(self, flow: Flow, units: float) -> None:
        """Count service that is expected, or (negative) no longer is."""
        flow.group.contest.book(flow, units)
        self._classes.book(flow.group, units)

    def set_aside(self, flow: Flow) -> None:
        """`flow` is not `first` again in this step."""
        flow.group.contest.set_aside(flow)

    def restore(self) -> None:
        """A new step: nobody is set aside."""
        for group in self._groups.values():
            group.contest.restore()

    def _count(self, sequence: Sequence, load: Load) -> None:
        self._length += 1
        sequence.queued = load
        for account in (sequence.flow, sequence.flow.group):
            account.queued.add(load)
        self._enter(sequence.flow)

    def _enter(self, flow: Flow) -> None:
        self._classes.enter(flow.group)
        flow.group.contest.enter(flow)

    def _leave(self, flow: Flow) -> None:
        contest = flow.group.contest
        contest.leave(flow)
        if contest.floor is None:
            self._classes.leave(flow.group)


def _load_of(sequence: Sequence) -> Load:
    output = (sequence.due - sequence.num_prompt_tokens) / 2 - sequence.num_output_tokens
    return Load(1.0, sequence.num_uncomputed, max(1.0, output), sequence.likely_len)


def _add_others(ahead: Load, contest: Contest[AccountT], own: AccountT, level: float) -> None:
    """Of every other party in `contest`, what it is owed before `own` has reached `level`."""
    for other in contest:
        if other is not own:
            ahead.add(other.queued, other.queued.share_of((level - other.booked) * other.weight))
