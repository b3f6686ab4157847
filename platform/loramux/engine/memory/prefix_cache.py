"""The prefix cache: full pages of KV, kept for sequences that begin with the same tokens under the same identity.

Each identity (tenant and revision) has a tree whose edges are whole pages of tokens, as in vLLM's automatic prefix
caching and SGLang's RadixAttention. Only full pages are shared, so a shared page is never written again. Eviction takes
leaves only, in order of the recency of use. `memory` counts cached pages that no sequence uses as available.

If layers keep states (linear attention, Mamba 2), KV is useless without the states after the same token. A page then
may have a cached state: pages with a copy of the states at its end. A sequence begins after the last page that has one.
`Memory` makes the copies. A cached state is evicted before its page.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from itertools import islice

from loramux.engine.memory.pages import CachedPage, PageCosts, PagePool, PageUse, PrefixTree, SequenceKv
from loramux.engine.memory.prefix_digests import PLACES, identity_mask
from loramux.engine.memory.ranking import RankedItems, used_at
from loramux.engine.memory.residency import Residency
from loramux.engine.messages import KvIdentity
from loramux.engine.metrics import Counters

UNUSABLE = 64.0
"""Half-lives by which a page of KV that no cached state follows counts as older, if the model has states."""


class PrefixCache:
    """The KV pages that more than one sequence may read."""

    def __init__(
        self,
        pool: PagePool,
        residency: Residency,
        costs: PageCosts,
        counters: Counters,
        *,
        enabled: bool,
        keeps_answers: bool = True,
    ) -> None:
        """Without `keeps_answers`, only pages of prompts are shared."""
        self.num_idle = 0
        """Cached pages that no running sequence uses: KV, and states."""
        self.num_of_states = 0
        """Pages of `num_idle` with states."""
        self.is_enabled = enabled
        self.block_size = costs.block_size
        self._keeps_answers = keeps_answers
        self._pool = pool
        self._residency = residency
        self._state_pages = costs.state_pages
        self._costs = costs
        self._counters = counters
        self._trees: dict[KvIdentity, PrefixTree] = {}
        self._evictable: RankedItems[CachedPage, float] = RankedItems(self._worth)
        self._digests: OrderedDict[int, CachedPage] = OrderedDict()
        """Pages with a digest, the last used last."""

    # questions

    @property
    def eviction_candidate(self) -> CachedPage | None:
        """The page to evict first, which is an unused leaf or has a cached state."""
        return self._evictable.first()

    def eviction_order(self, limit: int) -> list[CachedPage]:
        """Return the `limit` pages to evict first."""
        return self._evictable.peek(limit)

    def retention_score(self, page: CachedPage) -> float:
        """Return log2 of expected uses x cost of computing the page again, in units of its time over the host link."""
        return self._worth(page) + math.log2(self._costs.recompute)

    def score_of_state(self, page: CachedPage) -> float:
        """Return the retention score that a cached state of `page` would have."""
        worth = page.recency + math.log2(_state_span(page) / self._state_pages)
        return worth + math.log2(self._costs.recompute)

    def num_shareable(self, sequence: SequenceKv) -> int:
        """Return the number of leading tokens of `sequence` whose pages may be shared."""
        most = sequence.num_shareable
        return most if self._keeps_answers else min(most, sequence.num_prompt_tokens)

    def recent_digests(self, limit: int) -> list[int]:
        """Return the digests of the most recently used beginnings of prompts, at most `limit`, of which one tenant has
        at most a quarter unless there is room.
        """
        shares: Counter[str] = Counter()
        recent: list[int] = []
        others: list[int] = []
        for digest, page in islice(reversed(self._digests.items()), 4 * limit):
            tenant = page.tree.identity.tenant
            shares[tenant] += 1
            (recent if shares[tenant] <= limit // 4 else others).append(digest)
            if len(recent) == limit:
                break
        return [*recent, *others[: limit - len(recent)]]

    # one sequence

    def look_up(self, sequence: SequenceKv) -> None:
        """Find the cached pages that a waiting `sequence` could begin with now. The look-up does not reserve
        `prefix_pages`.

        At least one token is left to compute, because its logits are needed. A second call continues after the pages
        that the first call found.
        """
        if not self._state_pages:
            self._match(sequence, sequence.prefix_pages)
            return
        matched = sequence.matched_pages
        self._match(sequence, matched)
        usable = len(matched)
        while usable and not matched[usable - 1].state:
            usable -= 1
        sequence.prefix_pages = matched[:usable]

    def _match(self, sequence: SequenceKv, found: list[CachedPage]) -> None:
        """Extend `found` by the cached pages with the text of `sequence`."""
        size = self.block_size
        # Since an earlier call, pages may have been evicted or their revision retired.
        while found and (found[-1].is_evicted or found[-1].tree.closed):
            found.pop()
        tree = self._trees.get(sequence.kv_identity)
        if tree is None or sequence.needs_whole_prompt:
            return
        children = found[-1].children if found else tree.children
        most = min(len(sequence.token_ids) - 1, self.num_shareable(sequence))
        for end in range((len(found) + 1) * size, most + 1, size):
            if not children or (page := children.get(sequence.cache_ids(end - size, end))) is None:
                return
            found.append(page)
            children = page.children

    def acquire(self, sequence: SequenceKv) -> None:
        """Begin to run `sequence` with its `prefix_pages`, which are not evicted until the sequence is released."""
        prefix = sequence.prefix_pages
        if prefix:
            now = self._residency.now
            for depth, page in enumerate(prefix, start=1):
                self._use(page, now)
                self._name(page, sequence, depth)
            # Only the last page can be a leaf, because each other page has a child.
            self._rank(prefix[-1])
        sequence.resume_from_prefix(self.block_size)

    def publish(self, sequence: SequenceKv) -> None:
        """Let others find the pages that `sequence` has filled. If an equal page exists already, use that one
        instead."""
        assert self.is_enabled, "a cache that keeps nothing is not asked to"
        prefix, size = sequence.prefix_pages, self.block_size
        most = min(sequence.num_computed, self.num_shareable(sequence))
        for end in range((len(prefix) + 1) * size, most + 1, size):
            tokens, place = sequence.cache_ids(end - size, end), self._state_pages + len(prefix)
            parent = prefix[-1] if prefix else None
            tree = parent.tree if parent else self._tree(sequence.kv_identity)
            siblings = parent.children if parent else tree.children
            found = siblings.get(tokens)
            if found is None:
                found = siblings[tokens] = CachedPage(tree, parent, tokens, sequence.pages[place], users=1)
                self._count(found)
            else:
                # Another sequence has computed and published the same text.
                self._pool.give_back([sequence.pages[place]], PageUse.KV)
                sequence.pages[place] = found.page
                sequence.num_unchanged_pages = min(sequence.num_unchanged_pages, place)
                self._use(found, self._residency.now)
                self._rank(found)
            prefix.append(found)
            self._name(found, sequence, len(prefix))

    def release(self, sequence: SequenceKv) -> None:
        """Give back the own pages of a `sequence` that stops; its cached pages remain until pages are needed."""
        prefix, states = sequence.prefix_pages, self._state_pages
        pages = sequence.drop_kv()
        self._pool.give_back(pages[:states] + pages[states + len(prefix) :], PageUse.KV)
        # From the last page to the first: removing a page of a closed tree makes its parent a leaf.
        while prefix:
            page = prefix.pop()
            page.users -= 1
            self.num_idle += not page.users
            if page.is_leaf and page.tree.closed:
                self._remove(page)
            elif page.is_leaf:
                self._rank(page)

    # states

    def put_state(self, page: CachedPage, state: list[int], *, stays: bool) -> None:
        """Cache `state`, pages with the states after the last token of `page`."""
        page.state, page.state_stays, page.state_span = state, stays, _state_span(page)
        self.num_idle += len(state)
        self.num_of_states += len(state)
        self._rank(page)

    def take_state(self, page: CachedPage) -> list[int]:
        """Take the cached state from `page`, and return its pages, which now belong to the caller."""
        state, page.state = page.state, []
        self.num_idle -= len(state)
        self.num_of_states -= len(state)
        self._rank(page)
        return state

    # room

    def evict(self, page: CachedPage) -> None:
        """Give back the cached state of a page, or a leaf without one; its parent may become a leaf."""
        if page.state:
            self._counters.kv_evictions += len(page.state)
            self._pool.give_back(self.take_state(page), PageUse.KV)
            return
        self._remove(page)
        self._counters.kv_evictions += 1
        if page.parent is not None and page.parent.is_leaf:
            self._rank(page.parent)

    def retire(self, digest: str) -> None:
        """Close the trees of a deleted revision and give back their unused pages."""
        for identity in [identity for identity in self._trees if identity.digest == digest]:
            tree = self._trees.pop(identity)
            tree.closed = True
            # Children before parents, which are no leaves until then.
            for page in reversed(list(tree)):
                if page.is_leaf:
                    self._remove(page)

    def _tree(self, identity: KvIdentity) -> PrefixTree:
        tree = self._trees.get(identity)
        if tree is None:
            tree = self._trees[identity] = PrefixTree(identity)
        return tree

    def _count(self, page: CachedPage) -> None:
        """Note a new page of a tree."""
        tree = page.tree
        # A new page counts as a fraction of a use: the estimated probability that it is used again.
        page.recency = self._residency.now + math.log2(tree.reuse_share)
        tree.num_published += 1
        tree.num_pages += 1
        if tree.num_pages == 1 and tree.identity.digest is not None:
            self._residency.add_tree(tree.identity.digest)

    def _name(self, page: CachedPage, sequence: SequenceKv, depth: int) -> None:
        """Keep the digest that the request of `sequence` gives for its first `depth` pages, which end with `page`."""
        digests, place = sequence.request.prefix_digests, PLACES.get(depth, len(PLACES))
        if page.digest is None and place < len(digests):
            digest = digests[place] ^ identity_mask(page.tree.identity)
            if self._digests.setdefault(digest, page) is page:
                page.digest = digest

    def _use(self, page: CachedPage, now: float) -> None:
        if page.digest is not None:
            self._digests.move_to_end(page.digest)
        page.recency = used_at(page.recency, now)
        self.num_idle -= not page.users
        page.users += 1
        if not page.reused:
            page.reused = True
            page.tree.num_reused += 1

    def _worth(self, page: CachedPage) -> float:
        """Return log2 of the expected uses of each page that evicting `page` would free.

        A cached state saves the tokens since an earlier one. Without a state, KV begins no sequence: it only shows
        which text was seen before.
        """
        if page.state:
            return page.recency + math.log2(page.state_span / len(page.state))
        return page.recency - UNUSABLE if self._state_pages else page.recency

    def _rank(self, page: CachedPage) -> None:
        """Rank `page` after a change of what eviction may take of it."""
        if page.is_evictable:
            self._evictable.put(page)
        else:
            self._evictable.drop(page)

    def _remove(self, page: CachedPage) -> None:
        assert page.is_leaf, "a page that is in use, or built upon, stays"
        tree = page.tree
        if page.state:
            self._pool.give_back(self.take_state(page), PageUse.KV)
        self._evictable.drop(page)
        del page.siblings[page.tokens]
        self._pool.give_back([page.page], PageUse.KV)
        page.page = -1
        if page.digest is not None:
            del self._digests[page.digest]
        self.num_idle -= 1
        tree.num_pages -= 1
        if not tree.num_pages:
            self._drop(tree)

    def _drop(self, tree: PrefixTree) -> None:
        if not tree.closed:
            del self._trees[tree.identity]
        if tree.identity.digest is not None:
            self._residency.remove_tree(tree.identity.digest)


def _state_span(page: CachedPage) -> int:
    """Return the number of pages up to the end of `page` that a sequence would compute again without a state there."""
    span, earlier = 1, page.parent
    while earlier is not None and not earlier.state:
        span, earlier = span + 1, earlier.parent
    return span
