"""Runs every kernel once before the first request.

Triton compiles a kernel anew for each combination of its arguments' types, of constants, and of numbers that are 1 or
divisible by 16; each takes seconds, in which no request is served. Recorded steps are compiled when they are recorded.
Here are the others: one forward whose work lists are empty, of every height of tile that a step of many rows may need,
and the choice of tokens with everything that a request may ask for.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from loramux.engine.execution.constraints import TokenMasks
from loramux.engine.execution.cuda_graphs import StepBuffers
from loramux.engine.execution.device_sampler import DeviceSampler
from loramux.engine.execution.runner import Forward
from loramux.engine.request import Request, SamplingParams
from loramux.engine.scheduling.sequence import Sequence
from loramux_adapters.extras import StepExtras
from loramux_kernels import Segments
from loramux_kernels.cuda.attention_plan import AttentionShape, attach_attention, reserve_attention
from loramux_kernels.cuda.tile_map import TileMap, attach_tile_map

ROWS = 2
EVERYTHING = SamplingParams(
    max_tokens=4,
    min_tokens=2,
    temperature=0.7,
    top_k=3,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=1,
)


def warm_up(forward: Forward, buffers: StepBuffers, sampler: DeviceSampler, shapes: Items[AttentionShape]) -> None:
    """Compile what steps launch that are not recorded; `shapes` are the kinds of attention of the model's layers.

    No adapter is installed yet and no page is read or written.
    """
    device = forward.bank.pool.device
    rows = min(ROWS, buffers.max_sequences)
    inputs = buffers.padded(rows)
    for shape in shapes:
        attach_attention(inputs.batch, shape, reserve_attention(shape, 1, 1, 1, device))
    segments = Segments((0, rows), (forward.bank.blank_slot(),))
    attach_tile_map(segments, TileMap.of_every_shape(rows, forward.bank.max_rank, device))
    extras = StepExtras(columns=segments, inputs=segments, norms=segments, embedding=(), head=())
    logits = forward(inputs, segments, extras)
    plain = SamplingParams(max_tokens=4, temperature=0.0)
    sequences = [_sequence(f"warm-up {row}", params) for row, params in enumerate((EVERYTHING, plain))][:rows]
    words = np.full((1, -(-logits.shape[1] // 32)), -1, dtype=np.int32)
    sampler.launch(logits, sequences, None, TokenMasks(np.zeros(1, dtype=np.int64), words, {})).events()
    sampler.launch(logits[-1:], sequences[-1:], None).events()
    for sequence in sequences:
        sampler.forget(sequence.id)


def _sequence(name: str, params: SamplingParams) -> Sequence:
    return Sequence(Request(id=name, tenant="", prompt_token_ids=[0], sampling=params), 0.0)
