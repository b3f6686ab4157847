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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from loramux.common.settings.file import Settings
from loramux.engine.execution.attention import IMPLEMENTATION, AttentionStep, KvLayout, UnsupportedModel
from loramux.engine.execution.multi_token_checkpoint import StoredHead
from loramux.engine.execution.runner import Forward, PackedStep, decoder_of
from loramux.engine.execution.sharded_checkpoint import files_by_key
from loramux.engine.execution.vision import rotary_positions
from loramux.engine.messages import TokenEvent
from loramux.engine.scheduling.sequence import Sequence, Step
from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base_weights import QuantizedLinear, weight_of
from loramux_adapters.families import LATENT_EXPANSION, family_of, tensors_of_heads
from loramux_adapters.latent import LatentLinear, expands_latents, pass_latents
from loramux_adapters.modules import replace_module
from loramux_kernels.packed_linear import PackedLinear, Packing, as_multiplied
from loramux_kernels.paged_attention import write_kv
from loramux_kernels.tables import AttentionBatch

WAY_OUT = 'set engine.speculation to "ngram" or "off"'


def refuse_head(settings: Settings, config: PretrainedConfig, device: torch.device) -> None:
    """Raise UnsupportedModel if `engine.speculation = "mtp"` cannot be served; nothing but names is read."""
    if settings.engine.speculation != "mtp":
        return
    directory, form = Path(settings.model.path), family_of(config).multi_token
    if form is None or not form.is_served:
        reason = f"the engine serves no head for multi-token prediction of {config.model_type}"
    elif device.type != "cpu":
        reason = "the head drafts on CPUs alone: on a GPU a step is planned before its last token is known on the host"
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


