"""Pages: the one pool that KV and adapters share, the cached pages of the prefix tree, and the pages of a sequence.

Page ids are plain integers; the runner owns the memory that they name. This module holds data structures only; the
other modules of the package act on them.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from loramux.engine.memory.prefix_digests import with_image_ids
from loramux.engine.memory.ranking import NEVER_USED
from loramux.engine.messages import KvIdentity, Request


class PageUse(enum.StrEnum):
    """The purpose for which a page is taken."""

    KV = "kv"
    ADAPTER = "adapter"


class OutOfPages(RuntimeError):
    """More pages were taken than are free: the caller did not check the budget first."""


class PagePool:
    """Allocates page ids. Every page has at most one holder."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken = dict.fromkeys(PageUse, 0)

    @property
    def num_free(self) -> int:
        """Pages that are not taken."""
        return len(self._free)

    def num_taken(self, use: PageUse) -> int:
        """Return the number of pages held for `use`."""
        return self._taken[use]

    def take(self, count: int, use: PageUse) -> list[int]:
        """Take `count` pages; if fewer are free, take none and raise OutOfPages."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted for {use}, {len(self._free)} of {self.num_pages} free")
        split = len(self._free) - count
        taken = self._free[split:][::-1]
        del self._free[split:]
        self._taken[use] += count
        return taken

    def give_back(self, pages: Iterable[int], use: PageUse) -> None:
        """Return pages taken for `use`."""
        returned = list(pages)
        self._free.extend(reversed(returned))
        self._taken[use] -= len(returned)
        assert self._taken[use] >= 0, "a page was given back twice"


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Measured seconds to compute a page of KV, and to copy it over the host link."""

    compute_seconds: Callable[[int], float]
    """Additional seconds that a number of tokens take in steps that run anyway; 0 before steps were measured."""
    block_size: int
    copy_seconds: float | None
    """Seconds to copy a page one way; None if pages are never copied."""
    assumed: float
    """Value of `recompute` before both times are known."""
    state_pages: int = 0
    """Pages before a sequence's KV that hold its recurrent states."""

    @property
    def recompute(self) -> float:
        """Time to compute a page's tokens, divided by the time to copy the page over the link."""
        seconds = self.compute_seconds(self.block_size)
        return seconds / self.copy_seconds if seconds and self.copy_seconds else self.assumed


# ---- the prefix tree

Tokens = tuple[int, ...]
"""The block_size token ids of a page. All ids are compared, so two different texts are never mistaken for each other.
"""


@dataclass(eq=False, slots=True)
class PrefixTree:
    """All pages cached under one identity. No edge leads from one tree into another."""

    identity: KvIdentity
    children: dict[Tokens, CachedPage] = field(default_factory=dict)
    num_pages: int = 0
    closed: bool = False
    """True if the tree's revision was retired: no lookup finds the tree, and each page is freed with its last user."""
    num_published: int = 0
    """Pages ever published in this tree."""
    num_reused: int = 0
    """Published pages that were ever found again."""

    @property
    def reuse_share(self) -> float:
        """Estimated chance that a new page of this tree is found again (Laplace's rule of succession)."""
        return (self.num_reused + 1) / (self.num_published + 2)

    def __iter__(self) -> Iterator[CachedPage]:
        """Yield every page, parents before children."""
        found = list(self.children.values())
        for page in found:
            yield page
            found += page.children.values()


@dataclass(eq=False, slots=True)
class CachedPage:
    """KV of block_size tokens in their context. A sequence that uses a page uses all pages that lead to it."""

    tree: PrefixTree
    parent: CachedPage | None
    tokens: Tokens
    page: int
    """Number of the page in the pool; -1 after its eviction."""
    users: int = 0
    """Running sequences whose block tables contain this page."""
    recency: float = NEVER_USED
    reused: bool = False
    digest: int | None = None
    """Digest of the text up to the end of this page, under the tree's identity, if a request gave one."""
    state: list[int] = field(default_factory=list)
    """Pages with the recurrent states after this page's last token; empty if they are not cached."""
    state_stays: bool = False
    """True if a chunk had to end here for `state`, or a sequence began with it. Another state is moved to a later page.
    """
    state_span: int = 0
    """Pages of KV that a sequence would compute again without `state`: those since an earlier cached state."""
    children: dict[Tokens, CachedPage] = field(default_factory=dict)

    @property
    def siblings(self) -> dict[Tokens, CachedPage]:
        """Pages that continue the same parent, including this page."""
        return self.tree.children if self.parent is None else self.parent.children

    @property
    def is_evicted(self) -> bool:
        """True if the page's KV was evicted; the KV of its parents may still be cached."""
        return self.page < 0

    @property
    def is_leaf(self) -> bool:
        """True if the page may be evicted: no sequence uses it and no page builds on it."""
        return not (self.users or self.children)

    @property
    def is_evictable(self) -> bool:
        """True if eviction may take this page, or its cached state: sequences run on copies of states."""
        return self.is_leaf or bool(self.state)


