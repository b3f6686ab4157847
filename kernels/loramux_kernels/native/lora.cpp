// lora_shrink and lora_expand, straight from the rank tiles in the pool. Memory is the limit while decoding: each
// adapter's bytes are read once, by one thread, and the threads' shares are cut by cost and not by adapter.
//
// A row's sums run over k (shrink) or rank (expand) in one fixed order, whatever rows stand beside it: in float32 an
// answer never depends on the rest of the batch.
#include "abi.hpp"
#include "lora_pairs.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

// What one of `blocks` blocks of rows fetches while it computes: every so many lines of the next unit's weights, and those
// `early` elements further on.
template <class T>
struct Prefetch {
    const T* next;
    int64_t early;
    int block, blocks;
};

// v[M][N] = x[M][:] . a[N][:]
template <class T, int M, int N>
void dot_block(const T* x, int64_t ldx, const T* a, int64_t lda, Prefetch<T> prefetch, int64_t width, float* v,
               int64_t ldv) {
    using U = Unit<T>;
    constexpr int step = 16 * U::elements;
    f32x16 acc[M][4] = {};
    int64_t k = 0;
    int wait = prefetch.block + 1;
    for (; k + step <= width; k += step) {
        const bool fetches = --wait == 0;
        if (fetches) wait = prefetch.blocks;
        f32x16 row[M];
        for (int m = 0; m < M; m++) row[m] = U::load(x + m * ldx + k);
        for (int n = 0; n < N; n++) {
            f32x16 column = U::load(a + n * lda + k);
            if (fetches) fetch(prefetch.next + n * lda + k, prefetch.early);
            for (int m = 0; m < M; m++) acc[m][n] = U::add_product(acc[m][n], row[m], column);
        }
    }
    if (int64_t rest = width - k)
        for (int n = 0; n < N; n++) {
            f32x16 column = U::load_first(a + n * lda + k, rest);
            for (int m = 0; m < M; m++)
                acc[m][n] = U::add_product(acc[m][n], U::load_first(x + m * ldx + k, rest), column);
        }
    for (int m = 0; m < M; m++) {
        float four[4];
        sums_of_four(acc[m], four);
        std::memcpy(v + m * ldv, four, N * sizeof(float));
    }
}

template <class T, int N>
void dot_rows(const T* x, int64_t ldx, int64_t rows, const T* a, int64_t lda, const T* next, int64_t early,
              int64_t width, float* v, int64_t ldv) {
    Prefetch<T> prefetch{next, early, 0, (int)(rows / 4 + rows % 4)};
    for (; rows >= 4; rows -= 4, x += 4 * ldx, v += 4 * ldv, prefetch.block++)
        dot_block<T, 4, N>(x, ldx, a, lda, prefetch, width, v, ldv);
    for (; rows; rows--, x += ldx, v += ldv, prefetch.block++)
        dot_block<T, 1, N>(x, ldx, a, lda, prefetch, width, v, ldv);
}

constexpr int64_t SHRINK_ROWS = 48, SHRINK_RANKS = 4;
constexpr int64_t EARLY = 16 << 10;  // bytes

template <class T>
void shrink(const T* x, int64_t ldx, int64_t x_site, int64_t width, const T* pool, const LoraTableAbi& table,
            const Group& group, const Segments& segments, float* v, int64_t ldv, int threads) {
    const int64_t all_rows = segments.rows[segments.count], lda = group.row_of(width);
    auto cost = [&](const Pair& p) {
        int64_t rows = p.rows < SHRINK_ROWS ? p.rows : SHRINK_ROWS;
        return Work{blocks(p.rank, SHRINK_RANKS) * blocks(p.rows, SHRINK_ROWS), width * (4 + rows)};
    };
    auto first_rank = [&](const Pair& p, int64_t unit) { return unit % blocks(p.rank, SHRINK_RANKS) * SHRINK_RANKS; };
    auto start = [&](const Pair& p, int64_t unit) {
        int64_t rank = first_rank(p, unit);
        return pool + p.offsets[rank / RANK_TILE] + rank % RANK_TILE * lda + group.column(p.site);
    };
    share_out(segments, group, table, table.a_offsets, threads, cost, start, [&](const Pair& p, int64_t unit, const T* next) {
        int64_t rank = first_rank(p, unit), row = unit / blocks(p.rank, SHRINK_RANKS) * SHRINK_ROWS,
                rows = p.rows - row < SHRINK_ROWS ? p.rows - row : SHRINK_ROWS;
        row += p.first_row;
        const T* a = start(p, unit);
        float* out = v + (p.site * all_rows + row) * ldv + rank;
        const T* in = x + row * ldx + p.site * x_site;
        // Tiles mostly follow one another. What lies behind the last one, or beside a head's columns, is nobody's next.
        const int64_t left = lda == width ? (p.rank - rank - SHRINK_RANKS) * width : 0, ahead = EARLY / (int64_t)sizeof(T);
        const int64_t early = ahead < left ? ahead : 0;
        switch (p.rank - rank) {
            case 1: return dot_rows<T, 1>(in, ldx, rows, a, lda, next, early, width, out, ldv);
            case 2: return dot_rows<T, 2>(in, ldx, rows, a, lda, next, early, width, out, ldv);
            case 3: return dot_rows<T, 3>(in, ldx, rows, a, lda, next, early, width, out, ldv);
            default: return dot_rows<T, 4>(in, ldx, rows, a, lda, next, early, width, out, ldv);
        }
    });
}

