// What the operators of LoRA share: which rows meet which adapters, and how the work is cut among the threads.
#pragma once

#include <cstring>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"
#include "tiles.hpp"

namespace loramux {

constexpr int RANK_TILE = 16;

struct Segments {
    int64_t count;
    const int64_t *rows, *slots;
    explicit Segments(const int64_t* packed) : count(packed[0]), rows(packed + 1), slots(packed + 2 + packed[0]) {}
};

// Linears, or the heads of one linear, whose matrix then has rows of `row` elements; a head has some of their columns.
struct Group {
    int64_t count, first, step, row;
    const int64_t *sites, *starts;
    explicit Group(const int64_t* packed)
        : count(packed[0]), first(packed[1]), step(packed[2]), row(packed[3]), sites(packed + 4),
          starts(packed + 4 + packed[0]) {}
    int64_t column(int64_t site) const { return first + site * step; }
    int64_t row_of(int64_t width) const { return row ? row : width; }
    // Where a site's outputs begin in a row of y.
    int64_t output(int64_t site, int64_t y_site) const { return row ? site * y_site : starts[site]; }
};

inline int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// A (segment, site) pair that has something to compute, and where it lies.
struct Pair {
    int64_t site;  // within the group
    int64_t first_row, rows, rank;
    const int64_t* offsets;
    float scale;
};

template <class Visit>
void for_each_pair(const Segments& segments, const Group& group, const LoraTableAbi& table, const int64_t* offsets,
                   const Visit& visit) {
    for (int64_t k = 0; k < segments.count; k++)
        for (int64_t i = 0; i < group.count; i++) {
            int64_t cell = segments.slots[k] * table.num_sites + group.sites[i];
            int64_t first = segments.rows[k], rows = segments.rows[k + 1] - first;
            if (table.ranks[cell] && rows)
                visit(Pair{i, first, rows, table.ranks[cell], offsets + cell * table.max_tiles, table.scales[cell]});
        }
}

struct Work {
    int64_t units, each;
};

// Runs units of equal cost within a pair; each thread takes a contiguous share of the whole cost. `start` says where a
// unit's weights begin, for `run` is told where the next one's do: nothing else could fetch them in time.
template <class Cost, class Start, class Run>
void share_out(const Segments& segments, const Group& group, const LoraTableAbi& table, const int64_t* offsets,
               int threads, const Cost& cost, const Start& start, const Run& run) {
    int64_t total = 0;
    for_each_pair(segments, group, table, offsets, [&](const Pair& p) { total += cost(p).units * cost(p).each; });
    on_threads(threads_for(total, threads), [&](int thread, int team) {
        int64_t at = 0, from = share(total, thread, team), to = share(total, thread + 1, team);
        Pair pair{};
        int64_t unit = -1;
        for_each_pair(segments, group, table, offsets, [&](const Pair& p) {
            auto [units, each] = cost(p);
            int64_t begin = at < from ? blocks(from - at, each) : 0, end = at < to ? blocks(to - at, each) : 0;
            for (int64_t next = begin; next < end && next < units; next++) {
                if (unit >= 0) run(pair, unit, start(p, next));
                pair = p;
                unit = next;
            }
            at += units * each;
        });
        if (unit >= 0) run(pair, unit, start(pair, unit));
    });
}

// Columns whose sums are finished together.
template <class T>
inline constexpr int STRIP = 16;

// A strip of sums, weighted, onto y.
template <class T>
inline void finish(T* y, const float* sums, float scale) { store(y, fused(load(y), splat(scale), load(sums))); }

#if LORAMUX_BF16_PAIRS
template <>
inline constexpr int STRIP<bf16> = 32;

// The sums come in the order in which `interleave` leaves a strip's columns: 0-3, 8-11, 16-19, 24-27; 4-7, ...
template <>
inline void finish(bf16* y, const float* sums, float scale) {
#if defined(__AVX512F__)
    const __m512i order[2] = {
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31),
    };
    __m512 a = (__m512)load(sums), b = (__m512)load(sums + 16);
    for (int half = 0; half < 2; half++, y += 16)
        store(y, fused(load(y), splat(scale), (f32x16)_mm512_permutex2var_ps(a, order[half], b)));
#else
    float ordered[32];
    for (int four = 0; four < 8; four++) std::memcpy(ordered + 4 * four, sums + four / 2 * 4 + four % 2 * 16, 16);
    for (int half = 0; half < 2; half++, y += 16) store(y, fused(load(y), splat(scale), load(ordered + 16 * half)));
#endif
}
#endif

// The first `left` columns of a strip, or all.
template <class T>
inline void finish_first(T* y, const float* sums, float scale, int64_t left) {
    if (left >= STRIP<T>) return finish(y, sums, scale);
    T padded[STRIP<T>] = {};
    std::memcpy(padded, y, left * sizeof(T));
    finish(padded, sums, scale);
    std::memcpy(y, padded, left * sizeof(T));
}

#if LORAMUX_TILES
// As loramux_lora_shrink and loramux_lora_expand, for processes that have tiles. Sums have another order than without tiles, for
// every number of rows.

void shrink_by_tiles(const bf16* x, int64_t ldx, int64_t x_site, int64_t width, const bf16* pool, const LoraTableAbi& table,
                     const Group& group, const Segments& segments, float* v, int64_t ldv, int threads);
void expand_by_tiles(const float* v, int64_t ldv, const bf16* pool, const LoraTableAbi& table, const Group& group,
                     const Segments& segments, bf16* y, int64_t ldy, int64_t y_site, int threads);
#endif

}  // namespace loramux
