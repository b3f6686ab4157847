"""The base's own head for multi-token prediction (MTP) as a source of drafts.

Some bases are published with one more decoder layer, which was trained to predict the token after the next one
(arXiv 2412.19437). transformers leaves its weights out. With x the tokens and h the hidden states after the base's last
norm, the head computes

    u[t] = fc(concat(norm_e(embedding(x[t])), norm_h(h[t - 1])))         a pair for each t >= 1
    g[t] = norm(layer(u[t]))                                             attends to the pairs 1 .. t
    x'[t + 1] = argmax(lm_head(g[t]))                                    the first draft, if x[t] is the last token

and each further draft from its own output: g[t] in the place of h[t], and x'[t + 1] in the place of x[t + 1]. Embedding
and output head are the base's, without adapters, unless the checkpoint has others for the head; the hidden states are
those of the row's own adapter.

**Memory.** The pair t takes the place of token t in the head's keys and values, which are one more layer of the pages.
So they depend on the tokens up to t alone, as all KV does, and the prefix cache, swap and preemption keep them like
that of any layer. Place 0 holds no pair and is never read. A page ends with the hidden state of its latest computed
token, because the pair after a page needs it: also in another sequence, which found the page in the prefix cache.

**Work.** In each step the head computes the keys and values of the step's rows, and neither queries nor experts
(`follow`). The whole layer runs only when the scheduler wants drafts (`draft`). Angles are those of place t, not t - 1:
attention by rotated heads depends on distances alone.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from loramux.common.settings.file import Settings
from loramux.engine.execution.attention import IMPLEMENTATION, AttentionStep, KvLayout, UnsupportedModel
from loramux.engine.execution.multi_token_checkpoint import StoredHead
from loramux.engine.execution.runner import Forward, Ints, PackedStep, decoder_of
from loramux.engine.execution.sharded_checkpoint import files_by_key
from loramux.engine.execution.vision import StepImages, rotary_positions
from loramux.engine.messages import TokenEvent
from loramux.engine.scheduling.sequence import Chunk, Sequence, Step
from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base_weights import QuantizedLinear, weight_of
from loramux_adapters.experts import multiply_on_gpu
from loramux_adapters.families import EXPERT_PARAMETERS, LATENT_EXPANSION, family_of, tensors_of_heads
from loramux_adapters.latent import LatentLinear, expands_latents, pass_latents
from loramux_adapters.modules import replace_module
from loramux_kernels.device import runs_triton, to_device
from loramux_kernels.packed_linear import PackedLinear, Packing, as_multiplied
from loramux_kernels.paged_attention import write_kv
from loramux_kernels.tables import AttentionBatch, KvLayer

WAY_OUT = 'set engine.speculation to "ngram" or "off"'


def refuse_head(settings: Settings, config: PretrainedConfig) -> None:
    """Raise UnsupportedModel if `engine.speculation = "mtp"` cannot be served; nothing but names is read."""
    if settings.engine.speculation != "mtp":
        return
    directory, form = Path(settings.model.path), family_of(config).multi_token
    if form is None or not form.is_served:
        reason = f"the engine serves no head for multi-token prediction of {config.model_type}"
    elif settings.engine.tensor_parallel_size > 1:
        reason = "ranks do not divide the head: engine.tensor_parallel_size = 1 serves it"
    elif not tensors_of_heads(config, files_by_key(directory)):
        location = form.location.format(layers=config.get_text_config().num_hidden_layers)
        reason = (
            f"{directory} has no weights of a head for multi-token prediction ({location}), which a fine-tuned or "
            "merged checkpoint often lacks; give one that has them"
        )
    else:
        return
    raise UnsupportedModel(f'engine.speculation = "mtp", and {reason}, or {WAY_OUT}.')


class MultiTokenHead(nn.Module):
    """The parts of the head that are its own, with the names to which families' tables map those of checkpoints."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Make the head of transformers' modules for `model`, which still has its own modules."""
        super().__init__()
        decoder: Any = decoder_of(model)
        own = copy.deepcopy(decoder.config)
        index, self.index = 0, own.num_hidden_layers
        if (kinds := getattr(own, "layer_types", None)) is not None:
            index = kinds.index("full_attention")
            own.layer_types = [*kinds, kinds[index]]
        if (kinds := getattr(own, "mlp_layer_types", None)) is not None:
            own.mlp_layer_types = [*kinds, "sparse"]
        own.mlp_only_layers, own.decoder_sparse_step = [], 1
        own._attn_implementation = IMPLEMENTATION
        own._experts_implementation = "eager"  # others need rows of whole cache lines
        norm, hidden = type(decoder.norm), own.hidden_size
        self.pre_fc_norm_embedding = norm(hidden, eps=own.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=own.rms_norm_eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([type(decoder.layers[index])(own, self.index)])
        self.norm = norm(hidden, eps=own.rms_norm_eps)
        self.embed_tokens: nn.Embedding | None = None
        """The head's own embedding; None: the base's."""
        self.lm_head: nn.Module | None = None
        """The head's own output head; None: the base's."""
        pass_latents(self)

    @classmethod
    def load(cls, model: PreTrainedModel, directory: Path) -> MultiTokenHead:
        """Read the head of `model` from the checkpoint in `directory`. Raises UnsupportedModel."""
        stored, vocabulary = StoredHead.of(directory), model.config.get_text_config().vocab_size
        with torch.device("meta"):
            head = cls(model)
            if "embed_tokens.weight" in stored.places:
                head.embed_tokens = nn.Embedding(vocabulary, head.fc.out_features)
            if "lm_head.weight" in stored.places:
                head.lm_head = nn.Linear(head.fc.out_features, vocabulary, bias=False)
        decoder: Any = decoder_of(model)
        linears = {name: module for name, module in head.named_modules() if isinstance(module, nn.Linear)}
        coded = stored.coded & linears.keys()
        for name in coded:
            replace_module(head, name, stored.read_codes(name, linears[name]))
        # Some families keep routers in float32.
        dtypes = {f"layers.0.{name}": tensor.dtype for name, tensor in decoder.layers[-1].state_dict().items()}
        found = stored.read(dtypes, model.dtype, without=coded)
        form = family_of(model.config).multi_token
        if form is not None and form.ends_with_base_norm:
            found["norm.weight"] = decoder.norm.weight.detach().clone()
        wanted = {name: tensor.shape for name, tensor in head.state_dict().items()}
        wrong = {
            name for name in wanted.keys() | found.keys() if name not in found or found[name].shape != wanted.get(name)
        }
        if wrong:
            names = ", ".join(sorted(wrong)[:3])
            raise UnsupportedModel(
                f'engine.speculation = "mtp", and in {directory} the head for multi-token prediction has other weights '
                f"than this family's ({names}): heads of several layers, and quantized experts, are not served; "
                f"{WAY_OUT}."
            )
        head.load_state_dict(found, assign=True)
        return head.eval().requires_grad_(False)

    def pack(self, packing: Packing, bank: AdapterBank) -> None:
        """Hold the linears as the base's are held; `bank` serves no adapter while the head runs."""
        for module in [*self.modules()]:
            for name, linear in [*module.named_children()]:
                if not isinstance(linear, nn.Linear | QuantizedLinear):
                    continue
                if name == LATENT_EXPANSION and expands_latents(module):
                    weight, site = weight_of(linear), Site(0, linear.in_features, linear.out_features)
                    weight = as_multiplied(weight, packing.quantization)
                    setattr(module, name, LatentLinear(weight, module, site, bank))
                else:
                    setattr(module, name, _Packed(linear, packing))
            if all(isinstance(getattr(module, name, None), nn.Parameter) for name in EXPERT_PARAMETERS):
                multiply_on_gpu(module)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        packed = sum(module.linear.num_bytes for module in self.modules() if isinstance(module, _Packed))
        return packed + sum(parameter.nbytes for parameter in self.parameters())

    def join(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return u of pairs of embeddings and hidden states, `[n, hidden]` each."""
        parts = (self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden))
        joined: torch.Tensor = self.fc(torch.cat(parts, dim=-1))
        return joined

    def keys_and_values(
        self, joined: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values `[n, heads, dim]` of pairs `[n, hidden]`."""
        layer: Any = self.layers[0]
        attention = layer.self_attn
        x, operators = layer.input_layernorm(joined), sys.modules[type(attention).__module__]
        if expands_latents(attention):
            rank = attention.kv_lora_rank
            compressed = attention.kv_a_proj_with_mqa(x)
            is_interleaved = attention.config.rope_interleave
            rotate = operators.apply_rotary_pos_emb_interleave if is_interleaved else operators.apply_rotary_pos_emb
            rotated = compressed[None, None, :, rank:]
            key = torch.cat(
                (attention.kv_a_layernorm(compressed[:, :rank]), rotate(rotated, rotated, *angles)[1][0, 0]), -1
            )
            return key[:, None], key[:, None, :rank]
        key, value = (
            project(x).unflatten(-1, (-1, attention.head_dim)) for project in (attention.k_proj, attention.v_proj)
        )
        keys = (attention.k_norm(key) if hasattr(attention, "k_norm") else key).transpose(0, 1)[None]
        return operators.apply_rotary_pos_emb(keys, keys, *angles)[1][0].transpose(0, 1), value

    def forward(
        self, joined: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor:
        """Return g of pairs `[n, hidden]`, after their keys and values were written."""
        layer = self.layers[0]
        out: torch.Tensor = layer(joined[None], position_embeddings=angles, attention_mask=None, attention_step=step)
        normed: torch.Tensor = self.norm(out[0])
        return normed


class _Packed(nn.Module):
    """A linear in the format of the base's."""

    def __init__(self, linear: nn.Linear | QuantizedLinear, packing: Packing) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.data
        self.linear = PackedLinear([weight_of(linear)], [bias], *packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


ROW_BEFORE, NO_PAIR, NO_PAGE = -1, -2, -1
"""Values of `PairRows`."""


@dataclass(frozen=True, slots=True)
class PairRows:
    """A step's pairs, one for each of its T rows, on the device."""

    token_ids: torch.Tensor
    """int64[T]"""
    positions: torch.Tensor
    """int64[T], or int64[3, T] by time, height and width."""
    slots: torch.Tensor
    """int64[T]; the place of each pair's keys and values. Negative on a GPU: a row that only pads the step."""
    sources: torch.Tensor
    """int64[T]; the page that holds the hidden state before the row's token. ROW_BEFORE: it is that of the row before.
    NO_PAIR: the token is a sequence's first one."""
    kept_in: torch.Tensor
    """int64[T]; the page that is to hold the row's own hidden state, or NO_PAGE."""


class StepTables(Protocol):
    """Tokens and tables of sequences of the latest step, on the device."""

    def last_tokens(self, sequences: list[Sequence]) -> torch.Tensor:
        """Return the last token of each sequence, int64[n], also if the host does not know it yet."""

    def block_tables(self, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `block_table` and `table_rows` of an `AttentionBatch` of the sequences, with all their pages."""


class HostTables:
    """The tables of a CPU."""

    def __init__(self, state_pages: int) -> None:
        self._state_pages = state_pages

    def last_tokens(self, sequences: list[Sequence]) -> torch.Tensor:
        """Return the last tokens, which the host knows."""
        return torch.tensor([sequence.token_ids[-1] for sequence in sequences])

    def block_tables(self, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a row of pages for each sequence."""
        first, most = self._state_pages, max(len(sequence.pages) for sequence in sequences)
        table = np.zeros((len(sequences), most - first), dtype=np.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.pages) - first] = sequence.pages[first:]
        return torch.from_numpy(table), None


class HeadDrafter:
    """Follows the steps of a runner with the head, and drafts the tokens after the last ones."""

    def __init__(
        self, head: MultiTokenHead, forward: Forward, layout: KvLayout, pool: torch.Tensor, state_pages: int
    ) -> None:
        self.head = head
        self.tables: StepTables = HostTables(state_pages)
        self._forward = forward
        self._decoder: Any = decoder_of(forward.model)
        self._latest_hidden = layout.hidden_states(pool)
        self._block_size = layout.block_size
        self._state_pages = state_pages
        self._device = pool.device
        self._hidden = torch.empty(0)
        """Hidden states of the latest step's rows."""
        self._rows: dict[str, tuple[int, int, int]] = {}
        """First and one past the last position of the rows of each request that got a token in the latest step, and
        its first row."""
        self._drafted: list[tuple[Chunk, int]] = []
        """Chunks of the latest step with drafts that are not computed again, and their first rows."""
        self._slots: Ints = np.zeros(0, dtype=np.int64)
        """Slots of the latest step's rows."""

    def places_of(self, step: Step, packed: PackedStep) -> tuple[Ints, Ints]:
        """Return `sources` and `kept_in` of a step's rows, as if all drafts were refused."""
        firsts, lengths = packed.cu_seqlens[:-1], np.diff(packed.cu_seqlens)
        starts, places = packed.context_lens - lengths, packed.position_ids
        tables = np.arange(len(starts)) if packed.table_rows is None else packed.table_rows
        sources = np.full(len(places), ROW_BEFORE, dtype=np.int64)
        pages = packed.block_table[tables, np.maximum(starts - 1, 0) // self._block_size]
        sources[firsts] = np.where(starts == 0, NO_PAIR, pages)
        ends = packed.context_lens - np.array([len(chunk.drafts) for chunk in step.chunks])
        lasts = np.repeat(ends, lengths) - 1
        is_kept = (places == lasts) | ((places < lasts) & ((places + 1) % self._block_size == 0))
        return sources, np.where(is_kept, packed.slot_mapping // self._block_size, NO_PAGE)

    def follow(self, step: Step, packed: PackedStep, hidden: torch.Tensor) -> None:
        """Compute a step's pairs from its hidden states `[T, hidden]`, on a CPU."""
        positions = packed.position_ids if packed.rotary_positions is None else packed.rotary_positions
        arrays = (packed.input_ids, positions, packed.slot_mapping, *self.places_of(step, packed))
        self.write(PairRows(*map(torch.from_numpy, arrays)), hidden, self._forward.images)
        self.note(step, packed, hidden)

    @torch.inference_mode()
    def write(self, rows: PairRows, hidden: torch.Tensor, images: StepImages | None = None) -> None:
        """Write the keys and values of pairs, and keep hidden states `[T, hidden]`. Pairs of refused drafts are
        overwritten by later steps, as KV is.
        """
        sources = rows.sources[:, None]
        previous = torch.cat((hidden[:1], hidden[:-1]))
        previous = torch.where(sources >= 0, self._latest_hidden[rows.sources.clamp(min=0)], previous)
        previous = previous.masked_fill(sources == NO_PAIR, 0.0)
        embeddings = self._embed(rows.token_ids)
        if images is not None:
            embeddings[images.rows] = images.features[0]
        joined = self.head.join(embeddings, previous)
        keys, values = self.head.keys_and_values(joined, self._angles(joined, rows.positions))
        write_kv(keys, values, self._forward.layers[self.head.index], rows.slots)
        self.keep(hidden, rows.kept_in)

    def keep(self, hidden: torch.Tensor, pages: torch.Tensor) -> None:
        """Store hidden states `[n, hidden]` in their pages, if they have any."""
        if not runs_triton(hidden):  # a CPU's operator stores every row
            hidden, pages = hidden[pages >= 0], pages[pages >= 0]
        rows, ends = hidden[:, None], self._latest_hidden[:, None, None]
        write_kv(rows, rows, KvLayer(ends, ends, has_values_in_keys=True), pages)

    def note(self, step: Step, packed: PackedStep, hidden: torch.Tensor) -> None:
        """Remember the rows of a step for the drafts after it; its hidden states stay valid until the next step."""
        self._hidden, self._slots = hidden, packed.slot_mapping
        chunks = list(zip(step.chunks, packed.cu_seqlens.tolist(), strict=False))
        self._rows = {one.sequence.id: (one.start, one.end, first) for one, first in chunks if one.num_sampled}
        self._drafted = [] if self._state_pages else [pair for pair in chunks if pair[0].drafts]

    @torch.inference_mode()
    def keep_accepted(self, events: Iterable[TokenEvent]) -> None:
        """Keep the hidden states of accepted drafts, from the events of the latest step's tokens. Over states, accepted
        drafts are computed once more."""
        if not self._drafted:
            return
        tokens = Counter(event.request_id for event in events)
        rows = []
        for chunk, first in self._drafted:
            begin = chunk.end - len(chunk.drafts)
            last = begin + tokens[chunk.sequence.id] - 2
            kept = (place for place in range(begin, last + 1) if place == last or (place + 1) % self._block_size == 0)
            rows += [first + place - chunk.start for place in kept]
        if rows:
            pages = to_device(self._slots[rows] // self._block_size, self._device)
            self.keep(self._hidden[to_device(np.array(rows), self._device)], pages)

    def knows(self, sequence: Sequence) -> bool:
        """Return whether the latest step sampled the last token of `sequence`: only then it can get drafts."""
        start, end, _ = self._rows.get(sequence.id, (0, 0, 0))
        return start <= len(sequence.token_ids) - 2 < end

    @torch.inference_mode()
    def draft(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return as many drafts of each sequence as are asked for; it must be known and have the pages of all drafts
        but the last. The host waits for a GPU once, after all drafts."""
        order = sorted(range(len(asked)), key=lambda i: -asked[i][1])  # so that those with further drafts are the first
        sequences, counts = [asked[i][0] for i in order], [asked[i][1] for i in order]
        tokens = self.tables.last_tokens(sequences)
        table, table_rows = self.tables.block_tables(sequences)
        rows = [self._row_before(sequence) for sequence in sequences]
        hidden, found = self._hidden[to_device(np.array(rows), self._device)], []
        for ahead in range(counts[0]):
            active = sum(count > ahead for count in counts)
            batch = self._batch(sequences[:active], ahead, table, None if table_rows is None else table_rows[:active])
            positions = to_device(_rotary_places(sequences[:active], ahead), self._device)
            hidden, tokens = self.predict(tokens[:active], hidden[:active], positions, batch)
            found.append(tokens)
        drafts: list[list[int]] = [[] for _ in asked]
        whole = iter(torch.cat(found).tolist())
        for tokens in found:
            for i, token in zip(order[: len(tokens)], whole, strict=False):
                drafts[i].append(token)
        return drafts

    def _row_before(self, sequence: Sequence) -> int:
        """Return the latest step's row before the last token of `sequence`."""
        start, _, first = self._rows[sequence.id]
        return first + len(sequence.token_ids) - 2 - start

    def _batch(
        self, sequences: list[Sequence], ahead: int, table: torch.Tensor, table_rows: torch.Tensor | None
    ) -> AttentionBatch:
        """Return the batch of a row of each sequence, `ahead` of its last token."""
        places = [len(sequence.token_ids) - 1 + ahead for sequence in sequences]
        size, first = self._block_size, self._state_pages
        pages = [one.pages[first + place // size] for one, place in zip(sequences, places, strict=True)]
        slots = np.array(pages, dtype=np.int64) * size + np.array(places) % size
        contexts = torch.tensor(places, dtype=torch.int32) + 1
        return AttentionBatch(
            cu_seqlens=torch.arange(len(places) + 1, dtype=torch.int32),
            context_lens=contexts,
            block_table=table if table_rows is not None else table[: len(places)],
            slot_mapping=to_device(slots, self._device),
            table_rows=table_rows,
            is_invariant=self._forward.is_invariant,
            key_ranges=torch.stack((torch.ones_like(contexts), contexts), dim=1),
        )

    def predict(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return g `[n, hidden]` of the pairs of `tokens` and `hidden`, and the tokens that it predicts."""
        joined = self.head.join(self._embed(tokens), hidden)
        result: torch.Tensor = self.head(
            joined, self._angles(joined, positions), AttentionStep(self._forward.layers, batch)
        )
        output = self.head.lm_head or self._forward.model.get_output_embeddings()
        return result, output(result).argmax(-1)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings without adapters, `[n, hidden]`; a token that an adapter has added gets that of another
        token."""
        known = token_ids.clamp(max=self._forward.bank.num_tokens - 1)
        matrix = self.head.embed_tokens or self._decoder.get_input_embeddings()
        return functional.embedding(known, matrix.weight)

    def _angles(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions `[n]`, or `[3, n]` by time, height and width."""
        found: tuple[torch.Tensor, torch.Tensor] = self._decoder.rotary_emb(
            rows[None], positions.expand(3, -1)[:, None] if self._forward.effects.has_places else positions[None]
        )
        return found


def _rotary_places(sequences: list[Sequence], ahead: int) -> NDArray[np.int64]:
    """Return the positions of the places `ahead` of the sequences' last tokens: int64[n], or int64[3, n] if a sequence
    has images."""
    places = np.array([len(sequence.token_ids) - 1 + ahead for sequence in sequences])
    if not any(sequence.request.images for sequence in sequences):
        return places
    found = np.tile(places, (3, 1))
    for column, (sequence, place) in enumerate(zip(sequences, places.tolist(), strict=True)):
        if images := sequence.request.images:
            found[:, column : column + 1] = rotary_positions(images, place, place + 1)
    return found
