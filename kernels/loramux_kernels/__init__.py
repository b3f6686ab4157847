"""Operators of the engine: segmented LoRA, paged attention, packed linears; torch (and, on a GPU, triton) only.

One operator, one module: its semantics, the public function that chooses by device, and the torch reference that every
fast path is tested against. Tensors are typed views of one pool of pages; positions in it are element offsets.
"""

from loramux_kernels.kv_cache import AttentionBatch, KvLayer, write_kv, write_kv_reference
from loramux_kernels.lora_expand import lora_expand, lora_expand_reference
from loramux_kernels.lora_shrink import lora_shrink, lora_shrink_reference
from loramux_kernels.packed_linear import PackedLinear, packed_linear_reference
from loramux_kernels.paged_attention import paged_attention, paged_attention_reference
from loramux_kernels.rescale import NO_VECTORS, rescale, rescale_reference
from loramux_kernels.table import RANK_TILE, LoraGroup, LoraTable, Segments

__all__ = [
    "NO_VECTORS",
    "RANK_TILE",
    "AttentionBatch",
    "KvLayer",
    "LoraGroup",
    "LoraTable",
    "PackedLinear",
    "Segments",
    "lora_expand",
    "lora_expand_reference",
    "lora_shrink",
    "lora_shrink_reference",
    "packed_linear_reference",
    "paged_attention",
    "paged_attention_reference",
    "rescale",
    "rescale_reference",
    "write_kv",
    "write_kv_reference",
]
