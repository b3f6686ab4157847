"""Operators of the engine: segmented LoRA, paged attention, packed linears, sampling. torch, and on a GPU triton, only.

**Segmented LoRA** (`lora_shrink`, `lora_expand`). A batch mixes rows of many adapters. Rows of one adapter are
contiguous, and `Segments` gives each adapter's rows. The low-rank product y += s * (x A^T) B^T runs as two operators
over all segments at once: shrink takes each row to its adapter's rank, expand adds the result to the base's output.
Base rows come last and cost nothing. Linears that read the same input (q, k, v) form a `LoraGroup` and share one
launch. Sources: Punica's SGMV (Chen et al., 2023) for segments, S-LoRA (Sheng et al., 2023) for unpadded ranks and
adapters in the KV cache's pool.

**One pool.** KV pages and adapters share one flat tensor. A matrix is cut along its rank into tiles of `RANK_TILE`
rows, a tile lies contiguously in one page, and `LoraTable` holds each tile's offset, in elements of the pool.

**Paged attention** (`write_kv`, `paged_attention`). A sequence's KV lies in pages that its row of `block_table` lists
(vLLM, Kwon et al., 2023). One call serves decoding and prefilling sequences alike; a row sees its own sequence only.
Keys and values are of the model's dtype or in FP8 (`e4m3`).

**Between the linears** (`rms_norm`, `rope_write_kv`, `gated`). Each is one pass over few rows, where a framework's
operators are several, and an operator's own cost is most of the time. On a CPU the operators of all layers are one
call (`DecoderLayers`).

**Packed linears** (`PackedLinear`) hold several weights that read one input as one matrix, in the fastest format
at hand, or as the codes of a quantized checkpoint (`quantized_weight`).

**Mixtures** (`route`, `grouped_linear`, `combine`). Rows are ordered by expert, each expert's multiplied with its
weight, and the results added up by token; on a GPU in one launch each, for which the host knows no choice.

**Sampling** (`sampling`) removes the tokens that a row's constraint does not allow (`forbid_tokens`), applies
penalties, bias, temperature, top-k, top-p and min-p, and draws a token: on a GPU by an exponential race (`sample`), on
a CPU by one number a row (`draw_tokens`).

**Linear attention** (`gated_delta`) keeps one matrix a head in the place of keys and values; in torch everywhere.

One module for each paragraph. An operator has a *Semantics* line, the public function that chooses the implementation
by device (`cuda/`: Triton, `native/`: C++), and the torch reference that every fast path is tested against. What
operators share is in `tables`.
"""
