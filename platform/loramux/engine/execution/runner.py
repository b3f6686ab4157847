"""One step through the model: the step as arrays, one forward pass, and its rows as tokens or as pooled vectors.

A step's chunks are packed one after the other into `[total_tokens]` rows without padding. Rows of one adapter are
contiguous, base rows come last, and `cu_seqlens` says which rows belong to which sequence: the layout of
FlashAttention's variable-length kernels and of Punica's segmented LoRA. transformers sees a batch of one. `Runner` is
the interface through which the pipeline runs steps. `CpuRunner` is here, `GpuRunner` in `gpu_runner`.

**Pooling.** The hidden states of a prompt become one vector, chunk by chunk, in the steps of generating sequences.
`last` is the state of the last token, which causal embedding models read. `classify` puts it through the trained head
of the request's adapter. `mean` is the mean of all states, whose sum is continued from chunk to chunk. A preempted
sequence computes some of its tokens again. The number of summed tokens is kept, so each token is added once.
`token_classify` puts every state through the head; its rows are sent chunk by chunk, so that no event holds more than a
step's tokens. The states are those after the last norm, which the output head reads too: transformers'
`last_hidden_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from loramux.engine.execution.attention import AttentionStep, UnsupportedModel
from loramux.engine.execution.constraints import Constraints, TokenMasks
from loramux.engine.execution.sampler import NO_SCORES, PromptScores, Sampler, ScoredRows, split_scored
from loramux.engine.execution.vision import (
    NO_EFFECTS,
    ImageEffects,
    RowsOfImage,
    StepImages,
    image_row_shape,
    rotary_positions,
    row_ends,
    rows_of_images,
)
from loramux.engine.memory.image_rows import ImageRows
from loramux.engine.messages import EngineFault, TokenEvent
from loramux.engine.scheduling.sequence import BASE_SLOT, PENDING, Chunk, Step
from loramux_adapters.bank import AdapterBank, ResidentClassifier, StepExtras
from loramux_adapters.families import images_of
from loramux_adapters.ranks import Ranks
from loramux_kernels.device import to_host
from loramux_kernels.fixed_product import FixedProducts
from loramux_kernels.tables import AttentionBatch, KvLayer, Segments, StateLayer

Ints = NDArray[np.signedinteger[Any]]
HeadOf = Callable[[int], ResidentClassifier | None]
"""Function that returns the head of the adapter in a slot; None: it is not a classifier."""
_START, _LENGTH, _LAST = attrgetter("start"), attrgetter("length"), itemgetter(-1)
_TOKEN_IDS, _NUM_PROMPT_TOKENS, _ACTIVATION = map(attrgetter, ("token_ids", "num_prompt_tokens", "activation"))
NO_HEAD = EngineFault("not_a_classifier", "The model has no classification head.", field="model")


class LaunchedStep(Protocol):
    """A started step."""

    scores: PromptScores
    """Log probabilities of prompts that the step has computed; read them after `events`."""
    pooled: PooledVectors
    """Results of the prompts of `step.pooled`, as far as they are complete now; read them after `events`."""

    def sample(self) -> None:
        """Start the choice of the step's tokens, if the launch postponed it until the previous step's tokens are
        known."""

    def events(self) -> list[TokenEvent]:
        """Return an event with its token for each of `step.sampling`, and for each accepted draft after it, in row
        order. Waits until the device has them."""


class StepGraphs(NamedTuple):
    """Recordings of steps, of which a GPU's runner has one for each bucket of rows and kind of step."""

    recorded: int = 0
    """Recordings that are CUDA graphs."""
    missing: int = 0
    """Recordings that are calls, because no graph could be made: such steps are slower."""


class StepFollower(Protocol):
    """A reader of each step's hidden states."""

    def follow(self, step: Step, packed: PackedStep, hidden: torch.Tensor) -> None:
        """Read a step's hidden states after the last norm, `[T, hidden]`."""

    def keep_accepted(self, events: Iterable[TokenEvent]) -> None:
        """Take note of the tokens of the step that was followed last."""