constexpr int64_t EXPAND_ROWS = 32, EXPAND_COLUMNS = 128;
constexpr int64_t EARLY_ROWS = 8;  // up to which memory is the limit

// Rank rows of B over one strip of columns, which many rows of weights meet. Weights come as units: one float, rounded to
// T, or two bf16.
template <class T, int R>
struct RankRows {
    static constexpr int columns = STRIP<T>;
    f32x16 row[R];
    RankRows(const T* b, int64_t width) {
        for (int r = 0; r < R; r++) row[r] = load(b + r * width);
    }
    RankRows(const T* b, int64_t width, int64_t left) {
        for (int r = 0; r < R; r++) row[r] = load_first(b + r * width, left);
    }
    void add_to(float* sums, const float* weights, bool fresh) const {
        f32x16 total = fresh ? f32x16{} : load(sums);
        for (int r = 0; r < R; r++) total = fused(total, splat(weights[r]), row[r]);
        store(sums, total);
    }
};

template <class T>
inline void pack_weights(const float* v, int64_t ranks, float* weights) { store(weights, rounded<T>(load_first(v, ranks))); }

#if LORAMUX_BF16_PAIRS
// Pairs of rank rows, interleaved, meet pairs of weights.
template <int R>
struct RankRows<bf16, R> {
    static constexpr int columns = STRIP<bf16>, pairs = (R + 1) / 2;
    f32x16 first[pairs], second[pairs];
    RankRows(const bf16* b, int64_t width) : RankRows(b, width, columns) {}
    RankRows(const bf16* b, int64_t width, int64_t left) {
        for (int p = 0; p < pairs; p++) {
            const f32x16 even = Unit<bf16>::load_first(b + 2 * p * width, left);
            const f32x16 odd = 2 * p + 1 < R ? Unit<bf16>::load_first(b + (2 * p + 1) * width, left) : f32x16{};
            first[p] = interleave<false>(even, odd);
            second[p] = interleave<true>(even, odd);
        }
    }
    void add_to(float* sums, const float* weights, bool fresh) const {
        f32x16 a{}, b{};
        if (!fresh) a = load(sums), b = load(sums + 16);
        for (int p = 0; p < pairs; p++) {
            const f32x16 pair = splat(weights[p]);
            a = Unit<bf16>::add_product(a, first[p], pair);
            b = Unit<bf16>::add_product(b, second[p], pair);
        }
        store(sums, a);
        store(sums + 16, b);
    }
};

template <>
inline void pack_weights<bf16>(const float* v, int64_t ranks, float* weights) { store((bf16*)weights, load_first(v, ranks)); }
#endif

// What an adapter adds to some rows of y in one block of columns.
template <class T>
struct Expansion {
    const Pair& pair;
    const T* first;  // of B's columns, in a tile at the pool's start
    int64_t ldb;
    bool is_last;  // of the blocks of columns
    int64_t columns, rows;

    Expansion(const Pair& pair, const T* first, int64_t ldb, bool is_last, int64_t columns, int64_t rows)
        : pair(pair), first(first), ldb(ldb), is_last(is_last), columns(columns), rows(rows) {}

    alignas(64) float sums[EXPAND_ROWS][EXPAND_COLUMNS];
    alignas(64) float weights[EXPAND_ROWS][RANK_TILE];

