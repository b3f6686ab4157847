"""The prefix cache: full pages of KV, kept for sequences that begin with the same tokens under the same identity.

Each identity (tenant and revision) has a tree whose edges are whole pages of tokens, as in vLLM's automatic prefix
caching and SGLang's RadixAttention. Only full pages are shared, so a shared page is never written again. Eviction takes
leaves only, in order of the recency of use. `memory` counts cached pages that no sequence uses as available.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from itertools import islice
from operator import attrgetter

from loramux.engine.memory.pages import CachedPage, PageCosts, PagePool, PageUse, PrefixTree, SequenceKv
from loramux.engine.memory.prefix_digests import PLACES, identity_mask
from loramux.engine.memory.ranking import RankedItems, used_at
from loramux.engine.memory.residency import Residency
from loramux.engine.messages import KvIdentity
from loramux.engine.metrics import Counters


class PrefixCache:
    """The KV pages that more than one sequence may read."""

    def __init__(
        self, pool: PagePool, residency: Residency, costs: PageCosts, counters: Counters, *, enabled: bool
    ) -> None:
        self.num_idle = 0
        """Cached pages that no running sequence uses."""
        self.is_enabled = enabled
        self._pool = pool
        self._residency = residency
        self._block_size = costs.block_size
        self._costs = costs
        self._counters = counters
        self._trees: dict[KvIdentity, PrefixTree] = {}
        self._leaves: RankedItems[CachedPage, float] = RankedItems(attrgetter("recency"))
        self._digests: OrderedDict[int, CachedPage] = OrderedDict()
        """Pages with a digest, the last used last."""

    # questions

    @property
    def eviction_candidate(self) -> CachedPage | None:
        """The unused leaf to evict first."""
        return self._leaves.first()

    def eviction_order(self, limit: int) -> list[CachedPage]:
        """Return the `limit` unused leaves to evict first."""
        return self._leaves.peek(limit)

    def retention_score(self, page: CachedPage) -> float:
        """Return log2 of expected uses x cost of computing the page again, in units of its time over the host link."""
        return page.recency + math.log2(self._costs.recompute)

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
        prefix, size = sequence.prefix_pages, self._block_size
        # Since an earlier call, pages may have been evicted or their revision retired.
        while prefix and (prefix[-1].is_evicted or prefix[-1].tree.closed):
            prefix.pop()
        tree = self._trees.get(sequence.kv_identity)
        if tree is None or sequence.needs_whole_prompt:
            return
        children = prefix[-1].children if prefix else tree.children
        most = min(len(sequence.token_ids) - 1, sequence.num_shareable)
        for end in range((len(prefix) + 1) * size, most + 1, size):
            if not children or (found := children.get(sequence.cache_ids(end - size, end))) is None:
                return
            prefix.append(found)
            children = found.children

    def acquire(self, sequence: SequenceKv) -> None:
        """Begin to run `sequence` with its `prefix_pages`, which are not evicted until the sequence is released."""
        prefix = sequence.prefix_pages
        if prefix:
            # Only the last page can be a leaf, because each other page has a child.
            self._leaves.drop(prefix[-1])
            now = self._residency.now
            for depth, page in enumerate(prefix, start=1):
                self._use(page, now)
                self._name(page, sequence, depth)
        sequence.resume_from_prefix(self._block_size)

    def publish(self, sequence: SequenceKv) -> None:
        """Let others find the pages that `sequence` has filled. If an equal page exists already, use that one
        instead."""
        assert self.is_enabled, "a cache that keeps nothing is not asked to"
        prefix, size = sequence.prefix_pages, self._block_size
        most = min(sequence.num_computed, sequence.num_shareable)
        for end in range((len(prefix) + 1) * size, most + 1, size):
            tokens = sequence.cache_ids(end - size, end)
            parent = prefix[-1] if prefix else None
            tree = parent.tree if parent else self._tree(sequence.kv_identity)
            siblings = parent.children if parent else tree.children
            found = siblings.get(tokens)
            if found is None:
                found = siblings[tokens] = CachedPage(tree, parent, tokens, sequence.pages[len(prefix)], users=1)
                self._count(found)
            else:
                # Another sequence has computed and published the same text.
                self._pool.give_back([sequence.pages[len(prefix)]], PageUse.KV)
                sequence.pages[len(prefix)] = found.page
                self._leaves.drop(found)
                self._use(found, self._residency.now)
            prefix.append(found)
            self._name(found, sequence, len(prefix))

    def release(self, sequence: SequenceKv) -> None:
        """Give back the own pages of a `sequence` that stops; its cached pages remain until pages are needed."""
        prefix, pages = sequence.prefix_pages, sequence.drop_kv()
        self._pool.give_back(pages[len(prefix) :], PageUse.KV)
        # From the last page to the first: removing a page of a closed tree makes its parent a leaf.
        while prefix:
            page = prefix.pop()
            page.users -= 1
            self.num_idle += not page.users
            if page.is_leaf and page.tree.closed:
                self._remove(page)
            elif page.is_leaf:
                self._leaves.put(page)

    # room

    def evict(self, page: CachedPage) -> None:
        """Give back a leaf; its parent may become a leaf."""
        self._remove(page)
        self._counters.kv_evictions += 1
        if page.parent is not None and page.parent.is_leaf:
            self._leaves.put(page.parent)

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

    def _remove(self, page: CachedPage) -> None:
        assert page.is_leaf, "a page that is in use, or built upon, stays"
        tree = page.tree
        self._leaves.drop(page)
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
