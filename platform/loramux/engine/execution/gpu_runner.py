"""Runs steps on a GPU; the host waits for it only when a step's tokens are read.

Steps are replayed from CUDA graphs (see cuda_graphs): decode steps whole, other steps between the embedding and the
head. Only steps of more rows than were recorded are launched operator by operator.

The tokens that a constraint allows depend on the previous token, which the host does not know when it launches a step.
So the tokens of a step with a constrained row are chosen in separate launches, after the previous step's tokens were
read and while the forward runs. A step without such a row is launched whole: a decode step is one copy to the device,
one replay, and one copy of its tokens to the host.

`warm_up` runs every kernel once before the first request. Triton compiles a kernel anew for each combination of its
arguments' types, of constants, and of numbers that are 1 or divisible by 16; each compilation takes seconds, in which
no request is served. Recorded steps are compiled when they are recorded. `warm_up` compiles the others: one forward
whose work lists are empty, of every height of tile that a step of many rows may need, and the choice of tokens with
every parameter of a request.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from loramux.common.sampling import PARAMETERS
from loramux.engine.execution.constraints import Constraints, TokenMasks
from loramux.engine.execution.cuda_graphs import (
    DecodeGraphs,
    DecoderGraphs,
    ReservedAttention,
    StepEnds,
    choose_recorder,
)
from loramux.engine.execution.device_sampler import (
    NONE_PENDING,
    DeviceSampler,
    PendingTokens,
    SampledRows,
    SampledTokens,
    StagedRows,
    TokensInFlight,
    accepted,
)
from loramux.engine.execution.gpu_head import GpuHead
from loramux.engine.execution.multi_token import HeadDrafter
from loramux.engine.execution.runner import (
    NONE_POOLED,
    Forward,
    OtherRanks,
    PackedStep,
    PooledVectors,
    Pooler,
    StepGraphs,
    pack,
)
from loramux.engine.execution.sampler import NO_SCORES, PromptScores, split_scored
from loramux.engine.execution.step_buffers import StepBuffers
from loramux.engine.execution.vision import StepImages
from loramux.engine.memory.image_rows import ImageRows
from loramux.engine.messages import Request, SamplingParams, StepLimits, TokenEvent
from loramux.engine.scheduling.sequence import PENDING, Chunk, Sequence, Step
from loramux_adapters.bank import StepExtras
from loramux_kernels.cuda.work_lists import (
    AttentionShape,
    TileMap,
    attach_attention,
    attach_states,
    attach_tile_map,
    attention_shapes,
    empty_attention,
    empty_states,
)
from loramux_kernels.tables import Segments


@dataclass(slots=True)
class LaunchedForward:
    """A launched forward, and its tokens once their choice is enqueued."""

    runner: GpuRunner
    logits: torch.Tensor
    """`[rows, vocab]`, valid until the next forward."""
    chunks: list[Chunk]
    """Chunks that yield tokens; a chunk has a row of logits, and one more for each of its drafts."""
    rows: StagedRows
    is_chosen: bool
    """True if the forward was a recorded step that has chosen the tokens too."""
    scores: PromptScores = NO_SCORES
    """Scores of prompts; they and the vectors arrive with the tokens."""
    pooled: PooledVectors = NONE_POOLED
    tokens: TokensInFlight | None = None

    def sample(self) -> None:
        """Enqueue the choice of the tokens, if it is not yet."""
        if self.tokens is None:
            self.tokens = self.runner.sample(self)

    def events(self) -> list[TokenEvent]:
        """Wait for the tokens."""
        assert self.tokens is not None, "they are chosen before they are read"
        self.runner.wait_for(self.tokens)
        events = self.tokens.events()
        if self.rows.sampled.drafts:
            events = accepted(events, self.chunks)
            self.runner.keep_accepted(events)
        return events


class GpuRunner:
    """Launches steps without waiting; tokens that the host does not know yet are taken from the previous launch."""

    runs_ahead = True

    def __init__(
        self,
        forward: Forward,
        constraints: Constraints | None,
        buffers: StepBuffers,
        ends: StepEnds,
        decode_graphs: DecodeGraphs,
        decoder_graphs: DecoderGraphs,
        block_size: int,
        head: GpuHead | None,
    ) -> None:
        self.bank = forward.bank
        self.team: OtherRanks | None = None
        """The other ranks, which run each step's forward too; None if there are none, or if this is not rank 0."""
        self.image_rows: ImageRows[torch.Tensor] | None = None
        self._forward = forward
        self._pooler = Pooler(forward.bank.classifier_of)
        self._sampler = ends.sampler
        self._constraints = constraints
        self._buffers = buffers
        self._ends = ends
        self._decode_graphs = decode_graphs
        self._decoder_graphs = decoder_graphs
        self._block_size = block_size
        self._state_pages = buffers.state_pages
        self._head = head
        self._previous: SampledTokens | None = None
        counts = [decode_graphs.count, decoder_graphs.count, *([] if head is None else [head.count])]
        self.graphs = StepGraphs(sum(one.recorded for one in counts), sum(one.missing for one in counts))

    @classmethod
    @torch.inference_mode()
    def build(  # noqa: PLR0913 - each is a fact that one engine has
        cls,
        forward: Forward,
        eos_token_ids: tuple[int, ...],
        constraints: Constraints | None,
        limits: StepLimits,
        max_model_len: int,
        block_size: int,
        state_pages: int = 0,
        *,
        most_buckets: int | None = None,
        drafter: HeadDrafter | None = None,
    ) -> GpuRunner:
        """Make a runner for steps of `limits`. `drafter` follows them.

        Every kernel is compiled, and every step recorded, before it returns. With `most_buckets` only so many buckets
        of rows are recorded, the largest: enough to measure what recordings take, not to serve.
        """
        device = forward.bank.pool.device
        max_blocks = -(-max_model_len // block_size)
        sequences = limits.max_num_seqs
        buffers = StepBuffers(
            *(limits.most_rows, sequences, max_blocks, forward.bank.max_rank),
            device,
            state_pages,
            is_invariant=forward.is_invariant,
            effects=forward.effects,
        )
        inputs = buffers.padded(1)
        logits = forward(inputs, None)  # makes the work lists, on the host, from lengths on the host
        sampler = None
        if forward.ranks is None or forward.ranks.rank == 0:
            # Before the reserved work lists: the copy of a step reaches from its first array to its last.
            sizes = (limits.most_sampled, sequences, logits.shape[1])
            sampler = DeviceSampler(eos_token_ids, buffers.memory, *sizes, device)
        hidden_size = forward.model.config.get_text_config().hidden_size
        head = None if drafter is None else GpuHead(drafter, buffers, hidden_size)
        ends = StepEnds(buffers, sampler, forward.ranks)
        record = choose_recorder(lambda: forward(inputs, None), device, over_ranks=forward.ranks is not None)
        shapes = attention_shapes(inputs.batch)
        if buffers.sees_ahead:
            ahead = buffers.padded(1, with_ends=True)
            forward(ahead, None)
            shapes = tuple(dict.fromkeys((*shapes, *attention_shapes(ahead.batch))))
        attention = ReservedAttention(shapes, buffers)
        hidden = None if head is None else head.hidden
        decode_graphs = DecodeGraphs(forward, buffers, attention, record, logits, ends, most_buckets, hidden=hidden)
        decoder_graphs = DecoderGraphs(forward, buffers, attention, record, hidden_size, most_buckets)
        if head is not None:
            head.record(record, most_buckets)
        if device.type == "cuda":  # other devices compile no kernels
            if head is not None:
                head.warm_up(attention.shapes)
            warm_up(forward, buffers, sampler, attention.shapes)
        graphs = decode_graphs, decoder_graphs
        return cls(forward, constraints, buffers, ends, *graphs, block_size, head)

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedForward:
        """Enqueue one forward and, unless a constraint needs the previous tokens, the choice of its tokens."""
        packed = pack(
            step,
            self._block_size,
            self._state_pages,
            self._buffers.block_tables,
            effects=self._forward.effects,
            changes_latents=self.bank.changes_latents,
        )
        assert self._sampler is not None, "only rank 0 plans steps"
        rows = self._sampler.stage(
            SampledRows(step.sequences) if step.is_plain else SampledRows.of(step.sampling),
            self._pending(step, packed),
            has_scored_rows=packed.scored is not None,
        )
        images = self._forward.step_images(packed, self.image_rows)
        keeps_hidden = bool(step.pooled) or self._head is not None
        self._forward.keep_hidden(keeps_hidden)
        if self._head is not None:
            self._head.stage(step, packed)
        if self.team is not None:
            self.team.run(packed)  # what may fail on this rank alone comes before: the others would wait for it
        try:
            logits, is_whole = self._run(packed, images)
        except RuntimeError as error:
            if self.team is None:
                raise
            raise self.team.explained(error) from error
        logits, scores = split_scored(logits, packed.scored)
        hidden = self._forward.take_hidden() if keeps_hidden and not is_whole else logits[:0]
        pooled = self._pooler.pool(hidden, step.pooled) if step.pooled else NONE_POOLED
        is_chosen = is_whole and rows.is_recordable
        launched = LaunchedForward(self, logits, step.sampling, rows, is_chosen, scores, pooled)
        if not rows.facts.is_constrained:
            launched.sample()
        if self._head is not None:  # after the choice, because the copy of the tokens waits for what is before it
            self._head.follow(step, packed, None if is_whole else hidden, images)
        return launched

    @torch.inference_mode()
    def follow(self, packed: PackedStep) -> None:
        """Enqueue this rank's part of a forward that rank 0 launches too."""
        self._run(packed, self._forward.step_images(packed, self.image_rows))

    def wait_for(self, tokens: TokensInFlight) -> None:
        """Wait until the host has the tokens, if another rank could keep them from coming."""
        if self.team is not None:
            self.team.wait_until(lambda: tokens.have_arrived)

    def _run(self, packed: PackedStep, images: StepImages | None) -> tuple[torch.Tensor, bool]:
        """Enqueue a forward; return its logits, and True if it was a whole recorded step. All ranks choose the same
        recording, because they have the same adapters in the same slots."""
        inputs = self._buffers.fill(packed)
        if images is not None:
            inputs = replace(inputs, images=images)
        ranks = [] if packed.segments is None else [self.bank.rank_of(slot) for slot in packed.segments.slots]
        extras = self.bank.extras_of(packed.segments, packed.sampled_rows)
        # Recordings read each compressed KV once, and rows of an activated LoRA may need two products for it.
        is_recorded = packed.activations is None
        if packed.decodes and extras is None and images is None and is_recorded:
            run = self._decode_graphs.stage(packed, ranks)
            self._buffers.memory.send()
            return run(), True
        decode = self._decoder_graphs.stage(packed, ranks, extras, images) if is_recorded else None
        self._buffers.memory.send()
        self._ends.begin(inputs.input_ids, follows_unknown_tokens=packed.follows_unknown_tokens)
        if decode is None and packed.segments is not None:
            tile_map = TileMap.for_step(
                packed.segments,
                np.array(ranks, dtype=np.int64),
                self.bank.pool.device,
                is_invariant=self._buffers.is_invariant,
            )
            attach_tile_map(packed.segments, tile_map)
        return self._forward(inputs, packed.segments, extras, decode), False

    @torch.inference_mode()
    def sample(self, launched: LaunchedForward) -> TokensInFlight:
        """Enqueue the choice of a step's tokens; if a constraint needs the previous step's tokens, they are known
        now."""
        masks = None
        if self._constraints is not None and launched.rows.facts.is_constrained:
            drafts = {chunk.sequence: list(chunk.drafts) for chunk in launched.chunks if chunk.drafts}
            masks = self._constraints.masks([chunk.sequence for chunk in launched.chunks], drafts)
        assert self._sampler is not None, "only rank 0 samples"
        in_flight = self._sampler.launch(launched.logits, launched.rows, masks, is_chosen=launched.is_chosen)
        self._previous = in_flight.sampled
        if self._head is not None:
            self._head.sampled = in_flight.sampled
        return in_flight

    def keep_accepted(self, events: list[TokenEvent]) -> None:
        """Take note of the tokens of the latest step, which had drafts."""
        if self._head is not None:
            self._head.drafter.keep_accepted(events)

    def forget(self, request_id: str) -> None:
        """Drop the request's seed, its sum of hidden states and the state of its constraint."""
        assert self._sampler is not None, "only rank 0 has requests"
        self._sampler.forget(request_id)
        self._pooler.forget(request_id)
        self._buffers.block_tables.forget(request_id)
        if self._constraints is not None:
            self._constraints.forget(request_id)

    def _pending(self, step: Step, packed: PackedStep) -> PendingTokens:
        """Return the rows whose token is PENDING, and their rows among the previous step's sampled rows."""
        lasts = packed.cu_seqlens[1:].astype(np.int64) - 1
        if step.has_drafts:
            lasts -= np.array([len(chunk.drafts) for chunk in step.chunks])
        chunks, sequences = np.flatnonzero(packed.input_ids[lasts] == PENDING), step.sequences
        if not len(chunks):
            return NONE_PENDING
        assert self._previous is not None, "the step before has chosen the tokens"
        if len(chunks) < len(sequences):
            sequences = [sequences[number] for number in chunks.tolist()]
        return PendingTokens(sequences, lasts[chunks], self._previous.rows_of(sequences))


ROWS = 2
EXAMPLES: dict[str, Any] = {name: parameter.example for name, parameter in PARAMETERS.items()}
EVERYTHING = SamplingParams(max_tokens=4, min_tokens=2, logprobs=1, **EXAMPLES)
"""Parameters of a request that uses every one of them, none with a neutral value."""


def warm_up(
    forward: Forward, buffers: StepBuffers, sampler: DeviceSampler | None, shapes: Items[AttentionShape]
) -> None:
    """Compile the kernels of steps that are not recorded; `shapes` are the kinds of attention of the model's layers.

    No adapter is installed yet and no page is read or written.
    """
    device = forward.bank.pool.device
    rows = min(ROWS, buffers.max_sequences)
    segments = Segments((0, rows), (forward.bank.blank_slot(),))
    tile_map = TileMap.of_every_shape(rows, forward.bank.max_rank, device, is_invariant=forward.is_invariant)
    attach_tile_map(segments, tile_map)
    extras = StepExtras(columns=segments, inputs=segments, norms=segments, embedding=(), head=())
    for with_ends in (False, True)[: 1 + buffers.sees_ahead]:
        inputs = buffers.padded(rows, with_ends=with_ends)
        for shape in shapes:
            attach_attention(inputs.batch, shape, empty_attention(shape, device))
        if buffers.state_pages:
            attach_states(inputs.batch, empty_states(device))
        logits = forward(inputs, segments, extras)
    if any(layer.has_values_in_keys for layer in forward.layers):  # activated LoRAs may expand a part of such a KV
        batch = replace(inputs.batch, activations=torch.zeros(rows, dtype=torch.int32))
        for part, shape in product(batch.parts, shapes):
            attach_attention(part, shape, empty_attention(shape, device))
        forward(replace(inputs, batch=batch), segments, extras)
    plain = SamplingParams(max_tokens=4, temperature=0.0)
    sequences = [_sequence(f"warm-up {row}", params) for row, params in enumerate((EVERYTHING, plain))][:rows]
    if sampler is None:
        return
    words = np.full((1, -(-logits.shape[1] // 32)), -1, dtype=np.int32)
    masks = TokenMasks(np.zeros(1, dtype=np.int64), words, {})
    for some, own in ((sequences, masks), (sequences[-1:], None)):
        staged = sampler.stage(SampledRows(some), NONE_PENDING)
        buffers.memory.send()
        sampler.launch(logits[-len(some) :], staged, own).events()
    for sequence in sequences:
        sampler.forget(sequence.id)


def _sequence(name: str, params: SamplingParams) -> Sequence:
    return Sequence(Request(id=name, tenant="", prompt_token_ids=[0], sampling=params), 0.0)
