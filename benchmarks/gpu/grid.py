"""The measured cells: model shapes, mixes of adapters, batches and contexts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

MIXED_RANKS = (8, 16, 32, 64)


@dataclass(frozen=True)
class ModelShape:
    """A Llama; the field names are transformers'."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @property
    def groups(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Linears of a layer that read the same input: in_features and the widths of the slices."""
        heads, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "qkv": (self.hidden_size, (heads, kv, kv)),
            "o": (heads, (self.hidden_size,)),
            "gate_up": (self.hidden_size, (self.intermediate_size, self.intermediate_size)),
            "down": (self.intermediate_size, (self.hidden_size,)),
        }


LLAMA_8B = ModelShape("llama-8b", 4096, 14336, 32, 32, 8, 128, 128_256)
TINY = ModelShape("tiny", 64, 96, 2, 4, 2, 16, 128)


@dataclass(frozen=True)
class Mix:
    """The adapters of a step's rows."""

    name: str
    adapters: int | None
    """Number of distinct adapters; None: every row has its own adapter."""
    ranks: tuple[int, ...]

    def slots(self, rows: int) -> list[int]:
        """The adapter of each row, with rows of one adapter next to each other; -1 for the base model."""
        distinct = self.distinct(rows)
        return sorted(row % distinct for row in range(rows)) if distinct else [-1] * rows

    def distinct(self, rows: int) -> int:
        """Adapters that `rows` rows ask for."""
        return rows if self.adapters is None else min(self.adapters, rows)

    def rank(self, adapter: int) -> int:
        """The ranks take turns."""
        return self.ranks[adapter % len(self.ranks)]


def mixes() -> tuple[Mix, ...]:
    """Return the mixes: the base alone, and 1, 8, 32 and all-distinct adapters of rank 16, of rank 64, and of ranks 8
    to 64.
    """
    kinds = {"r16": (16,), "r64": (64,), "mixed": MIXED_RANKS}
    counts: tuple[tuple[str, int | None], ...] = (("1", 1), ("8", 8), ("32", 32), ("all", None))
    some = (Mix(f"{count} {kind}", n, ranks) for (count, n), (kind, ranks) in product(counts, kinds.items()))
    return (Mix("base", 0, (16,)), *some)


@dataclass(frozen=True)
class Grid:
    """All cells of one run."""

    model: ModelShape
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[tuple[int, int], ...]
    """(prompts, tokens of each)"""
    mixes: tuple[Mix, ...]
    repeats: int

    def decodes(self) -> Iterator[tuple[int, int, Mix]]:
        """(batch, context, mix), with mixes of the same ranks together. A mix equal to an earlier mix is left out."""
        seen = set()
        for mix, batch, context in product(sorted(self.mixes, key=_base_first), self.batches, self.contexts):
            key = (batch, context, *(mix.rank(adapter) for adapter in range(mix.distinct(batch))))
            if key not in seen:
                seen.add(key)
                yield batch, context, mix


def _base_first(mix: Mix) -> tuple[bool, tuple[int, ...]]:
    """Order the cells: baselines first, then adapters of the same ranks together, which are made once."""
    return mix.adapters != 0, mix.ranks


FULL = Grid(LLAMA_8B, (1, 8, 32, 64, 128), (512, 1024, 4096), ((1, 512), (4, 1024), (8, 512)), mixes(), 20)
QUICK = Grid(TINY, (2,), (12,), ((2, 9),), (mixes()[0], Mix("1 r8", 1, (8,)), Mix("all mixed", None, (8, 16))), 1)
