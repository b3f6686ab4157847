"""A Llama of random weights, ready to serve as the engine serves it, with adapters of random weights resident."""

from __future__ import annotations

import torch
from grid import Grid, Mix, ModelShape
from transformers import AutoModelForCausalLM, LlamaConfig

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import AdapterLimits, EngineSettings, ModelSettings
from loramux.engine.execution.loader import LoadedModel, assemble
from loramux.engine.messages import Request, SamplingParams
from loramux.engine.scheduling.sequence import BASE_SLOT, Chunk, Sequence, Step
from loramux_adapters.base import describe_model
from loramux_adapters.components import AdapterPlan, LoraPair
from loramux_adapters.weights import AdapterWeights, LoraWeights

BLOCK_SIZE = 16


class DoesNotFit(RuntimeError):
    """The pool has too few pages for a cell of the grid."""


def make_model(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' own class, made on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        rope_theta=500_000.0,
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def settings_for(grid: Grid, device: torch.device) -> Settings:
    """Return settings as a server has them, large enough for every cell."""
    longest = max(*grid.contexts, *(length for _, length in grid.prefills)) + 2 * BLOCK_SIZE
    engine = EngineSettings(
        device=str(device),
        max_num_seqs=max(grid.batches),
        max_num_batched_tokens=max(prompts * length for prompts, length in grid.prefills),
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        pool_bytes=None if device.type == "cuda" else 8 << 20,
    )
    limits = AdapterLimits(max_rank=max(rank for mix in grid.mixes for rank in mix.ranks))
    return Settings(model=ModelSettings(path="", served_model_name=grid.model.name), engine=engine, adapters=limits)


class ServingModel:
    """A loaded model, and steps over its pool that no scheduler planned."""

    def __init__(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> None:
        model = make_model(grid.model, device, dtype)
        self.settings = settings_for(grid, device)
        self.loaded: LoadedModel = assemble(model, describe_model(model), self.settings)
        self._grid = grid
        self._slots: dict[int, int] = {}
        self._ranks: tuple[int, ...] = ()
        self._used = 0
        # Real KV is neither zero nor NaN.
        self.loaded.runner.bank.pool.uniform_(-0.1, 0.1)

    @property
    def pages_left(self) -> int:
        """Pages that no adapter holds."""
        return self.loaded.facts.pages_total - self._used

    def step(self, spans: list[tuple[int, int]], mix: Mix) -> Step:
        """A step of (query rows, context) spans whose rows use the adapters of `mix`. Raises DoesNotFit."""
        if mix.ranks != self._ranks:
            self.drop_adapters()
            self._ranks = mix.ranks
        slots = [BASE_SLOT if a < 0 else self._resident(a, mix.rank(a)) for a in mix.slots(len(spans))]
        blocks = [-(-context // BLOCK_SIZE) + 1 for _, context in spans]
        if sum(blocks) > self.pages_left:
            raise DoesNotFit(f"{sum(blocks)} pages of KV, {self.pages_left} left")
        last = self.loaded.facts.pages_total
        chunks = []
        for row, ((count, context), slot) in enumerate(zip(spans, slots, strict=True)):
            sequence = Sequence(_request(row, context, self._grid.model.vocab_size), 0.0)
            last -= blocks[row]
            sequence.pages = list(range(last, last + blocks[row]))
            chunks.append(Chunk(sequence, context - count, count, slot))
        return Step.ordered(chunks)

    def _resident(self, adapter: int, rank: int) -> int:
        """Return the slot of a further adapter with random weights of this rank, made at its first use."""
        if adapter not in self._slots:
            bank = self.loaded.runner.bank
            adapter = bank.prepare(self._weights(rank))
            layout = adapter.layout
            if layout.num_pages > self.pages_left:
                raise DoesNotFit(f"{layout.num_pages} pages of an adapter, {self.pages_left} left")
            pages = list(range(self._used, self._used + layout.num_pages))
            self._slots[adapter] = bank.install(adapter, pages)
            self._used += layout.num_pages
        return self._slots[adapter]

    def drop_adapters(self) -> None:
        """Give all pages back."""
        for slot in self._slots.values():
            self.loaded.runner.bank.drop(slot)
        self._slots, self._used = {}, 0

    def _weights(self, rank: int) -> AdapterWeights:
        """Return weights for every linear. Linears of the same shape have the same values, because only the place of
        weights affects the time.
        """
        dtype, made = self.loaded.runner.bank.pool.dtype, {}
        pairs, modules = [], {}
        for name, shape in self.loaded.base.modules.items():
            key = (shape.in_features, shape.out_features)
            if key not in made:
                a = torch.randn(rank, shape.in_features).mul_(shape.in_features**-0.5).to(dtype)
                made[key] = LoraWeights(a, torch.randn(shape.out_features, rank).mul_(0.01).to(dtype), 1.0)
            pairs.append(LoraPair(name, rank, 1.0, *key))
            modules[name] = made[key]
        return AdapterWeights(AdapterPlan(tuple(pairs), 0), modules)


def _request(number: int, context: int, vocab_size: int) -> Request:
    prompt = torch.randint(3, vocab_size, (context,)).tolist()
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return Request(id=str(number), tenant="bench", prompt_token_ids=prompt, sampling=sampling)
