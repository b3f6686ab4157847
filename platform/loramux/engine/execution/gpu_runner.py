"""Runs steps on a GPU; the host waits for it only when a step's tokens are read.

Steps are replayed from CUDA graphs (see cuda_graphs): decode steps whole, other steps between the embedding and the
head. Only steps of more rows than were recorded are launched operator by operator.

The tokens that a constraint allows depend on the previous token, which the host does not know when it launches a step.
So the tokens of a step with a constrained row are chosen in a separate launch, after the previous step's tokens were
read and while the forward runs. A step without such a row is launched whole.

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
from numpy.typing import NDArray

from loramux.common.sampling import PARAMETERS
from loramux.engine.execution.constraints import Constraints, TokenMasks
from loramux.engine.execution.cuda_graphs import (
    DecodeGraphs,
    DecoderGraphs,
    ReservedAttention,
    choose_recorder,
)
from loramux.engine.execution.device_sampler import DeviceSampler, SampledRows, SampledTokens, TokensInFlight, accepted
from loramux.engine.execution.runner import (
    NONE_POOLED,
    Forward,
    OtherRanks,
    PackedStep,
    PooledVectors,
    Pooler,
    StepGraphs,
    StepInputs,
    pack,
)
from loramux.engine.execution.sampler import NO_SCORES, PromptScores, split_scored
from loramux.engine.execution.step_buffers import StepBuffers
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
    rows: SampledRows
    parameters: dict[str, torch.Tensor]
    """The rows' parameters on the device, valid until the next step is sent."""
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
        return accepted(self.tokens.events(), self.chunks) if self.rows.drafts else self.tokens.events()


