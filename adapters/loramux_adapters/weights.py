"""An adapter's tensors in memory, in the serving dtype, and their layout in pages.

`lay_out` cuts matrices into blocks of rows and packs them into pages, at true ranks and without padding; no block
straddles a page. `load_adapter` reads the tensors that the blocks are copied from.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import torch

from loramux_adapters.base import BaseDescription, VocabularyShape
from loramux_adapters.components import (
    AdapterPlan,
    ClassifierHead,
    LinearVector,
    LoraPair,
    Repeat,
    TokenRows,
    VectorKind,
)
from loramux_adapters.errors import AdapterRejected, WeightsFileRejected
from loramux_adapters.families import reads_other_inputs
from loramux_adapters.plan import WEIGHTS_NAME, PlanLimits, plan_adapter, read_config
from loramux_adapters.weights_file import SafetensorsHeader, TensorInfo, read_header
from loramux_kernels.tables import RANK_TILE

ALIGNMENT = 64
"""Alignment in bytes: a cache line, which is a multiple of every vector load."""

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class MatrixKind(enum.Enum):
    """Role of a matrix in its module."""

    A = "A of a pair"
    B = "B of a pair"
    COLUMNS = "a factor and a shift for each output"
    INPUTS = "a factor and a shift for each input"
    NORM = "the weight of a norm"
    ROWS = "rows of the embedding or the head that take the place of the base's"
    CLASSIFIER = "a linear of a classifier's head, with its bias as the last column"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of an adapter in the pool, `[rows, width]`."""

    module: str
    kind: MatrixKind
    rows: int
    width: int
    transposed: bool = False
    """True if the matrix is stored as the transposed tensor of AdapterWeights."""
    fills_pages: bool = False
    """True if each block fills a page, so that a division finds a row: for the embedding and the head, which are read
    by token. Other matrices are cut into rank tiles, which may be at any place."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[start, start + rows)` of a matrix, at `offset` elements into the `page`-th page."""

    matrix: Matrix
    start: int
    rows: int
    page: int
    offset: int

    @property
    def size(self) -> int:
        """Elements of the block."""
        return self.rows * self.matrix.width

    @property
    def tile(self) -> int:
        """Index of its rank tile in the matrix."""
        return self.start // RANK_TILE


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Every block of an adapter (a matrix's blocks in order) and the number of pages they fill."""

    blocks: tuple[Block, ...]
    num_pages: int
    num_bytes: int
    """Bytes of weights, without the bytes lost to alignment and at page ends."""


@dataclass(slots=True)
class _OpenPage:
    number: int
    used: int = 0


def rows_per_page(width: int, page_elements: int) -> int:
    """Return the rows of a block of a matrix that fills pages."""
    return page_elements // width


def lay_out(matrices: Sequence[Matrix], page_elements: int, itemsize: int) -> AdapterLayout:
    """Pack `matrices`: first the matrices that fill pages, then the others first-fit by size, so that no block crosses
    the border of a page.

    Raises AdapterRejected (`page_too_small`) when one block is larger than a page.
    """
    step = max(1, ALIGNMENT // itemsize)
    wanted = [cut for matrix in matrices for cut in _cut(matrix, page_elements)]
    wanted.sort(key=lambda cut: (not cut[0].fills_pages, -cut[2] * cut[0].width, cut[1]))
    blocks: list[Block] = []
    pages: list[_OpenPage] = []
    for matrix, start, rows in wanted:
        size = rows * matrix.width
        fits = (p for p in pages if not matrix.fills_pages and p.used + size <= page_elements)
        page = next(fits, None)
        if page is None:
            pages.append(page := _OpenPage(len(pages)))
        blocks.append(Block(matrix, start, rows, page.number, page.used))
        page.used += -(-size // step) * step
    num_bytes = sum(block.size for block in blocks) * itemsize
    return AdapterLayout(tuple(blocks), len(pages), num_bytes)


def _cut(matrix: Matrix, page_elements: int) -> Iterator[tuple[Matrix, int, int]]:
    """Yield (matrix, first row, rows) of each block."""
    height = rows_per_page(matrix.width, page_elements) if matrix.fills_pages else RANK_TILE
    if min(max(height, 1), matrix.rows) * matrix.width > page_elements:
        raise AdapterRejected(
            "page_too_small",
            None,
            f"{min(max(height, 1), matrix.rows)} rows of {matrix.width} elements, of {matrix.module}, do not fit a "
            f"page of {page_elements} elements; ask the operator for a larger engine.block_size.",
        )
    for start in range(0, matrix.rows, height):
        yield matrix, start, min(height, matrix.rows - start)


def matrices_of(plan: AdapterPlan, vocabulary: VocabularyShape | None) -> Iterator[Matrix]:
    """Yield the matrices of a plan that steps read: the matrices of linears in rank tiles, and the matrices of
    embedding and head row by row. Those of modules that read images are read outside of steps (`tower`).
    """
    head = vocabulary.head if vocabulary else None
    embedding = vocabulary.embedding if vocabulary else None
    for pair in plan.pairs:
        if reads_other_inputs(pair.module):
            continue
        if pair.module == embedding:
            yield from _embedding_pair(pair)
        elif pair.module == head:
            yield from _head_pair(pair)
        else:
            yield Matrix(pair.module, MatrixKind.A, pair.rank, pair.in_features)
            yield Matrix(pair.module, MatrixKind.B, pair.rank, pair.out_features, transposed=True)
    # All vectors of a linear's outputs become one pair of columns.
    vectors = (vector for vector in plan.vectors if not reads_other_inputs(vector.module))
    yield from dict.fromkeys(_vector(vector, of_head=vector.module == head) for vector in vectors)
    for part in plan.rows:
        yield Matrix(part.module, MatrixKind.ROWS, part.served_rows, part.width, fills_pages=True)
    for linear in () if plan.classifier is None else plan.classifier.linears:
        width = linear.in_features + linear.has_bias
        yield Matrix(linear.module, MatrixKind.CLASSIFIER, linear.out_features, width, fills_pages=True)


def _embedding_pair(pair: LoraPair) -> Iterator[Matrix]:
    yield Matrix(pair.module, MatrixKind.A, pair.in_features, pair.rank, transposed=True, fills_pages=True)
    yield Matrix(pair.module, MatrixKind.B, pair.rank, pair.out_features, transposed=True, fills_pages=True)


def _head_pair(pair: LoraPair) -> Iterator[Matrix]:
    yield Matrix(pair.module, MatrixKind.A, pair.rank, pair.in_features, fills_pages=True)
    yield Matrix(pair.module, MatrixKind.B, pair.out_features, pair.rank, fills_pages=True)


def _vector(vector: LinearVector, of_head: bool) -> Matrix:
    if vector.kind is VectorKind.NORM:
        return Matrix(vector.module, MatrixKind.NORM, 1, vector.size)
    kind = MatrixKind.INPUTS if vector.kind is VectorKind.INPUT else MatrixKind.COLUMNS
    if of_head:
        return Matrix(vector.module, kind, vector.size, 2, transposed=True, fills_pages=True)
    return Matrix(vector.module, kind, 2, vector.size)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One module's pair: `y += scale * (x @ a.T) @ b.T`. Contiguous, on the CPU."""

    a: torch.Tensor
    """`[rank, in_features]`"""
    b: torch.Tensor
    """`[out_features, rank]`"""
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """All tensors of an adapter, by the name of the base's module; on the CPU."""

    plan: AdapterPlan
    modules: Mapping[str, LoraWeights]
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[2, out_features]`: a factor for each output of base and pair together, and a shift that is added afterwards."""
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[2, in_features]`: a factor and a shift for each input."""
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[n, hidden_size]`: rows of the embedding or the head, in the order of the token ids."""
    magnitudes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[out_features]`: DoRA's magnitudes; fit_to_base turns them into columns."""
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[out_features]`: biases that replace the base's; fit_to_base turns them into shifts of columns."""
    norms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[1, width]`: weights that replace those of norms."""
    classifier: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[out_features, in_features]` of each linear of a classifier's head; one column more if it has a bias."""
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[tokens, hidden_size]`: PEFT's copies of the base's matrices; fit_to_base compares them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        others = (self.columns, self.inputs, self.rows, self.magnitudes, self.biases, self.norms, self.copies)
        tensors = [tensor for mapping in (*others, self.classifier) for tensor in mapping.values()]
        tensors += [tensor for pair in self.modules.values() for tensor in (pair.a, pair.b)]
        return sum(tensor.nbytes for tensor in tensors)

    def matrix(self, matrix: Matrix) -> torch.Tensor:
        """Return the tensor of `matrix`, `[matrix.rows, matrix.width]`."""
        match matrix.kind:
            case MatrixKind.A:
                found = self.modules[matrix.module].a
            case MatrixKind.B:
                found = self.modules[matrix.module].b
            case MatrixKind.COLUMNS:
                found = self.columns[matrix.module]
            case MatrixKind.INPUTS:
                found = self.inputs[matrix.module]
            case MatrixKind.ROWS:
                found = self.rows[matrix.module]
            case MatrixKind.NORM:
                found = self.norms[matrix.module]
            case MatrixKind.CLASSIFIER:
                found = self.classifier[matrix.module]
        return found.T if matrix.transposed else found


def load_adapter(directory: Path, base: BaseDescription, limits: PlanLimits, dtype: torch.dtype) -> AdapterWeights:
    """Read the adapter in `directory` as `dtype`, after all checks that do not read its weights.

    validate_adapter proved at upload that the weights are finite. This function only refuses an overflow of the
    conversion to `dtype` (`weights_overflow`). Raises AdapterRejected.
    """
    config, path = read_config(directory), directory / WEIGHTS_NAME
    header = read_header(path)
    return read_weights(path, header, plan_adapter(config, header, base, limits), dtype)


def read_weights(path: Path, header: SafetensorsHeader, plan: AdapterPlan, dtype: torch.dtype) -> AdapterWeights:
    """Read the tensors of `header` as `dtype`; `plan` describes the same tensors. Raises WeightsFileRejected."""
    with path.open("rb") as file:
        tensors = {name: _read(file, name, info, dtype) for name, info in header.tensors.items()}
    for repeat in plan.repeats:
        if repeat.key in tensors:
            _check_repeat(repeat, tensors)
    pairs = {
        pair.module: LoraWeights(*pair.share(tensors[pair.a_key], tensors[pair.b_key]), pair.scale)
        for pair in plan.pairs
    }
    return AdapterWeights(
        plan,
        pairs,
        columns=_columns(plan, tensors),
        inputs={module: factor_only(v) for module, v in _vectors(plan, tensors, VectorKind.INPUT).items()},
        rows={part.module: _in_order(part, _rows(part, tensors)) for part in plan.rows},
        magnitudes=_vectors(plan, tensors, VectorKind.MAGNITUDE),
        biases=_vectors(plan, tensors, VectorKind.BIAS),
        norms={module: vector[None] for module, vector in _vectors(plan, tensors, VectorKind.NORM).items()},
        classifier={} if plan.classifier is None else _head(plan.classifier, tensors),
        copies={copy.module: tensors[copy.key] for copy in plan.copies if copy.key in tensors},
    )


def _head(head: ClassifierHead, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the head's linears, each with its bias as the last column."""
    return {
        linear.module: torch.cat((tensors[linear.key], tensors[linear.bias_key][:, None]), dim=1)
        if linear.has_bias
        else tensors[linear.key]
        for linear in head.linears
    }


def _check_repeat(repeat: Repeat, tensors: Mapping[str, torch.Tensor]) -> None:
    key, original, transposed = repeat
    own = tensors[original].T if transposed else tensors[original]
    if torch.equal(tensors[key], own):
        return
    reason = "; which of them counts?"
    if transposed:
        reason = ", transposed, because ensure_weight_tying is set. If each was trained by itself, set it to false."
    raise WeightsFileRejected("copy_differs", key, f"{key} must equal {original}{reason}")


def factor_only(vector: torch.Tensor) -> torch.Tensor:
    """Return `[2, n]`: first the factors, which are `vector` `[n]`, then the shifts, which are all zero."""
    return torch.stack((vector, torch.zeros_like(vector)))


def _vectors(plan: AdapterPlan, tensors: Mapping[str, torch.Tensor], kind: VectorKind) -> dict[str, torch.Tensor]:
    return {part.module: tensors[part.key].flatten() for part in plan.vectors if part.kind is kind}


def _columns(plan: AdapterPlan, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    columns = {module: factor_only(v) for module, v in _vectors(plan, tensors, VectorKind.OUTPUT).items()}
    for part in plan.vectors:
        if part.kind is VectorKind.LORA_BIAS:
            bias = tensors[part.key]
            columns[part.module] = torch.stack((torch.ones_like(bias), part.scale * bias))
    return columns


def _rows(part: TokenRows, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return all rows of `part`, with copied rows last."""
    if part.copied is None:
        return tensors[part.key]
    copied = tensors[part.copied.key][torch.tensor(part.copied.token_ids)]
    return torch.cat((tensors[part.key], copied)) if part.key else copied


def _in_order(part: TokenRows, rows: torch.Tensor) -> torch.Tensor:
    """Order the rows by token id, so that a token's row is found by bisection."""
    return rows if part.served_ids is None else rows[torch.tensor(part.served_ids).argsort()]


def _read(file: BufferedReader, name: str, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    tensor = read_tensor(file, info)
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not torch.isfinite(converted).all():
        raise WeightsFileRejected(
            "weights_overflow",
            name,
            f"{name} holds values beyond what {dtype} can express, in which this server runs its base.",
        )
    return converted


def read_tensor(file: BufferedReader, info: TensorInfo) -> torch.Tensor:
    """Read a tensor of a checked file, as saved, on the CPU. Raises WeightsFileRejected (`weights_truncated`)."""
    # Read, not mapped as the safetensors library does: a file that shrinks under a mapping kills the process.
    data = torch.empty(info.end - info.start, dtype=torch.uint8)
    file.seek(info.start)
    if file.readinto(data.numpy().data) != len(data):
        raise WeightsFileRejected("weights_truncated", None, "The file became shorter while it was read.")
    return data.view(DTYPES[info.dtype]).view(info.shape)
