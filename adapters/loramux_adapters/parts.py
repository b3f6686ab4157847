"""What an adapter's file holds, part by part: for which module, under which names, and in which shapes."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."


class PairNames(NamedTuple):
    """How PEFT calls A and B behind the module's name."""

    a: str
    b: str


LINEAR_PAIR = PairNames("lora_A.weight", "lora_B.weight")
EMBEDDING_PAIR = PairNames("lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapted module: `y += scale * (x @ A.T) @ B.T`, A `[rank, in_features]` and B `[out_features, rank]`.

    Of an embedding, x is one-hot: in_features are the tokens.
    """

    module: str
    rank: int
    scale: float
    in_features: int
    out_features: int
    names: PairNames = LINEAR_PAIR

    @property
    def a_key(self) -> str:
        """A's name in the file."""
        return f"{PREFIX}{self.module}.{self.names.a}"

    @property
    def b_key(self) -> str:
        """B's name in the file."""
        return f"{PREFIX}{self.module}.{self.names.b}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Both tensors as PEFT saves them."""
        return {self.a_key: (self.rank, self.in_features), self.b_key: (self.out_features, self.rank)}

    def share(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What of the file's two tensors is this pair's: all of both."""
        return a, b


@dataclass(frozen=True, slots=True)
class PartPair(LoraPair):
    """One expert's share of a pair on a parameter (`target_parameters`)."""

    holder: str = ""
    """The name that the module of the parameter has in the file."""
    expert: int = 0
    num_experts: int = 1

    @property
    def a_key(self) -> str:
        """All experts' A `[experts * rank, in_features]`."""
        return f"{PREFIX}{self.holder}.{self.names.a}"

    @property
    def b_key(self) -> str:
        """All experts' B `[out_features, rank * experts]`."""
        return f"{PREFIX}{self.holder}.{self.names.b}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Both tensors as PEFT saves them, for all experts."""
        ranks = self.rank * self.num_experts
        return {self.a_key: (ranks, self.in_features), self.b_key: (self.out_features, ranks)}

    def share(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """PEFT counts A's rows by expert and then by rank, B's columns by rank and then by expert."""
        rows = a.view(self.num_experts, self.rank, -1)[self.expert]
        return rows, b.view(-1, self.rank, self.num_experts)[:, :, self.expert].contiguous()


class VectorKind(enum.Enum):
    """What a vector v of a linear `y = x @ W.T + bias` does."""

    LORA_BIAS = "y += scale * v"
    MAGNITUDE = "DoRA: v becomes the length of the rows of W + scale * B @ A"
    OUTPUT = "IA3: y *= v"
    INPUT = "IA3 in a feed-forward module: x *= v"


@dataclass(frozen=True, slots=True)
class VectorPart:
    """One vector of one linear."""

    module: str
    kind: VectorKind
    size: int
    """out_features; of an INPUT, in_features."""
    scale: float = 1.0
    """Of a LORA_BIAS."""

    @property
    def key(self) -> str:
        """Its name in the file."""
        names = {VectorKind.LORA_BIAS: "lora_B.bias", VectorKind.MAGNITUDE: "lora_magnitude_vector"}
        return f"{PREFIX}{self.module}.{names.get(self.kind, 'ia3_l')}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensor as PEFT saves it."""
        shapes = {VectorKind.OUTPUT: (self.size, 1), VectorKind.INPUT: (1, self.size)}
        return {self.key: shapes.get(self.kind, (self.size,))}


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Rows of the embedding or of the output head that take the place of the base's."""

    module: str
    key: str
    """The tensor's name in the file; where base and adapter are tied, that of the embedding."""
    num_rows: int
    width: int
    token_ids: tuple[int, ...] | None
    """Whose rows they are, in the file's order; None: every token's."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensor as PEFT saves it."""
        return {self.key: (self.num_rows, self.width)}


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """The base's own matrix, which PEFT saves beside an adapter of the embedding or the head; the file may lack it."""

    module: str
    num_rows: int
    width: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{PREFIX}{self.module}.base_layer.weight"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensor as PEFT saves it."""
        return {self.key: (self.num_rows, self.width)}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """A validated adapter: what its file holds, exactly, in the order of the base's modules."""

    pairs: tuple[LoraPair, ...]
    file_bytes: int
    invocation: tuple[int, ...] | None = None
    """Of an activated LoRA, the token ids from whose last occurrence in a prompt on it serves."""
    vectors: tuple[VectorPart, ...] = ()
    rows: tuple[RowsPart, ...] = ()
    copies: tuple[BaseCopy, ...] = ()
    """Those that the file may hold."""

    @property
    def max_rank(self) -> int:
        """The largest rank of any pair; 0 where there is none."""
        return max((pair.rank for pair in self.pairs), default=0)

    @property
    def parts(self) -> tuple[LoraPair | VectorPart | RowsPart, ...]:
        """Everything that is served."""
        return (*self.pairs, *self.vectors, *self.rows)

    def on(self, modules: Collection[str]) -> AdapterPlan:
        """What of it stands on `modules`."""
        return replace(
            self,
            pairs=tuple(part for part in self.pairs if part.module in modules),
            vectors=tuple(part for part in self.vectors if part.module in modules),
            rows=tuple(part for part in self.rows if part.module in modules),
            copies=tuple(part for part in self.copies if part.module in modules),
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the file must have, as PEFT saves it."""
        return {key: shape for part in self.parts for key, shape in part.shapes.items()}

    @property
    def optional_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the file may have beside them."""
        return {key: shape for copy in self.copies for key, shape in copy.shapes.items()}
