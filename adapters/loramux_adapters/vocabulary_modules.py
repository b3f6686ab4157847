"""The base's embedding and output head with the step's adapters: only the rows of those that touch them."""

from __future__ import annotations

import torch
from torch import nn

from loramux_adapters.bank import AdapterBank
from loramux_adapters.base import VocabularyShape
from loramux_adapters.base_weights import BaseWeights, base_linear
from loramux_adapters.experts import install_mixtures
from loramux_adapters.linear import install_linears, replace_module


class AdaptedEmbedding(nn.Module):
    """Stands where the base's embedding stood."""

    def __init__(self, base: nn.Embedding, bank: AdapterBank) -> None:
        super().__init__()
        self.base = base
        self._bank = bank

    @property
    def weight(self) -> torch.Tensor:
        """The base's."""
        return self.base.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[..., T]` to `[..., T, hidden_size]`, the rows of the bank's segments changed by their adapters."""
        y: torch.Tensor = self.base(input_ids)
        if (beyond := self._bank.beyond) is not None and beyond.embedding:
            rows, ids = y.view(-1, y.shape[-1]), input_ids.reshape(-1)
            for part, first, last in beyond.embedding:
                part.change_embeddings(rows[first:last], ids[first:last], self._factor)
        return y

    @property
    def _factor(self) -> torch.Tensor | float:
        """What transformers' scaled embeddings (Gemma 3) multiply their rows by, rounded as they round it."""
        scale = getattr(self.base, "embed_scale", None)
        return 1.0 if scale is None else torch.as_tensor(scale).to(self.weight)


class AdaptedHead(nn.Module):
    """Stands where the base's output head stood."""

    def __init__(self, base: nn.Linear, bank: AdapterBank) -> None:
        super().__init__()
        self.base = base
        self._bank = bank

    @property
    def weight(self) -> torch.Tensor:
        """The base's."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., n, hidden_size]` of the sampled rows to `[..., n, tokens]`."""
        y: torch.Tensor = self.base(x)
        if (beyond := self._bank.beyond) is not None and beyond.head:
            logits, rows = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
            for part, first, last in beyond.head:
                part.change_logits(logits[first:last], rows[first:last])
        return y


def install(model: nn.Module, vocabulary: VocabularyShape | None, bank: AdapterBank) -> BaseWeights:
    """Replace every module of `model` that adapters may touch by one that serves `bank`; what is kept of the base's."""
    linears = install_linears(model, bank)
    install_mixtures(model, bank)
    if vocabulary is None:
        return BaseWeights(linears, {})
    embedding, head = model.get_submodule(vocabulary.embedding), model.get_submodule(vocabulary.head)
    assert isinstance(embedding, nn.Embedding), "described as one"
    assert isinstance(head, nn.Linear), "described as one"
    replace_module(model, vocabulary.embedding, AdaptedEmbedding(embedding, bank))
    replace_module(model, vocabulary.head, AdaptedHead(head, bank))
    linears[vocabulary.head] = base_linear(head, head, slice(None))
    return BaseWeights(linears, {vocabulary.embedding: embedding.weight.data, vocabulary.head: head.weight.data})
