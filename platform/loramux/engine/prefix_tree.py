"""Pages full of KV, as a tree over the tokens that lead to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from loramux.engine.ranking import COLD
from loramux.engine.request import KvIdentity

Tokens = tuple[int, ...]
"""The block_size token ids of a page; compared whole, so that no two texts are ever taken for one."""


@dataclass(eq=False, slots=True)
class PrefixTree:
    """Everything cached under one identity. Nothing leads from one tree into another."""

    identity: KvIdentity
    children: dict[Tokens, CachedPage] = field(default_factory=dict)
    num_pages: int = 0
    closed: bool = False
    """Whether its revision was retired: nobody new finds it, and its pages go with their last users."""
    num_published: int = 0
    """Pages ever."""
    num_reused: int = 0
    """Of them, those that were ever found again."""

    @property
    def reuse_share(self) -> float:
        """The chance that a new page of this tree is ever found again, as far as it is known."""
        return (self.num_reused + 1) / (self.num_published + 2)

    def __iter__(self) -> Iterator[CachedPage]:
        """Every page, parents before children."""
        found = list(self.children.values())
        for page in found:
            yield page
            found += page.children.values()


@dataclass(eq=False, slots=True)
class CachedPage:
    """KV of block_size tokens in their context. Whoever uses a page uses all that lead to it."""

    tree: PrefixTree
    parent: CachedPage | None
    tokens: Tokens
    page: int
    """In the pool; -1 once it was evicted."""
    users: int = 0
    """Running sequences whose block tables begin with it."""
    heat: float = COLD
    reused: bool = False
    children: dict[Tokens, CachedPage] = field(default_factory=dict)

    @property
    def siblings(self) -> dict[Tokens, CachedPage]:
        """The pages that continue what its parent does, itself included."""
        return self.tree.children if self.parent is None else self.parent.children

    @property
    def evicted(self) -> bool:
        """Whether its KV is gone; that of its parents may be there yet."""
        return self.page < 0

    @property
    def leaf(self) -> bool:
        """Whether it may be evicted: nobody uses it, and nothing builds on it."""
        return not (self.users or self.children)
