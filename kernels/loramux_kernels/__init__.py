"""Operators of the engine: segmented LoRA, paged attention, packed linears, sampling. They import only torch, and
triton on a GPU.

**Segmented LoRA** (`lora_shrink`, `lora_expand`). A batch mixes rows of many adapters. Rows of one adapter are
contiguous, and `Segments` gives each adapter's rows. The low-rank product y += s * (x A^T) B^T runs as two operators
over all segments at once: shrink projects each row to its adapter's rank, and expand adds the result to the base's
output. Base rows come last and need no computation. Linears that read the same input (q, k, v) form a `LoraGroup` and
share one launch. Sources: Punica's SGMV (Chen et al., 2023) for segments, S-LoRA (Sheng et al., 2023) for unpadded
ranks and adapters in the KV cache's pool.

**One pool.** KV pages and adapters share one flat tensor. A matrix is cut along its rank into tiles of `RANK_TILE`
rows, a tile lies contiguously in one page, and `LoraTable` holds each tile's offset, in elements of the pool.

**Paged attention** (`write_kv`, `paged_attention`). A sequence's KV is in the pages that its row of `block_table`
lists (vLLM, Kwon et al., 2023). One call serves decoding and prefilling sequences alike; a row sees only its own
sequence. Keys and values have the model's dtype or are in FP8 (`e4m3`).

**Between the linears** (`rms_norm`, `rope_write_kv`, `gated`). A step has few rows, so the fixed cost of an operator is
most of its time. Each of these operators is one pass; a framework needs several operators for the same result. On a CPU
the operators of all layers are one call (`DecoderLayers`).

**Packed linears** (`PackedLinear`) hold several weights that read one input as one matrix, in the fastest format of
this machine, or as the codes of a quantized checkpoint (`quantized_weight`).

**Mixtures** (`route`, `grouped_linear`, `combine`). `route` orders rows by expert, `grouped_linear` multiplies each
expert's rows with its weight (`grouped_coded_linear`, if it is quantized), and `combine` adds up the results of each
token. On a GPU each operator is one launch, because the host does not know the chosen experts.

**Fixed products** (`fixed_product`) take the place of torch's if a row's result must not depend on the other rows.

**Sampling** (`sampling`) removes the tokens that a row's constraint does not allow (`forbid_tokens`), then applies
penalties, bias, temperature, top-k, top-p and min-p, and draws a token. A GPU draws by an exponential race (`sample`),
a CPU by one random number for each row (`draw_tokens`).

**States of fixed size** (`linear_attention`): linear attention (`gated_delta`) and Mamba 2 (`mamba2`) keep one matrix
per head instead of keys and values, and the last inputs of a short convolution.

Each paragraph describes one module. An operator has a *Semantics* line, a public function that chooses the
implementation by device (`cuda/`: Triton, `native/`: C++), and the torch reference that every fast path is tested
against. `tables` has the arguments that operators share.
"""