class Runner(Protocol):
    """Starts steps, in order."""

    runs_ahead: bool
    """True if a step may be launched before the previous step's tokens were read."""

    bank: AdapterBank
    """Adapters that steps may use."""

    graphs: StepGraphs
    """Its recordings of steps; none on a CPU."""

    image_rows: ImageRows[torch.Tensor] | None
    """Rows of images, if the model reads images."""

    def launch(self, step: Step) -> LaunchedStep:
        """Start a step."""

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step's T rows over S chunks, as arrays on the host."""

    input_ids: Ints
    """int64[T]; PENDING if the host does not know the token yet."""
    position_ids: Ints
    """int64[T]"""
    slot_mapping: Ints
    """int64[T]; page * block_size + offset of each token."""
    cu_seqlens: Ints
    """int32[S + 1]"""
    context_lens: Ints
    """int32[S]; tokens of context after the step."""
    block_table: Ints
    """int32[S, most pages of a sequence], or the rows of a `BlockTableStore`; what follows a sequence's last page is
    never read."""
    state_tables: Ints
    """int32[S, pages of a sequence's recurrent states]; no columns if the model has none; rows as in `block_table`."""
    prompt_lens: Ints
    """int32[S]; tokens of each sequence's prompt."""
    sampled_rows: Ints
    """int64: the rows whose logits are needed, in row order. These are the last own row of each chunk that samples, its
    drafts' rows, and the rows of prompts in `scored`."""
    segments: Segments | None
    """Rows by adapter; None if no row has an adapter."""
    scored: ScoredRows | None = None
    """Rows of prompts whose log probabilities are needed; None if there are none."""
    table_rows: Ints | None = None
    """int64[S]; the row of both tables of each chunk. None: chunk s has row s."""
    rotary_positions: Ints | None = None
    """int64[3, T]; positions by time, height and width. None if no sequence of the step has images, or if the family's
    positions count tokens: all three are then `position_ids`."""
    images: tuple[RowsOfImage, ...] = ()
    """The rows of images."""
    page_changes: PageChanges | None = None
    """Changes of the tables of a `BlockTableStore` since the step before."""
    row_ends: Ints | None = None
    """int32[T]; one past the last position that each row sees. None: each row sees up to itself."""
    activations: Ints | None = None
    """int32[S]; see `AttentionBatch`. None: 0 for each chunk."""
    draft_lens: Ints | None = None
    """int32[S]; see `AttentionBatch`. None: no layer keeps states, or nothing is drafted."""

    @property
    def decodes(self) -> bool:
        """Is every row a separate sequence that samples?"""
        return len(self.input_ids) == len(self.sampled_rows) == len(self.context_lens)

    @property
    def follows_unknown_tokens(self) -> bool:
        """True if a token of the step is known on the device alone."""
        return bool((self.input_ids == PENDING).any())

    def for_other_ranks(self) -> PackedStep:
        """Return the step as the other ranks need it: without parts of the sampler, and without tables that they
        keep."""
        if self.table_rows is None:
            return replace(self, scored=None)
        return replace(self, scored=None, block_table=self.block_table[:0], state_tables=self.state_tables[:0])


class PageChanges(NamedTuple):
    """Changes of block tables."""

    places: Ints
    """int64[n]; elements of the flattened tables."""
    pages: Ints
    """int32[n]; their new values."""


class BlockTableStore(Protocol):
    """Block tables that are kept from step to step."""

    pages: Ints
    """int32[rows, most pages of a sequence]"""

    def rows_of(self, step: Step) -> Ints:
        """Return the row of each chunk's sequence, int64[S], after the row has the sequence's pages."""

    def take_changes(self) -> PageChanges | None:
        """Return the changes since the last call; None if there are none."""


