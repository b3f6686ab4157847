"""The prefix cache: whole pages of KV, kept for whoever begins with the same tokens under the same identity."""

from __future__ import annotations

import math
from operator import attrgetter

from loramux.engine.page_costs import PageCosts
from loramux.engine.pages import PagePool, PageUse
from loramux.engine.policy import Policy
from loramux.engine.prefix_tree import CachedPage, PrefixTree
from loramux.engine.ranking import Ranking, warmed
from loramux.engine.request import KvIdentity
from loramux.engine.residency import Residency
from loramux.engine.sequence import Sequence


class PrefixCache:
    """The KV pages that more than one sequence may read. Only full pages are shared, so none is ever written again."""

    def __init__(self, policy: Policy, pool: PagePool, residency: Residency, block_size: int, costs: PageCosts) -> None:
        self.num_idle = 0
        """Cached pages that no running sequence uses."""
        self.num_evictions = 0
        self._enabled = policy.prefix_cache
        self._pool = pool
        self._residency = residency
        self._block_size = block_size
        self._costs = costs
        self._trees: dict[KvIdentity, PrefixTree] = {}
        self._leaves: Ranking[CachedPage, float] = Ranking(attrgetter("heat"))

    # questions

    @property
    def least_worthy(self) -> CachedPage | None:
        """The first to evict, of the leaves that nobody uses."""
        return self._leaves.first()

    def worth(self, page: CachedPage) -> float:
        """log2 of expected uses x cost of computing it again, in the time that a page takes over the host link."""
        return page.heat + math.log2(self._costs.recomputing)

    # acts: one sequence

    def look_up(self, sequence: Sequence) -> None:
        """Find what a waiting `sequence` could begin with now: its `trail`, which is not reserved by this.

        At least one token is left to compute, for there must be logits.
        """
        trail, size = sequence.trail, self._block_size
        while trail and (trail[-1].evicted or trail[-1].tree.closed):
            trail.pop()
        tree = self._trees.get(sequence.kv_identity)
        if tree is None:
            return
        children = trail[-1].children if trail else tree.children
        most = min(len(sequence.token_ids) - 1, sequence.num_shareable)
        for end in range((len(trail) + 1) * size, most + 1, size):
            if not children or (found := children.get(tuple(sequence.token_ids[end - size : end]))) is None:
                return
            trail.append(found)
            children = found.children

    def hold(self, sequence: Sequence) -> None:
        """`sequence` begins to run with its `trail`, which stays until it is released."""
        trail = sequence.trail
        if trail:
            self._leaves.drop(trail[-1])
            now = self._residency.now
            for page in trail:
                self._use(page, now)
        sequence.begin_behind([page.page for page in trail], self._block_size)

    def publish(self, sequence: Sequence) -> None:
        """Let others find the pages that `sequence` has filled. Where one was there already, that one is used."""
        if not self._enabled:
            return
        trail, size = sequence.trail, self._block_size
        most = min(sequence.num_computed, sequence.num_shareable)
        for end in range((len(trail) + 1) * size, most + 1, size):
            tokens = tuple(sequence.token_ids[end - size : end])
            parent = trail[-1] if trail else None
            tree = parent.tree if parent else self._tree(sequence.kv_identity)
            found = (parent or tree).children.get(tokens)
            if found is None:
                found = self._add(CachedPage(tree, parent, tokens, sequence.pages[len(trail)], users=1))
            else:
                self._pool.give_back([sequence.pages[len(trail)]], PageUse.KV)
                sequence.pages[len(trail)] = found.page
                self._leaves.drop(found)
                self._use(found, self._residency.now)
            trail.append(found)

    def release(self, sequence: Sequence) -> None:
        """`sequence` has stopped: its own pages are given back, those in the cache stay until the room is needed."""
        trail, pages = sequence.trail, sequence.forget_kv()
        self._pool.give_back(pages[len(trail) :], PageUse.KV)
        while trail:
            page = trail.pop()
            page.users -= 1
            self.num_idle += not page.users
            if page.leaf and page.tree.closed:
                self._remove(page)
            elif page.leaf:
                self._leaves.put(page)

    # acts: room

    def evict(self, page: CachedPage) -> None:
        """Give back a leaf; its parent may become one."""
        self._remove(page)
        self.num_evictions += 1
        if page.parent is not None and page.parent.leaf:
            self._leaves.put(page.parent)

    def retire(self, digest: str) -> None:
        """The revision was deleted: nobody finds its KV again, and what is not in use is given back."""
        for identity in [identity for identity in self._trees if identity.digest == digest]:
            tree = self._trees.pop(identity)
            tree.closed = True
            for page in reversed(list(tree)):
                if page.leaf:
                    self._remove(page)

    def _tree(self, identity: KvIdentity) -> PrefixTree:
        tree = self._trees.get(identity)
        if tree is None:
            tree = self._trees[identity] = PrefixTree(identity)
        return tree

    def _add(self, page: CachedPage) -> CachedPage:
        tree = page.tree
        page.heat = self._residency.now + math.log2(tree.reuse_share)
        page.siblings[page.tokens] = page
        tree.num_published += 1
        tree.num_pages += 1
        if tree.num_pages == 1 and tree.identity.digest is not None:
            self._residency.cover(tree.identity.digest)
        return page

    def _use(self, page: CachedPage, now: float) -> None:
        page.heat = warmed(page.heat, now)
        self.num_idle -= not page.users
        page.users += 1
        if not page.reused:
            page.reused = True
            page.tree.num_reused += 1

    def _remove(self, page: CachedPage) -> None:
        assert page.leaf, "what is in use, or built upon, stays"
        tree = page.tree
        self._leaves.drop(page)
        del page.siblings[page.tokens]
        self._pool.give_back([page.page], PageUse.KV)
        page.page = -1
        self.num_idle -= 1
        tree.num_pages -= 1
        if not tree.num_pages:
            self._drop(tree)

    def _drop(self, tree: PrefixTree) -> None:
        if not tree.closed:
            del self._trees[tree.identity]
        if tree.identity.digest is not None:
            self._residency.uncover(tree.identity.digest)