class HeadDrafter:
    """Follows the steps of a CPU's runner with the head, and drafts the tokens after the last ones."""

    def __init__(
        self, head: MultiTokenHead, forward: Forward, layout: KvLayout, pool: torch.Tensor, state_pages: int
    ) -> None:
        self.head = head
        self._forward = forward
        self._decoder: Any = decoder_of(forward.model)
        self._latest_hidden = layout.hidden_states(pool)
        self._block_size = layout.block_size
        self._state_pages = state_pages
        self._hidden = torch.empty(0)
        """Hidden states of the latest step's rows."""
        self._rows: dict[str, tuple[int, int]] = {}
        """The place of the last sampled token, and the row before this token, by request of the latest step."""

    @torch.inference_mode()
    def follow(self, step: Step, packed: PackedStep, hidden: torch.Tensor, sampled: Iterable[TokenEvent]) -> None:
        """Write the keys and values of a step's pairs, from its hidden states `[T, hidden]` and the events of its
        tokens. Pairs of refused drafts are overwritten by later steps, as KV is.
        """
        lengths = np.diff(packed.cu_seqlens)
        starts = packed.context_lens - lengths
        before = np.maximum(starts - 1, 0) // self._block_size
        pages = packed.block_table[np.arange(len(starts)), before]
        previous = torch.cat((hidden[:1], hidden[:-1]))
        known = self._latest_hidden[torch.from_numpy(pages).long()]
        known[torch.from_numpy(starts == 0)] = 0.0  # no pair; a page's earlier contents may be no numbers
        previous[torch.from_numpy(packed.cu_seqlens[:-1]).long()] = known
        embeddings = self._embed(torch.from_numpy(packed.input_ids))
        if (images := self._forward.images) is not None:
            embeddings[images.rows] = images.features[0]
        positions = packed.position_ids if packed.rotary_positions is None else packed.rotary_positions
        joined = self.head.join(embeddings, previous)
        keys, values = self.head.keys_and_values(joined, self._angles(joined, torch.from_numpy(positions)))
        write_kv(keys, values, self._forward.layers[self.head.index], torch.from_numpy(packed.slot_mapping))
        self._note(step, packed, hidden, Counter(event.request_id for event in sampled))

    def _note(self, step: Step, packed: PackedStep, hidden: torch.Tensor, sampled: Counter[str]) -> None:
        """Keep the hidden states that later pairs need; `sampled` counts the tokens of each request."""
        ends = []
        self._hidden, self._rows = hidden, {}
        for first, chunk in zip(packed.cu_seqlens.tolist(), step.chunks, strict=False):
            end = chunk.end - len(chunk.drafts)
            accepted = max(0, sampled[chunk.sequence.id] - 1) if chunk.drafts else 0
            if chunk.num_sampled:
                self._rows[chunk.sequence.id] = end + accepted, first + end + accepted - chunk.start - 1
            # Over states, accepted drafts are computed once more.
            ends.append(end if self._state_pages else end + accepted)
        lasts = np.repeat(np.array(ends), np.diff(packed.cu_seqlens)) - 1
        places = packed.position_ids
        kept = (places == lasts) | ((places < lasts) & ((places + 1) % self._block_size == 0))
        pages = packed.slot_mapping[kept] // self._block_size
        self._latest_hidden[torch.from_numpy(pages)] = hidden[torch.from_numpy(kept)]

    def knows(self, sequence: Sequence) -> bool:
        """Return whether the latest step sampled the last token of `sequence`: only then it can get drafts."""
        place, _ = self._rows.get(sequence.id, (-1, -1))
        return place == len(sequence.token_ids) - 1

    @torch.inference_mode()
    def draft(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return as many drafts of each sequence as are asked for; it must be known and have the pages of all drafts
        but the last."""
        order = sorted(range(len(asked)), key=lambda i: -asked[i][1])  # so that those with further drafts are the first
        sequences, counts = [asked[i][0] for i in order], [asked[i][1] for i in order]
        drafts: list[list[int]] = [[] for _ in asked]
        tokens = torch.tensor([sequence.token_ids[-1] for sequence in sequences])
        hidden = self._hidden[[self._rows[sequence.id][1] for sequence in sequences]]
        for place in range(counts[0]):
            active = sum(count > place for count in counts)
            hidden = self._run(tokens[:active], hidden[:active], sequences[:active], place)
            output = self.head.lm_head or self._forward.model.get_output_embeddings()
            tokens = output(hidden).argmax(-1)
            for i, token in zip(order, tokens.tolist(), strict=False):
                drafts[i].append(token)
        return drafts

    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor, sequences: list[Sequence], ahead: int) -> torch.Tensor:
        """Return g `[n, hidden]` of pairs at the places `ahead` of the sequences' last tokens."""
        places = np.array([len(sequence.token_ids) - 1 + ahead for sequence in sequences])
        tables = _block_table(sequences, self._state_pages)
        pages = tables[np.arange(len(places)), places // self._block_size].astype(np.int64)
        contexts = torch.from_numpy(places.astype(np.int32) + 1)
        batch = AttentionBatch(
            cu_seqlens=torch.arange(len(places) + 1, dtype=torch.int32),
            context_lens=contexts,
            block_table=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(pages * self._block_size + places % self._block_size),
            key_ranges=torch.stack((torch.ones_like(contexts), contexts), dim=1),
        )
        joined = self.head.join(self._embed(tokens), hidden)
        angles = self._angles(joined, torch.from_numpy(_rotary_places(sequences, places)))
        result: torch.Tensor = self.head(joined, angles, AttentionStep(self._forward.layers, batch))
        return result

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


def _block_table(sequences: list[Sequence], state_pages: int) -> NDArray[np.int32]:
    """Return the pages of the sequences' KV, int32[n, most pages]."""
    table = np.zeros((len(sequences), max(len(sequence.pages) for sequence in sequences) - state_pages), dtype=np.int32)
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence.pages) - state_pages] = sequence.pages[state_pages:]
    return table


def _rotary_places(sequences: list[Sequence], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of `places`: int64[n], or int64[3, n] if a sequence has images."""
    if not any(sequence.request.images for sequence in sequences):
        return places
    found = np.tile(places, (3, 1))
    for column, (sequence, place) in enumerate(zip(sequences, places.tolist(), strict=True)):
        if images := sequence.request.images:
            found[:, column : column + 1] = rotary_positions(images, place, place + 1)
    return found
