"""Whether there is place for one more, and who would have to make it. Questions only."""

from __future__ import annotations

from collections.abc import Collection

from loramux.engine.batch import Batch, Draft
from loramux.engine.budget import Budget
from loramux.engine.fairness import Flow
from loramux.engine.memory import Memory
from loramux.engine.policy import Policy
from loramux.engine.queue import RequestQueue
from loramux.engine.request import Request
from loramux.engine.sequence import Sequence


class Room:
    """The budget, with what is kept for some and from others.

    - `Budget.reserve_share`: kept for small holders, so that who comes newly into a full house gets in at once.
    - `Policy.reserved_pages`: kept for a class while it holds less.
    - `Policy.tenant_guaranteed_pages`: what a tenant holds beyond is borrowed, and given back when one who holds less
      than it is guaranteed needs it. `Policy.tenant_max_pages`: the most that a tenant may hold.
    """

    def __init__(self, policy: Policy, budget: Budget, queue: RequestQueue, batch: Batch, memory: Memory) -> None:
        self._policy = policy
        self._budget = budget
        self._queue = queue
        self._batch = batch
        self._memory = memory
        self.residency = memory.residency

    @property
    def watermark(self) -> int:
        """Pages that nothing but what runs may take."""
        return self._budget.watermark

    def too_long(self, request: Request, max_model_len: int) -> str | None:
        """Why no pool of this size, model or quota could hold `request`, with the numbers; None where they could."""
        prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        limit = min(max_model_len, self._policy.max_pages(self._budget.num_pages) * self._budget.block_size)
        if prompt + max_tokens <= limit:
            return None
        return (
            f"The prompt has {prompt} tokens and max_tokens is {max_tokens}: together {prompt + max_tokens}, more than "
            f"the {limit} that this server can hold. Shorten the prompt or max_tokens."
        )

    def never(self, sequence: Sequence) -> str | None:
        """Why `sequence` could not run in an empty house either, with the numbers; None where it could."""
        digest, budget = sequence.digest, self._budget
        adapter_pages = self.residency.size(digest) if digest else 0
        kept = self._memory.kept_pages(besides=digest)
        if budget.fits_alone(sequence.max_len, adapter_pages + kept):
            return None
        return (
            f"The request needs {budget.pages_for(sequence.max_len)} pages of KV and its adapter {adapter_pages}; the "
            f"pool has {budget.num_pages}, of which pinned adapters hold {kept}. Lower max_tokens, or ask the operator "
            f"for a larger engine.pool_bytes."
        )

    def over_quota(self, sequence: Sequence) -> bool:
        """Whether its tenant would hold more than it may; one that holds nothing has been measured when it came."""
        most = self._policy.max_pages(self._budget.num_pages)
        if most >= self._budget.num_pages:
            return False
        promised = self._promised_to_tenant(sequence)
        return promised > 0 and promised + self._likely_pages(sequence) > most

    def has_row(self, flow: Flow, draft: Draft) -> bool:
        """Whether the step has a row for `flow`."""
        reserved = int((len(draft.chunks) + draft.rows_left) * self._budget.reserve_share)
        return draft.rows_left > reserved or (draft.rows_left > 0 and self._batch.held_by(flow)[0] < reserved)

    def has_pages(self, sequence: Sequence, leaving: Collection[Sequence] = ()) -> bool:
        """Whether the pool has room for `sequence`, where `leaving` have left."""
        running = [s for s in self._batch.running if s not in leaving] if leaving else self._batch.running
        adapters = self.residency.pinned_pages(sequence.digest)
        reserved, reserve = self._kept_for_other_classes(sequence, running), self._budget.reserve
        likely = self._likely_pages(sequence)
        if likely > reserve or self._batch.held_by(sequence.flow)[1] + likely > reserve:
            reserved += reserve
        if not leaving and self._budget.holds_all(self._batch.most_pages, sequence, adapters + reserved):
            return True  # most of the asking, where the pool is large
        return self._budget.admits(sequence, running, adapters, reserved)

    def debtors(self, sequence: Sequence) -> list[Sequence]:
        """Those that run on what `sequence` has the better claim to, the first to go last."""
        if not (self._policy.tenant_guaranteed_pages or self._queue.any_to_interrupt(sequence.flow)):
            return []
        debtors = [s for s in self._batch.running if self.owes(s, sequence)]
        debtors.sort(key=self.standing, reverse=True)  # stable: of equals the newest goes first
        return debtors

    def owes(self, running: Sequence, sequence: Sequence) -> bool:
        """Whether `running` must make place for `sequence`.

        It must where it is of a lower class that has taken more than its share, and where it is of no higher class, its
        tenant has borrowed, and `sequence` asks for no more than its own tenant is guaranteed. Either way it first gets
        somewhere with the place it has: two that displace each other would else do nothing but recompute, for ever.
        """
        if not running.has_gained:
            return False
        if self._queue.may_interrupt(sequence.flow, running.flow):
            return True
        higher = running.flow.group.weight > sequence.flow.group.weight  # one cannot owe the other, and the other it
        if higher or not self._policy.tenant_guaranteed_pages or running.flow.tenant == sequence.flow.tenant:
            return False
        own = self._promised_to_tenant(sequence) + self._likely_pages(sequence)
        return own <= self._guaranteed(sequence) and self._has_borrowed(running)

    def standing(self, running: Sequence) -> tuple[bool, float, float]:
        """Who keeps its memory longest: with borrowed pages shorter, of a small class shorter, well served shorter."""
        return not self._has_borrowed(running), running.flow.group.weight, -running.flow.served

    def omega(self) -> float:
        """Bytes of the adapters in use over the bytes that a step reads anyway: the least that they slow it down by."""
        held = self._memory.num_kv
        return self.residency.pinned_pages() / (self._policy.weight_pages + held) if held else 0.0

    def _likely_pages(self, sequence: Sequence) -> int:
        return self._budget.pages_for(sequence.likely_len)

    def _promised_to_tenant(self, sequence: Sequence) -> int:
        """Pages that its tenant holds or is expected to."""
        running = (s for s in self._batch.running if s.flow.tenant == sequence.flow.tenant)
        return sum(self._budget.pages_for(len(s.token_ids) + s.likely_left) for s in running)

    def _guaranteed(self, sequence: Sequence) -> int:
        share = self._policy.tenant_guaranteed_pages * sequence.flow.weight
        return int(self._budget.num_pages * share)

    def _has_borrowed(self, running: Sequence) -> bool:
        return self._promised_to_tenant(running) > self._guaranteed(running)

    def _kept_for_other_classes(self, sequence: Sequence, running: Collection[Sequence]) -> int:
        kept = 0
        for service_class, share in self._policy.reserved_pages.items():
            if service_class is not sequence.request.service_class:
                held = sum(len(s.pages) for s in running if s.request.service_class is service_class)
                kept += max(0, int(self._budget.num_pages * share) - held)
        return kept
