"""Memory: KV pages, adapter weights, the prefix cache and swapped KV, in one pool of equal pages.

KV is paged as in vLLM (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023): a sequence's tokens lie in pages of `block_size` tokens, which its block table lists in order. Adapters lie
in the same pages, as in S-LoRA's unified paging (Sheng et al., MLSys 2024), each at its true rank. So no memory is set
apart for either: whatever saves least for the pages it takes goes first, and only when room is needed.

What may be evicted is compared in one unit, the time that a page takes over the host link:

- a cached page of KV saves what computing its tokens takes, times its expected uses;
- an idle adapter's page saves its way over the link and a share of the fixed cost of a load, times its expected uses.

Expected uses are counts that decay by half every half-life (`ranking`, after GreedyDual-Size-Frequency, Cherkasova
1998). Only leaves go: KV that nothing builds on, and adapters without cached KV under them.

    memory                   room in the pool: take pages, evict what saves least; pins; KV swapped to the host
    prefix_cache             KV that requests share
    residency                the adapters: inspected, loaded, claimed, pinned, evicted
    pages                    the pool, cached pages, and a sequence's pages
    ranking                  a priority queue whose ranks change under it

`host_memory` (PEFT files on disk, copies of adapters and of KV in the host's memory) needs torch and is known only to
the engine, so that the scheduler and the simulator run without it.
"""