# ---- a sequence's share


class SequenceKv:
    """The tokens of a sequence, the number of tokens with KV, and the pages that hold the KV."""

    __slots__ = (
        "activation",
        "borders",
        "latest_state",
        "matched_pages",
        "num_cached",
        "num_computed",
        "num_ever_computed",
        "num_prompt_tokens",
        "num_saved",
        "num_unchanged_pages",
        "pages",
        "prefix_pages",
        "request",
        "swap_slots",
        "token_ids",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        """Token ids of the prompt and the output."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        """Number of tokens that the client sent."""
        self.num_computed = 0
        """Leading tokens whose KV is in `pages`."""
        self.num_ever_computed = len(self.token_ids) - 1 if request.output_token_ids else 0
        """Leading tokens that had been computed, or found in the cache, when the sequence last began to run. These
        tokens are not charged again. Tokens that another engine computed count too, except the last one, which leads to
        the next token.
        """
        self.num_cached = 0
        """Prompt tokens found in the cache before the sequence had computed them itself."""
        self.pages: array[int] = array("i")
        """The block table, after the pages of the recurrent states (`PageCosts.state_pages`): its page i holds tokens
        [i * block_size, (i + 1) * block_size). The table is an array because the runner copies it into a tensor in
        every step.
        """
        self.num_unchanged_pages = 0
        """Leading pages of the block table that have not changed since a runner on a GPU last copied the table, so that
        it need not compare all of them. A page that is replaced or given back lowers this number.
        """
        self.prefix_pages: list[CachedPage] = []
        """Cached pages at the beginning of the block table. While the sequence waits, these are the cached pages that
        it could use.
        """
        self.matched_pages: list[CachedPage] = []
        """All cached pages with the text of a waiting sequence, if its model has states. `prefix_pages` are those up to
        the last one with a cached state.
        """
        self.borders: tuple[int, ...] = ()
        """Ends of pages at which a chunk of the running sequence ends, because its states are cached there."""
        self.latest_state: CachedPage | None = None
        """Page with the newest cached state of the running sequence, if the next one replaces it."""
        self.swap_slots: list[int] = []
        """Slots with the host's copy of a waiting sequence's pages: slot i holds what page i held."""
        self.num_saved = 0
        """Leading tokens whose KV is in `swap_slots`."""
        self.activation: int | None = None
        """First token that an activated LoRA serves; earlier tokens, and their KV, are the base's. None: one model
        serves all tokens."""

    @property
    def kv_identity(self) -> KvIdentity:
        """Identity under which the KV of the first `num_shareable` tokens is shared."""
        return self.request.kv_identity if self.activation is None else self.request.base_kv_identity

    @property
    def needs_whole_prompt(self) -> bool:
        """True if log probabilities, or the mean or the classes of hidden states, need every prompt token to go through
        the model.
        """
        if self.request.pooling in ("mean", "token_classify"):
            return True
        return self.request.sampling.prompt_logprobs is not None and not self.request.output_token_ids

    def cache_ids(self, start: int, end: int) -> Tokens:
        """Return the ids of the tokens [start, end) by which their KV is found: those of their images for
        placeholders."""
        token_ids = self.token_ids[start:end]
        return tuple(with_image_ids(token_ids, self.request.images, start) if self.request.images else token_ids)

    @property
    def num_shareable(self) -> int:
        """Number of leading tokens whose KV other sequences may use. After an invocation, KV depends on the
        invocation's position.
        """
        return len(self.token_ids) if self.activation is None else min(self.activation, len(self.token_ids))

    def resume_from_prefix(self, block_size: int) -> None:
        """Begin to run after the KV of `prefix_pages`."""
        self.pages = array("i", [page.page for page in self.prefix_pages])
        self.num_unchanged_pages = 0
        self.num_computed = len(self.pages) * block_size
        self.num_cached += max(0, min(self.num_computed, self.num_prompt_tokens) - self.num_ever_computed)
        self.num_ever_computed = max(self.num_ever_computed, self.num_computed)

    def drop_kv(self) -> array[int]:
        """Forget the KV (preemption, end) and return the pages that held it."""
        self.num_ever_computed = max(self.num_ever_computed, self.num_computed)
        pages, self.pages = self.pages, array("i")
        self.num_computed = self.num_unchanged_pages = 0
        return pages
