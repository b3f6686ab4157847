"""Memory: KV pages, adapter weights, the prefix cache and swapped KV, in one pool of equal pages.

KV is paged as in vLLM (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023): a sequence's tokens are in pages of `block_size` tokens, which its block table lists in order. Adapters are
in the same pages, each at its true rank, as in S-LoRA's unified paging (Sheng et al., MLSys 2024). So neither KV nor
adapters have a reserved part of memory. The content that saves the least time per page is evicted first, and only when
pages are needed.

All savings are compared in one unit, the time to copy a page over the host link:

- a cached page of KV saves the time to compute its tokens, times its expected uses;
- a cached state (of layers with linear attention or Mamba 2) saves the tokens since an earlier one, over its pages;
- a page of an idle adapter saves its copy over the link and a share of the fixed cost of a load, times expected uses.

Expected uses are counts that decay by half every half-life (`ranking`, after GreedyDual-Size-Frequency, Cherkasova
1998). Only leaves are evicted: KV that no other KV builds on, adapters without cached KV under them, and cached states.

    memory                   room in the pool: take pages, evict what saves least; pins; KV swapped to the host
    prefix_cache             KV and states that requests share
    residency                the adapters: inspected, loaded, claimed, pinned, evicted
    pages                    the pool, cached pages, and a sequence's pages
    ranking                  a priority queue for ranks that change while an item is queued

`host_memory` (PEFT files on disk, copies of adapters and of KV in the host's memory) needs torch. Only the engine
imports it, so the scheduler and the simulator run without torch.
"""
