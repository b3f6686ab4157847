"""Components of an adapter's file: the module of each component, its tensors' names and their shapes."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from loramux_adapters.families import reads_other_inputs

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."


class Repeat(NamedTuple):
    """A tensor that the file may hold once more."""

    key: str
    original: str
    """Name of the tensor that the copy must equal."""
    transposed: bool = False
    """True if the copy equals the transposed original."""


class PairNames(NamedTuple):
    """PEFT's names of A and B after the module's name."""

    a: str
    b: str


LINEAR_PAIR = PairNames("lora_A.weight", "lora_B.weight")
EMBEDDING_PAIR = PairNames("lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapted module: `y += scale * (x @ A.T) @ B.T`, A `[rank, in_features]` and B `[out_features, rank]`.

    For an embedding x is one-hot: in_features are the tokens.
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
        """Shapes of both tensors in PEFT's file."""
        return {self.a_key: (self.rank, self.in_features), self.b_key: (self.out_features, self.rank)}

    def share(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both tensors of the file whole, because they belong only to this pair."""
        return a, b


@dataclass(frozen=True, slots=True)
class ExpertPair(LoraPair):
    """One expert's share of a pair on a parameter (`target_parameters`)."""

    holder: str = ""
    """Name of the parameter's module in the file."""
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
        """Shapes of both tensors in PEFT's file, for all experts."""
        ranks = self.rank * self.num_experts
        return {self.a_key: (ranks, self.in_features), self.b_key: (self.out_features, ranks)}

    def share(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one expert's A and B: PEFT orders A's rows by expert, then rank; B's columns by rank, then expert."""
        rows = a.view(self.num_experts, self.rank, -1)[self.expert]
        return rows, b.view(-1, self.rank, self.num_experts)[:, :, self.expert].contiguous()


@dataclass(frozen=True, slots=True)
class TiedPair(LoraPair):
    """The output head's pair if `ensure_weight_tying` makes it the embedding's: A is the embedding's B transposed, and
    B its A transposed."""

    embedding: str = ""
    """The embedding's name."""

    @property
    def a_key(self) -> str:
        """The embedding's B `[in_features, rank]`."""
        return f"{PREFIX}{self.embedding}.{EMBEDDING_PAIR.b}"

    @property
    def b_key(self) -> str:
        """The embedding's A `[rank, out_features]`."""
        return f"{PREFIX}{self.embedding}.{EMBEDDING_PAIR.a}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of both tensors in PEFT's file for the embedding."""
        return {self.a_key: (self.in_features, self.rank), self.b_key: (self.rank, self.out_features)}

    @property
    def repeats(self) -> tuple[Repeat, Repeat]:
        """Second copies of the pair's tensors, which PEFT saves under the head's own name."""
        own = LoraPair(self.module, self.rank, self.scale, self.in_features, self.out_features)
        return Repeat(own.a_key, self.a_key, transposed=True), Repeat(own.b_key, self.b_key, transposed=True)

    def share(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the head's A and B, contiguous."""
        return a.T.contiguous(), b.T.contiguous()


class VectorKind(enum.Enum):
    """Effect of a vector v on a linear `y = x @ W.T + bias`."""

    LORA_BIAS = "y += scale * v"
    MAGNITUDE = "DoRA: v becomes the length of the rows of W + scale * B @ A"
    OUTPUT = "IA3: y *= v"
    INPUT = "IA3 in a feed-forward module: x *= v"
    BIAS = "v replaces the bias"
    NORM = "the module is a norm, and v replaces its weight"


@dataclass(frozen=True, slots=True)
class LinearVector:
    """One vector of one linear or norm."""

    module: str
    kind: VectorKind
    size: int
    """out_features; in_features of an INPUT; the width of a NORM."""
    scale: float = 1.0
    """Factor of a LORA_BIAS."""
    wrapped: bool = False
    """True for a BIAS whose linear has a pair too, so that PEFT saves the bias as its base layer's."""

    @property
    def key(self) -> str:
        """Name of the tensor in the file."""
        names = {
            VectorKind.LORA_BIAS: "lora_B.bias",
            VectorKind.MAGNITUDE: "lora_magnitude_vector",
            VectorKind.BIAS: "base_layer.bias" if self.wrapped else "bias",
            VectorKind.NORM: "weight",
        }
        return f"{PREFIX}{self.module}.{names.get(self.kind, 'ia3_l')}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the tensor in PEFT's file."""
        shapes = {VectorKind.OUTPUT: (self.size, 1), VectorKind.INPUT: (1, self.size)}
        return {self.key: shapes.get(self.kind, (self.size,))}


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of tokens that were added before training: PEFT's copy of the matrix has them, and this base lacks them."""

    key: str
    """The copy's name in the file."""
    token_ids: tuple[int, ...]
    num_tokens: int
    """Rows of the copy."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of the embedding or of the output head that replace the base's, or follow them."""

    module: str
    key: str
    """The tensor's name in the file; if base and adapter are tied, one name for embedding and head. Empty: all rows are
    in `copied`."""
    num_rows: int
    width: int
    token_ids: tuple[int, ...] | None
    """Token ids of the rows, in the file's order; None: every token."""
    copied: CopiedRows | None = None
    """Further rows, from a copy."""

    @property
    def served_ids(self) -> tuple[int, ...] | None:
        """Token ids of all rows: those of the tensor, then the copied ones; None: every token."""
        if self.token_ids is None or self.copied is None:
            return self.token_ids
        return (*self.token_ids, *self.copied.token_ids)

    @property
    def served_rows(self) -> int:
        """The number of all rows."""
        return self.num_rows if self.served_ids is None else len(self.served_ids)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors as PEFT saves them."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.key:
            shapes[self.key] = self.num_rows, self.width
        if self.copied is not None:
            shapes[self.copied.key] = self.copied.num_tokens, self.width
        return shapes


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """The base's own matrix, which PEFT may save with an adapter."""

    module: str
    num_rows: int
    width: int
    name: str = "weight"
    """PEFT's name after the module's name, which shows the wrapping of the module."""

    @property
    def key(self) -> str:
        """Name of the tensor in the file."""
        return f"{PREFIX}{self.module}.{self.name}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the tensor in PEFT's file."""
        return {self.key: (self.num_rows, self.width)}


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A linear of a classifier's head: `x @ W.T + b`, W `[out_features, in_features]`."""

    module: str
    out_features: int
    in_features: int
    has_bias: bool

    @property
    def key(self) -> str:
        """Name of the weight in the file."""
        return f"{PREFIX}{self.module}.weight"

    @property
    def bias_key(self) -> str:
        """Name of the bias in the file."""
        return f"{PREFIX}{self.module}.bias"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in PEFT's file."""
        shapes: dict[str, tuple[int, ...]] = {self.key: (self.out_features, self.in_features)}
        return shapes | {self.bias_key: (self.out_features,)} if self.has_bias else shapes


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """The trained head of a classifier of texts (task type SEQ_CLS) or of tokens (TOKEN_CLS).

    It reads one hidden state of a text, or each.
    """

    linears: tuple[HeadLinear, ...]
    """One linear; encoders may have several, with an activation between them."""

    @property
    def module(self) -> str:
        """Name of the last linear."""
        return self.linears[-1].module

    @property
    def num_labels(self) -> int:
        """Classes that the head knows."""
        return self.linears[-1].out_features

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in PEFT's file."""
        return {key: shape for linear in self.linears for key, shape in linear.shapes.items()}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """A validated adapter: the exact components of its file, in the order of the base's modules."""

    pairs: tuple[LoraPair, ...]
    file_bytes: int
    invocation: tuple[int, ...] | None = None
    """Token ids of an activated LoRA, which is active from their last occurrence in a prompt on."""
    vectors: tuple[LinearVector, ...] = ()
    rows: tuple[TokenRows, ...] = ()
    copies: tuple[BaseCopy, ...] = ()
    """Copies that the file may hold."""
    repeats: tuple[Repeat, ...] = ()
    """Tensors that the file may hold once more."""
    num_tokens: int | None = None
    """Rows of the embedding and the head, if the adapter was not trained with the base's number of rows."""
    classifier: ClassifierHead | None = None
    absent: tuple[str, ...] = ()
    """Targeted modules without any tensor in the file. Such modules keep the base's result, as in PEFT (B starts at 0).
    """

    @property
    def max_rank(self) -> int:
        """The largest rank of a pair; 0 without pairs."""
        return max((pair.rank for pair in self.pairs), default=0)

    @property
    def changes_tower(self) -> bool:
        """True if the adapter changes modules that read images."""
        return any(reads_other_inputs(part.module) for part in self.components)

    @property
    def images_refused(self) -> str | None:
        """Reason why prompts with images are refused with the adapter; None if they are served."""
        parts = [part for part in self.components if reads_other_inputs(part.module)]
        if parts and self.invocation is not None:
            return (
                f"The adapter is an activated LoRA that changes {parts[0].module}, a part of the model that reads "
                f"images, where no tokens activate it. Send text alone, or train the adapter on the language model's "
                f"modules."
            )
        for part in parts:
            is_vector = isinstance(part, LinearVector) and part.kind is not VectorKind.NORM
            if not (is_vector or isinstance(part, LoraPair)):
                return (
                    f"The adapter replaces {part.module}, in the part of the model that reads images; there this "
                    f"server serves changes of linears alone. Send text alone, or train the adapter without that "
                    f"module."
                )
        return None

    @property
    def components(self) -> tuple[LoraPair | LinearVector | TokenRows | ClassifierHead, ...]:
        """All components that are served."""
        heads = () if self.classifier is None else (self.classifier,)
        return (*self.pairs, *self.vectors, *self.rows, *heads)

    def on(self, modules: Collection[str]) -> AdapterPlan:
        """Return the part of the plan that concerns `modules`."""
        return replace(
            self,
            pairs=tuple(part for part in self.pairs if part.module in modules),
            vectors=tuple(part for part in self.vectors if part.module in modules),
            rows=tuple(part for part in self.rows if part.module in modules),
            classifier=self.classifier if self.classifier and self.classifier.module in modules else None,
            copies=tuple(part for part in self.copies if part.module in modules),
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the file must have, as PEFT saves it."""
        return {key: shape for part in self.components for key, shape in part.shapes.items()}

    @property
    def optional_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the file may have in addition."""
        copies = {key: shape for copy in self.copies for key, shape in copy.shapes.items()}
        shapes = self.shapes
        repeated = {key: shapes[original][:: -1 if transposed else 1] for key, original, transposed in self.repeats}
        return copies | repeated