def pack(
    step: Step,
    block_size: int,
    state_pages: int = 0,
    block_tables: BlockTableStore | None = None,
    effects: ImageEffects = NO_EFFECTS,
    changes_latents: Callable[[int], bool] | None = None,
) -> PackedStep:
    """Place the chunks one after the other. The first `state_pages` pages of each sequence hold its states.

    If `block_tables` is given, it holds the step's tables. `effects` are those of images. `changes_latents` returns
    whether the adapter in a slot changes the expansion of a compressed KV; None: no adapter does.
    """
    chunks, sequences = step.chunks, step.sequences
    starts = np.array([*map(_START, chunks)], dtype=np.int64)
    if step.is_plain:
        cu_seqlens = np.arange(len(chunks) + 1, dtype=np.int32)
        lengths, positions = np.ones(len(chunks), dtype=np.int32), starts
        input_ids = [*map(_LAST, map(_TOKEN_IDS, sequences))]
        sampled_rows, scored = cu_seqlens[:-1].astype(np.int64), None
    else:
        lengths = np.array([*map(_LENGTH, chunks)], dtype=np.int32)
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths, dtype=np.int32))).astype(np.int32)
        positions = np.arange(cu_seqlens[-1]) + np.repeat(starts - cu_seqlens[:-1], lengths)
        input_ids = [token for chunk in chunks for token in chunk.token_ids]
        sampled_rows, scored = _sampled_rows(chunks, cu_seqlens)
    if block_tables is None:
        table_rows = None
        held = np.zeros((len(chunks), max(len(c.sequence.pages) for c in chunks)), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            held[row, : len(chunk.sequence.pages)] = chunk.sequence.pages
        block_table = np.ascontiguousarray(held[:, state_pages:])
    else:
        table_rows, held = block_tables.rows_of(step), block_tables.pages
        block_table = held[:, state_pages:]
    owners = np.repeat(np.arange(len(chunks)) if table_rows is None else table_rows, lengths)
    pages = block_table[owners, positions // block_size].astype(np.int64)
    rotary = _rotary_positions(chunks, cu_seqlens, positions) if effects.has_places else None
    images = () if step.is_plain else tuple(_rows_of_images(chunks, cu_seqlens))
    return PackedStep(
        input_ids=np.array(input_ids, dtype=np.int64),
        position_ids=positions,
        slot_mapping=pages * block_size + positions % block_size,
        cu_seqlens=cu_seqlens,
        context_lens=(starts + lengths).astype(np.int32),
        block_table=block_table,
        state_tables=held[:, :state_pages],
        prompt_lens=np.array([*map(_NUM_PROMPT_TOKENS, sequences)], dtype=np.int32),
        sampled_rows=sampled_rows,
        segments=_segments(step),
        scored=scored,
        table_rows=table_rows,
        rotary_positions=rotary,
        images=images,
        page_changes=None if block_tables is None else block_tables.take_changes(),
        row_ends=row_ends(positions, images) if images and effects.sees_ahead else None,
        activations=None if changes_latents is None else _activations(step, changes_latents),
        draft_lens=_draft_lens(chunks) if state_pages and not step.is_plain else None,
    )


def _sampled_rows(chunks: Sequence[Chunk], cu_seqlens: Ints) -> tuple[Ints, ScoredRows | None]:
    """Return the rows whose logits are needed, and those of prompts among them; None if there are none."""
    sampled: list[int] = []
    scored = ScoredRows()
    for end, c in zip(cu_seqlens[1:].tolist(), chunks, strict=True):
        if c.sequence.num_scored < c.sequence.num_prompt_tokens - 1:
            first, last = c.sequence.to_score(c.start, c.end)
            scored.add(c.sequence, first, last, len(sampled))
            sampled += range(end - c.end + first, end - c.end + last)
        sampled += range(end - c.num_sampled, end)
    return np.array(sampled, dtype=np.int64), scored if scored.rows else None


def _draft_lens(chunks: Sequence[Chunk]) -> Ints | None:
    """Return the number of each chunk's drafts; None if there are none."""
    found = np.array([len(chunk.drafts) for chunk in chunks], dtype=np.int32)
    return found if found.any() else None


def _rotary_positions(chunks: Sequence[Chunk], cu_seqlens: Ints, positions: Ints) -> Ints | None:
    """Return the positions by time, height and width of chunks; None if no chunk's sequence has images."""
    if not any(chunk.sequence.request.images for chunk in chunks):
        return None
    rotary = np.tile(positions, (3, 1))
    for first, chunk in zip(cu_seqlens[:-1].tolist(), chunks, strict=True):
        if images := chunk.sequence.request.images:
            rotary[:, first : first + chunk.length] = rotary_positions(images, chunk.start, chunk.end)
    return rotary


def _rows_of_images(chunks: Sequence[Chunk], cu_seqlens: Ints) -> Iterator[RowsOfImage]:
    """Yield the rows of images in chunks."""
    for first, chunk in zip(cu_seqlens[:-1].tolist(), chunks, strict=True):
        if chunk.sequence.request.images:
            yield from rows_of_images(chunk.sequence.request, chunk.start, chunk.end, first)


def _activations(step: Step, changes_latents: Callable[[int], bool]) -> Ints | None:
    """Return the leading tokens of each chunk's sequence that its adapter does not expand; None if all are 0."""
    if not any(map(_ACTIVATION, step.sequences)):
        return None
    found = [
        chunk.sequence.activation or 0 if chunk.slot != BASE_SLOT and changes_latents(chunk.slot) else 0
        for chunk in step.chunks
    ]
    return np.array(found, dtype=np.int32) if any(found) else None


def _segments(step: Step) -> Segments | None:
    runs = [(slot, rows) for slot, rows in step.runs if slot != BASE_SLOT]
    if not runs:
        return None
    ends = np.cumsum([rows for _, rows in runs]).tolist()
    return Segments(cu_seqlens=(0, *ends), slots=tuple(slot for slot, _ in runs))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors that a forward reads, on its device; T rows."""

    input_ids: torch.Tensor
    """int64[T]"""
    position_ids: torch.Tensor
    """int64[T], or int64[3, T] by time, height and width"""
    batch: AttentionBatch
    sampled_rows: torch.Tensor
    """int64: the rows whose logits are needed."""
    images: StepImages | None = None
    """Images of the step; None if it has no rows of images."""


Decode = Callable[[torch.Tensor], torch.Tensor]
"""Function from a step's embeddings `[T, hidden]` to its hidden states after the last norm, `[T, hidden]`."""


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of the model before its head."""
    decoder: nn.Module = model.get_decoder()
    return model.get_submodule("model") if decoder is model else decoder  # a model may call itself its decoder


class Forward:
    """A model whose linears serve `bank` and whose attention reads and writes `layers`."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[KvLayer],
        bank: AdapterBank,
        *,
        is_invariant: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """`is_invariant`: on a GPU, no row's result depends on the other rows of a step. `ranks`: the ranks that share
        the model; None: the model is whole."""
        self.model = model
        self.ranks = ranks
        self.is_invariant = is_invariant
        self.bank = bank
        self.layers = layers
        """Each layer's part of the pool."""
        self.states: Mapping[int, StateLayer] = {}
        """States of the layers with linear attention, by the layer's index."""
        self._decoder: Any = decoder_of(model)
        self._run_decoder: Callable[..., Any] = self._decoder.forward
        self._keeps_hidden = False
        self._hidden: torch.Tensor | None = None
        self._decoder.register_forward_hook(self._keep)
        self.effects = ImageEffects.of(model.config)
        """Changes that images make to a step."""
        self.images: StepImages | None = None
        """Images of the latest step; None if it had no rows of images."""
        depth, hidden_size = image_row_shape(model.config)
        self._no_image_rows = bank.pool.new_empty(depth, 0, hidden_size)
        if images_of(model.config.model_type) is not None:
            self._decoder.register_forward_pre_hook(self._place_images, with_kwargs=True)
        for depth in range(1, 1 + self.effects.num_deep_rows):
            self._decoder.get_submodule(f"layers.{depth - 1}").register_forward_hook(
                partial(self._add_deep_rows, depth)
            )

    def __call__(
        self,
        inputs: StepInputs,
        segments: Segments | None,
        extras: StepExtras | None = None,
        decode: Decode | None = None,
    ) -> torch.Tensor:
        """Return the logits `[len(sampled_rows), vocab]`; wider if an adapter of the step has more tokens.

        `extras` holds the parts of the step's adapters other than LoRA pairs on linears: vectors, biases, vocabulary
        rows. `decode` replaces `hidden_states`; the embedding before it and the head after it are the model's own.
        """
        self.images = inputs.images
        if inputs.images is not None and self.ranks is not None:  # rank 0 alone has the tower
            self.ranks.broadcast(inputs.images.features)
        serving = self.bank.serving(segments, extras, inputs.batch.slot_mapping)
        with self._products(), serving, self._decoding_by(decode):
            logits: torch.Tensor = self.model(
                input_ids=inputs.input_ids[None],
                position_ids=_batch_of_one(inputs.position_ids),
                use_cache=False,
                logits_to_keep=inputs.sampled_rows,
                attention_step=self._attention_step(inputs),
            ).logits[0]
        if extras is not None:
            extras.forbid_unknown(logits, self.bank.num_tokens)
        return logits

    def step_images(self, packed: PackedStep, image_rows: ImageRows[torch.Tensor] | None) -> StepImages | None:
        """Return the images of a step; None if there are none.

        `image_rows` are rank 0's, which alone has the tower. Other ranks get the features when the forward begins.
        """
        if not packed.images:
            return None
        images = StepImages.at(packed.images, self._no_image_rows)
        if self.ranks is None or self.ranks.rank == 0:
            assert image_rows is not None, "requests with images are refused otherwise"
            images.fill(packed.images, image_rows)
        return images

    def _place_images(self, _module: nn.Module, _args: Any, inputs: dict[str, Any]) -> None:
        """Put the rows of images in the place of their placeholders' embeddings."""
        if self.images is not None:
            inputs["inputs_embeds"][0, self.images.rows] = self.images.features[0]

    def _add_deep_rows(self, depth: int, _module: nn.Module, _inputs: Any, hidden: torch.Tensor) -> None:
        """Add the rows of images that belong after the layer number `depth`, counted from 1."""
        if self.images is not None:
            hidden[0, self.images.rows] += self.images.features[depth]

    def hidden_states(
        self, embeddings: torch.Tensor, inputs: StepInputs, segments: Segments | None, extras: StepExtras | None
    ) -> torch.Tensor:
        """Return the hidden states `[T, hidden]`, after the last norm, of `embeddings` `[T, hidden]`, in which images
        have been placed."""
        self.images = inputs.images
        with self._products(), self.bank.serving(segments, extras, inputs.batch.slot_mapping):
            hidden: torch.Tensor = self._run_decoder(
                inputs_embeds=embeddings[None],
                position_ids=_batch_of_one(inputs.position_ids),
                use_cache=False,
                attention_step=self._attention_step(inputs),
                **self._inputs_by_layer(inputs.input_ids),
            ).last_hidden_state[0]
        return hidden

    def _products(self) -> AbstractContextManager[object]:
        return FixedProducts(_refused_product) if self.is_invariant else nullcontext()

    def _inputs_by_layer(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what some models' layers read of each token in addition to its embedding."""
        if not getattr(self._decoder, "hidden_size_per_layer_input", 0):
            return {}
        padding = self.model.config.get_text_config().pad_token_id
        for kind in ("image", "video", "audio"):  # as these models do with placeholders
            if (placeholder := getattr(self.model.config, f"{kind}_token_id", None)) is not None:
                input_ids = input_ids.masked_fill(input_ids == placeholder, padding)
        return {"per_layer_inputs": self._decoder.get_per_layer_inputs(input_ids[None])}

    def _attention_step(self, inputs: StepInputs) -> AttentionStep:
        kept_rows = None if self._keeps_hidden else inputs.sampled_rows
        is_mixed = self.effects.layers_ahead == "in windows" and inputs.batch.row_ends is not None
        causal_batch = inputs.batch.causal if is_mixed else None
        return AttentionStep(self.layers, inputs.batch, self.states, kept_rows, causal_batch)

    @contextmanager
    def _decoding_by(self, decode: Decode | None) -> Iterator[None]:
        """Replace the decoder's own forward by `decode`."""
        if decode is None:
            yield
            return
        # The modules around the decoder differ from family to family: factors and caps of logits, text among images.
        self._decoder.forward = partial(self._call, decode)
        try:
            yield
        finally:
            del self._decoder.forward  # the class's forward again

    def _call(
        self,
        decode: Decode,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> MoeModelOutputWithPast:
        """Compute a call of the decoder; the result has the fields of every family's output."""
        if inputs_embeds is None:
            inputs_embeds = self._decoder.get_input_embeddings()(input_ids)
        assert inputs_embeds is not None, "a decoder gets token ids or embeddings"
        return MoeModelOutputWithPast(last_hidden_state=decode(inputs_embeds[0])[None])

    def keep_hidden(self, keeps: bool) -> None:
        """Set if forwards keep their hidden states from now on."""
        self._keeps_hidden = keeps

    def take_hidden(self) -> torch.Tensor:
        """Return the hidden states `[T, hidden]` that the latest forward kept: the head's inputs, after the last
        norm."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "it was told to keep them"
        return hidden

    def _keep(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._keeps_hidden:
            self._hidden = output.last_hidden_state[0]


def _batch_of_one(positions: torch.Tensor) -> torch.Tensor:
    """Return the positions of a step as transformers takes them: [1, T], or [3, 1, T]."""
    return positions.unsqueeze(-2)


def _refused_product(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"engine.batch_invariant = true, and the model multiplies matrices by {name}: a row's result may then depend "
        "on other rows. Remove the setting."
    )


class PooledChunk(NamedTuple):
    """Numbers that a chunk of a prompt completes."""

    request_id: str
    numbers: torch.Tensor | None
    """float32; None: the request's adapter has no head."""
    tokens: tuple[int, int] | None = None
    """Positions `[first, end)` of the tokens that have a row each; None: the numbers are the whole prompt's."""
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """Numbers of a step's prompts. They are on the host once the step's tokens are."""

    found: list[PooledChunk]

    def events(self) -> list[TokenEvent]:
        """Return an event for each chunk."""
        return [_pooled_event(chunk) for chunk in self.found]


NONE_POOLED = PooledVectors([])


class Pooler:
    """Keeps the sums of incomplete prompts, and makes the vectors of complete ones."""

    def __init__(self, head_of: HeadOf) -> None:
        self._head_of = head_of
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        """Sum and number of leading tokens in it, by request."""

    def pool(self, hidden: torch.Tensor, chunks: Iterable[tuple[int, Chunk]]) -> PooledVectors:
        """Return the numbers that are complete now, without waiting for a GPU.

        *Semantics*: `last`: `hidden[e - 1]`; `classify`: `hidden[e - 1] @ head.T`; `token_classify`:
        `hidden[b:e] @ head.T + bias` of each chunk [b, e); `mean`: `sum(hidden[b:e]) / n` over all chunks [b, e) of the
        n tokens, in float64. `hidden` is `[T, hidden]`, any float dtype; `chunks` come with their first rows. The
        result is float32.
        """
        found = []
        for first, chunk in chunks:
            pooling, rows = chunk.sequence.request.pooling, hidden[first : first + chunk.length]
            if pooling == "mean":
                numbers: torch.Tensor | None = self._mean(chunk, rows).float()
            elif pooling == "last":
                numbers = rows[-1].float()
            else:
                head = self._head_of(chunk.slot)
                read = rows if pooling == "token_classify" else rows[-1:]
                numbers = None if head is None else head.logits(read).flatten()
            if chunk.samples or pooling == "token_classify":
                tokens = (chunk.start, chunk.end) if pooling == "token_classify" else None
                on_host = None if numbers is None else to_host(numbers)
                found.append(PooledChunk(chunk.sequence.id, on_host, tokens, chunk.samples))
        return PooledVectors(found)

    def forget(self, request_id: str) -> None:
        """Drop the sum of a request that has ended."""
        self._sums.pop(request_id, None)

    def _mean(self, chunk: Chunk, rows: torch.Tensor) -> torch.Tensor:
        """Add the rows that are not in the sum yet; return the mean of all rows so far."""
        total, known = self._sums.get(chunk.sequence.id, (None, 0))
        assert chunk.start <= known, "nothing of it is found in the prefix cache"
        new = rows[known - chunk.start :].sum(dim=0, dtype=torch.float64)
        total, known = new if total is None else total + new, max(known, chunk.end)
        self._sums[chunk.sequence.id] = total, known
        return total / known


def _pooled_event(chunk: PooledChunk) -> TokenEvent:
    if chunk.numbers is None:
        return TokenEvent(request_id=chunk.request_id, finish_reason="error", fault=NO_HEAD)
    if not bool(chunk.numbers.isfinite().all()):
        fault = EngineFault("adapter_not_finite", "The model's result for this input is not a finite number.")
        return TokenEvent(request_id=chunk.request_id, finish_reason="error", fault=fault)
    return TokenEvent(
        request_id=chunk.request_id,
        finish_reason="stop" if chunk.is_last else None,
        pooled=chunk.numbers.numpy().tobytes(),
        pooled_tokens=chunk.tokens,
    )


@dataclass(slots=True)
class CompletedStep:
    """A step whose tokens are known."""

    tokens: list[TokenEvent]
    scores: PromptScores = NO_SCORES
    pooled: PooledVectors = NONE_POOLED

    def sample(self) -> None:
        """Do nothing: the tokens are chosen."""

    def events(self) -> list[TokenEvent]:
        """Return the events; never waits."""
        return self.tokens


class OtherRanks(Protocol):
    """The other ranks of an engine, as a runner needs them."""

    def run(self, packed: PackedStep) -> None:
        """Make them run a step's forward."""

    def wait_until(self, has_ended: Callable[[], bool]) -> None:
        """Wait until a GPU has ended a step. Raises an error if a rank has ended, or if the wait is too long."""

    def explained(self, error: Exception) -> Exception:
        """Return the cause of a step's failure: the end of a rank, or else `error`."""


@torch.inference_mode()
def run_forward(
    forward: Forward, packed: PackedStep, image_rows: ImageRows[torch.Tensor] | None = None
) -> torch.Tensor:
    """Run one forward of a step on a CPU; see Forward."""
    batch = AttentionBatch(
        cu_seqlens=torch.from_numpy(packed.cu_seqlens),
        context_lens=torch.from_numpy(packed.context_lens),
        block_table=torch.from_numpy(packed.block_table),
        slot_mapping=torch.from_numpy(packed.slot_mapping),
        state_tables=torch.from_numpy(packed.state_tables),
        draft_lens=None if packed.draft_lens is None else torch.from_numpy(packed.draft_lens),
        prompt_lens=torch.from_numpy(packed.prompt_lens),
        row_ends=None if packed.row_ends is None else torch.from_numpy(packed.row_ends),
        activations=None if packed.activations is None else torch.from_numpy(packed.activations),
    )
    positions = packed.position_ids if packed.rotary_positions is None else packed.rotary_positions
    inputs = StepInputs(
        input_ids=torch.from_numpy(packed.input_ids),
        position_ids=torch.from_numpy(positions),
        batch=batch,
        sampled_rows=torch.from_numpy(packed.sampled_rows),
        images=forward.step_images(packed, image_rows),
    )
    return forward(inputs, packed.segments, forward.bank.extras_of(packed.segments, packed.sampled_rows))


class CpuRunner:
    """Runs each step to its end and samples on the host: on a CPU there is no device that could work at the same
    time."""

    runs_ahead = False
    graphs = StepGraphs()

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        constraints: Constraints | None,
        block_size: int,
        state_pages: int = 0,
        team: OtherRanks | None = None,
        follower: StepFollower | None = None,
    ) -> None:
        """`team`: the other ranks, which run each step's forward too."""
        self.bank = forward.bank
        self._follower = follower
        self._team = team
        self._sampler = sampler
        self._pooler = Pooler(forward.bank.classifier_of)
        self._constraints = constraints
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self.image_rows: ImageRows[torch.Tensor] | None = None
        """Rows of images, if the model reads images."""
        self._forward = forward
        self._block_size = block_size
        self._state_pages = state_pages

    @torch.inference_mode()
    def launch(self, step: Step) -> CompletedStep:
        """Run one forward and choose the tokens of `step.sampling`."""
        packed = pack(
            step,
            self._block_size,
            self._state_pages,
            effects=self._forward.effects,
            changes_latents=self.bank.changes_latents,
        )
        if self._team is not None:
            self._team.run(packed)
        masks = self._start_masks(step.sampling)
        keeps_hidden = bool(step.pooled) or self._follower is not None
        self._forward.keep_hidden(keeps_hidden)
        logits, scores = split_scored(self._run(packed), packed.scored)
        hidden = self._forward.take_hidden() if keeps_hidden else logits[:0]
        pooled = self._pooler.pool(hidden, step.pooled) if step.pooled else NONE_POOLED
        events = self._sampler.sample(logits, step.sampling, masks.result() if masks is not None else None)
        if self._follower is not None:
            self._follower.follow(step, packed, hidden)
            self._follower.keep_accepted(events)
        return CompletedStep(events, scores, pooled)

    def forget(self, request_id: str) -> None:
        """Drop the request's state in sampling, pooling and constraints."""
        self._sampler.forget(request_id)
        self._pooler.forget(request_id)
        if self._constraints is not None:
            self._constraints.forget(request_id)

    def _run(self, packed: PackedStep) -> torch.Tensor:
        try:
            return run_forward(self._forward, packed, self.image_rows)
        except RuntimeError as error:
            if self._team is None:
                raise
            raise self._team.explained(error) from error

    def _start_masks(self, chunks: list[Chunk]) -> Future[TokenMasks | None] | None:
        """Fill the masks on another thread while the model runs."""
        if self._constraints is None or not any(chunk.sequence.request.constraint for chunk in chunks):
            return None
        drafts = {chunk.sequence: list(chunk.drafts) for chunk in chunks if chunk.drafts}
        return self._masking.submit(self._constraints.masks, [chunk.sequence for chunk in chunks], drafts)