    // `next` is where the next unit's weights begin
    void run(const float* v, int64_t ldv, const T* next, T* y, int64_t ldy) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t c = 0; c < columns; c += 64 / sizeof(T)) __builtin_prefetch(y + m * ldy + c, 1);
        const T* b = tile(0);
        for (int64_t rank = 0; rank < pair.rank; rank += RANK_TILE) {
            const int64_t left = pair.rank - rank, ranks = left < RANK_TILE ? left : RANK_TILE;
            for (int64_t m = 0; m < rows; m++) pack_weights<T>(v + m * ldv + rank, ranks, weights[m]);
            const T* then = left > RANK_TILE ? tile(rank + RANK_TILE) : next;
            add_ranks<RANK_TILE>(0, ranks, b, then, rank == 0);
            b = then;
        }
        for (int64_t m = 0; m < rows; m++)
            for (int64_t c = 0; c < columns; c += STRIP<T>)
                finish_first(y + m * ldy + c, sums[m] + c, pair.scale, columns - c);
    }

    const T* tile(int64_t rank) const { return first + pair.offsets[rank / RANK_TILE]; }

    // The ranks from `done` on, R at a time as long as there are so many: the order of a sum is the order of the ranks.
    template <int R>
    void add_ranks(int64_t done, int64_t ranks, const T* b, const T* next, bool fresh) {
        if (ranks - done >= R) {
            add<R>(weights[0] + done / Unit<T>::elements, b + done * ldb, next + done * ldb, fresh);
            done += R;
            fresh = false;
        }
        if constexpr (R > 1)
            if (done < ranks) add_ranks<R / 2>(done, ranks, b, next, fresh);
    }

    template <int R>
    void add(const float* weights, const T* b, const T* next, bool fresh) {
        using Rows = RankRows<T, R>;
        constexpr int cache_line = 64 / sizeof(T);
        const int64_t early = rows <= EARLY_ROWS && !is_last ? EXPAND_COLUMNS : 0;
        for (int64_t c = 0; c < columns; c += Rows::columns) {
            if (c % cache_line == 0)
                for (int r = 0; r < R; r++) fetch(next + r * ldb + c, early);
            const Rows strip = columns - c >= Rows::columns ? Rows(b + c, ldb) : Rows(b + c, ldb, columns - c);
            for (int64_t m = 0; m < rows; m++) strip.add_to(sums[m] + c, weights + m * RANK_TILE, fresh);
        }
    }
};

template <class T>
void expand(const float* v, int64_t ldv, const T* pool, const LoraTableAbi& table, const Group& group,
            const Segments& segments, T* y, int64_t ldy, int64_t y_site, int threads) {
    int64_t all_rows = segments.rows[segments.count];
    auto width_of = [&](const Pair& p) { return group.starts[p.site + 1] - group.starts[p.site]; };
    auto cost = [&](const Pair& p) {
        int64_t rows = p.rows < EXPAND_ROWS ? p.rows : EXPAND_ROWS;
        return Work{blocks(width_of(p), EXPAND_COLUMNS) * blocks(p.rows, EXPAND_ROWS), p.rank * EXPAND_COLUMNS * (4 + rows)};
    };
    auto first_column = [&](const Pair& p, int64_t unit) { return unit / blocks(p.rows, EXPAND_ROWS) * EXPAND_COLUMNS; };
    auto of_block = [&](const Pair& p, int64_t unit) { return pool + group.column(p.site) + first_column(p, unit); };
    auto start = [&](const Pair& p, int64_t unit) { return of_block(p, unit) + p.offsets[0]; };
    share_out(segments, group, table, table.b_offsets, threads, cost, start, [&](const Pair& p, int64_t unit, const T* next) {
        const int64_t width = width_of(p), column = first_column(p, unit), row = unit % blocks(p.rows, EXPAND_ROWS) * EXPAND_ROWS;
        const int64_t columns = width - column, rows = p.rows - row;
        Expansion<T> expansion(p, of_block(p, unit), group.row_of(width), columns <= EXPAND_COLUMNS,
                               columns < EXPAND_COLUMNS ? columns : EXPAND_COLUMNS,
                               rows < EXPAND_ROWS ? rows : EXPAND_ROWS);
        expansion.run(v + (p.site * all_rows + p.first_row + row) * ldv, ldv, next,
                      y + (p.first_row + row) * ldy + group.output(p.site, y_site) + column, ldy);
    });
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_lora_shrink(int dtype, const void* x, int64_t ldx, int64_t x_site, int64_t width,
                                        const void* pool, const LoraTableAbi* table, const int64_t* group,
                                        const int64_t* segments, float* v, int64_t ldv, int threads) {
#if LORAMUX_TILES
    if (dtype == BFLOAT16 && has_tiles())
        return shrink_by_tiles((const bf16*)x, ldx, x_site, width, (const bf16*)pool, *table, Group(group),
                               Segments(segments), v, ldv, threads);
#endif
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        shrink((const T*)x, ldx, x_site, width, (const T*)pool, *table, Group(group), Segments(segments), v, ldv, threads);
    });
}

LORAMUX_EXPORT void loramux_lora_expand(int dtype, const float* v, int64_t ldv, const void* pool,
                                        const LoraTableAbi* table, const int64_t* group, const int64_t* segments,
                                        void* y, int64_t ldy, int64_t y_site, int threads) {
#if LORAMUX_TILES
    if (dtype == BFLOAT16 && has_tiles())
        return expand_by_tiles(v, ldv, (const bf16*)pool, *table, Group(group), Segments(segments), (bf16*)y, ldy, y_site,
                               threads);
#endif
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        expand(v, ldv, (const T*)pool, *table, Group(group), Segments(segments), (T*)y, ldy, y_site, threads);
    });
}