class GpuRunner:
    """Launches steps without waiting; tokens that the host does not know yet are taken from the previous launch."""

    runs_ahead = True

    def __init__(
        self,
        forward: Forward,
        sampler: DeviceSampler,
        constraints: Constraints | None,
        buffers: StepBuffers,
        decode_graphs: DecodeGraphs,
        decoder_graphs: DecoderGraphs,
        block_size: int,
        state_pages: int,
    ) -> None:
        self.bank = forward.bank
        self.team: OtherRanks | None = None
        """The other ranks, which run each step's forward too; None if there are none, or if this is not rank 0."""
        self.image_rows: ImageRows[torch.Tensor] | None = None
        self._forward = forward
        self._pooler = Pooler(forward.bank.classifier_of)
        self._sampler = sampler
        self._constraints = constraints
        self._buffers = buffers
        self._decode_graphs = decode_graphs
        self._decoder_graphs = decoder_graphs
        self._block_size = block_size
        self._state_pages = state_pages
        self._previous: SampledTokens | None = None
        whole, decoders = decode_graphs.count, decoder_graphs.count
        self.graphs = StepGraphs(whole.recorded + decoders.recorded, whole.missing + decoders.missing)

    @classmethod
    @torch.inference_mode()
    def build(
        cls,
        forward: Forward,
        sampler: DeviceSampler,
        constraints: Constraints | None,
        limits: StepLimits,
        max_model_len: int,
        block_size: int,
        state_pages: int = 0,
        most_buckets: int | None = None,
    ) -> GpuRunner:
        """Make a runner for steps of `limits`.

        Every kernel is compiled, and every step recorded, before it returns. With `most_buckets` only so many buckets
        of rows are recorded, the largest: enough to measure what recordings take, not to serve.
        """
        device = forward.bank.pool.device
        max_blocks = -(-max_model_len // block_size)
        sequences = limits.max_num_seqs
        sizes = (limits.most_rows, sequences, max_blocks, forward.bank.max_rank)
        buffers = StepBuffers(*sizes, device, state_pages, is_invariant=forward.is_invariant, effects=forward.effects)
        # Before the work lists: the copy of a step reaches from its first array to its last.
        sampler.send_parameters_with(buffers.memory, limits.most_sampled)
        inputs = buffers.padded(1)
        logits = forward(inputs, None)  # makes the work lists, on the host, from lengths on the host
        record = choose_recorder(lambda: forward(inputs, None), device, over_ranks=forward.ranks is not None)
        shapes = attention_shapes(inputs.batch)
        if buffers.sees_ahead:
            ahead = buffers.padded(1, with_ends=True)
            forward(ahead, None)
            shapes = tuple(dict.fromkeys((*shapes, *attention_shapes(ahead.batch))))
        attention = ReservedAttention(shapes, buffers)
        hidden_size = forward.model.config.get_text_config().hidden_size
        decode_graphs = DecodeGraphs(forward, buffers, attention, record, logits, most_buckets)
        decoder_graphs = DecoderGraphs(forward, buffers, attention, record, hidden_size, most_buckets)
        if device.type == "cuda":  # other devices compile no kernels
            warm_up(forward, buffers, sampler, attention.shapes)
        return cls(forward, sampler, constraints, buffers, decode_graphs, decoder_graphs, block_size, state_pages)

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
        if self.team is not None:
            self.team.run(packed)
        rows = SampledRows.of(step.sampling)
        parameters = self._sampler.stage(rows)
        self._forward.keep_hidden(bool(step.pooled))
        try:
            logits, scores = split_scored(self._run(packed, self._pending(step, packed)), packed.scored)
        except RuntimeError as error:
            if self.team is None:
                raise
            raise self.team.explained(error) from error
        pooled = self._pooler.pool(self._forward.take_hidden(), step.pooled) if step.pooled else NONE_POOLED
        launched = LaunchedForward(self, logits, step.sampling, rows, parameters, scores, pooled)
        if not any(sequence.request.constraint for sequence in rows.sequences):
            launched.sample()
        return launched

    @torch.inference_mode()
    def follow(self, packed: PackedStep) -> None:
        """Enqueue this rank's part of a forward that rank 0 launches too."""
        self._run(packed, np.zeros((2, 0), dtype=np.int64))

    def wait_for(self, tokens: TokensInFlight) -> None:
        """Wait until the host has the tokens, if another rank could keep them from coming."""
        if self.team is not None:
            self.team.wait_until(lambda: tokens.have_arrived)

    def _run(self, packed: PackedStep, pending: NDArray[np.int64]) -> torch.Tensor:
        """Enqueue a forward; `StepBuffers.send` explains `pending`. All ranks choose the same recording, because they
        have the same adapters in the same slots."""
        images = self._forward.step_images(packed, self.image_rows)
        inputs = replace(self._buffers.fill(packed), images=images)
        ranks = [] if packed.segments is None else [self.bank.rank_of(slot) for slot in packed.segments.slots]
        extras = self.bank.extras_of(packed.segments, packed.sampled_rows)
        # Recordings read each compressed KV once, and rows of an activated LoRA may need two products for it.
        is_recorded = packed.activations is None
        if packed.decodes and extras is None and images is None and is_recorded:
            run = self._decode_graphs.stage(packed, ranks)
            self._send(packed, inputs, pending)
            return run()
        decode = self._decoder_graphs.stage(packed, ranks, extras, images) if is_recorded else None
        self._send(packed, inputs, pending)
        if decode is None and packed.segments is not None:
            tile_map = TileMap.for_step(
                packed.segments,
                np.array(ranks, dtype=np.int64),
                self.bank.pool.device,
                is_invariant=self._buffers.is_invariant,
            )
            attach_tile_map(packed.segments, tile_map)
        return self._forward(inputs, packed.segments, extras, decode)

    def _send(self, packed: PackedStep, inputs: StepInputs, pending: NDArray[np.int64]) -> None:
        """Send the step to the device. Only rank 0 samples, so the other ranks get the tokens that the host does not
        know from its device: a few bytes, and no state of requests."""
        self._buffers.send(pending, None if self._previous is None else self._previous.tokens)
        if (ranks := self._forward.ranks) is not None and packed.follows_unknown_tokens:
            ranks.broadcast(inputs.input_ids)

    @torch.inference_mode()
    def sample(self, launched: LaunchedForward) -> TokensInFlight:
        """Enqueue the choice of a step's tokens; if a constraint needs the previous step's tokens, they are known
        now."""
        masks = None
        if self._constraints is not None:
            drafts = {chunk.sequence: list(chunk.drafts) for chunk in launched.chunks if chunk.drafts}
            masks = self._constraints.masks([chunk.sequence for chunk in launched.chunks], drafts)
        in_flight = self._sampler.launch(launched.logits, launched.rows, self._previous, masks, launched.parameters)
        self._previous = in_flight.sampled
        return in_flight

    def forget(self, request_id: str) -> None:
        """Drop the request's seed, its sum of hidden states and the state of its constraint."""
        self._sampler.forget(request_id)
        self._pooler.forget(request_id)
        self._buffers.block_tables.forget(request_id)
        if self._constraints is not None:
            self._constraints.forget(request_id)

    def _pending(self, step: Step, packed: PackedStep) -> NDArray[np.int64]:
        """Return int64[2, n]: rows whose token is PENDING, and their rows among the previous step's sampled rows."""
        lasts = packed.cu_seqlens[1:] - 1 - np.array([len(chunk.drafts) for chunk in step.chunks])
        chunks = np.flatnonzero(packed.input_ids[lasts] == PENDING)
        row_of = {} if self._previous is None else self._previous.row_of
        sources = [row_of[step.chunks[number].sequence] for number in chunks.tolist()]
        return np.array((lasts[chunks], sources), dtype=np.int64)


ROWS = 2
EXAMPLES: dict[str, Any] = {name: parameter.example for name, parameter in PARAMETERS.items()}
EVERYTHING = SamplingParams(max_tokens=4, min_tokens=2, logprobs=1, **EXAMPLES)
"""Parameters of a request that uses every one of them, none with a neutral value."""


def warm_up(forward: Forward, buffers: StepBuffers, sampler: DeviceSampler, shapes: Items[AttentionShape]) -> None:
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
    words = np.full((1, -(-logits.shape[1] // 32)), -1, dtype=np.int32)
    sampler.launch(logits, SampledRows(sequences), None, TokenMasks(np.zeros(1, dtype=np.int64), words, {})).events()
    sampler.launch(logits[-1:], SampledRows(sequences[-1:]), None).events()
    for sequence in sequences:
        sampler.forget(sequence.id)


def _sequence(name: str, params: SamplingParams) -> Sequence:
    return Sequence(Request(id=name, tenant="", prompt_token_ids=[0], sampling=params), 0.0)
