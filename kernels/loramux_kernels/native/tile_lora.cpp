// lora_shrink and lora_expand in bfloat16, by products of tiles (tiles.hpp), as the base's linears: an adapter's part of a prompt
// stays in proportion to its arithmetic.
#include <vector>

#include "lora_pairs.hpp"
#include "tiles.hpp"

#if LORAMUX_TILES
namespace loramux {
namespace {

// A unit of shrink: up to four tiles of rows, by the ranks of one tile. Few rows are cut to fewer ranks, for more threads.
constexpr int64_t SHRINK_ROWS = 4 * TILE_ROWS;
int64_t ranks_of_unit(const Pair& p) { return p.rows > TILE_ROWS ? RANK_TILE : RANK_TILE / 2; }

// A unit of expand: two tiles of rows, by so many columns.
constexpr int64_t EXPAND_ROWS = 2 * TILE_ROWS, EXPAND_COLUMNS = 128;

struct alignas(64) Tile {
    bf16 rows[TILE_ROWS][TILE_DEPTH];
};

// v[rows][ranks] = x[rows][:] . a[ranks][:]
class TileShrink {
   public:
    TileShrink(const bf16* x, int64_t ldx, int64_t rows, const bf16* a, int64_t lda, int64_t ranks, int64_t width)
        : x(x), ldx(ldx), in{rows}, a(a), lda(lda), ranks(ranks), width(width) {}

    void run(const bf16* next, float* v, int64_t ldv) const {
        const ShapedTiles shaped(in.height);
        clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
        Tile turned[2];  // one is written while the other is read
        int64_t k = 0;
        for (; k + TILE_DEPTH <= width; k += TILE_DEPTH) {
            for (int64_t rank = 0; rank < ranks; rank++) __builtin_prefetch(next + rank * lda + k);
            turn(k, TILE_DEPTH, turned[k / TILE_DEPTH % 2]);
            multiply(turned[k / TILE_DEPTH % 2], x + k, ldx);
        }
        if (k < width) add_last(k, turned[0]);
        write<0>(v, ldv), write<1>(v, ldv), write<2>(v, ldv), write<3>(v, ldv);
    }

   private:
    const bf16* const x;
    const int64_t ldx;
    const TileBlocks in;
    const bf16* const a;
    const int64_t lda, ranks, width;

    // `left` inputs of the ranks from k on, as the columns of a tile. Ranks and inputs beyond those are zeros.
    void turn(int64_t k, int64_t left, Tile& to) const {
        f32x16 pairs[TILE_ROWS] = {};
        for (int64_t rank = 0; rank < ranks; rank++) pairs[rank] = Unit<bf16>::load_first(a + rank * lda + k, left);
        transpose(pairs);
        for (int pair = 0; pair < TILE_ROWS; pair++) store((float*)to.rows[pair], pairs[pair]);
    }

    void multiply(const Tile& columns, const bf16* rows, int64_t ld) const {
        load_tile<6>(&columns, TILE_BYTES);
        add<0, 4>(rows, ld), add<1, 5>(rows, ld), add<2, 4>(rows, ld), add<3, 5>(rows, ld);
    }

    template <int BLOCK, int ROWS>
    void add(const bf16* rows, int64_t ld) const {
        if (BLOCK >= in.count) return;
        load_tile<ROWS>(rows + in.first(BLOCK) * ld, ld * (int64_t)sizeof(bf16));
        add_tile_product<BLOCK, ROWS, 6>();
    }

    // The inputs from k on, fewer than a tile has.
    void add_last(int64_t k, Tile& turned) const {
        bf16 rows[SHRINK_ROWS][TILE_DEPTH] = {};
        for (int64_t row = 0; row < in.rows; row++) std::memcpy(rows[row], x + row * ldx + k, (width - k) * sizeof(bf16));
        turn(k, width - k, turned);
        multiply(turned, rows[0], TILE_DEPTH);
    }

    template <int BLOCK>
    void write(float* v, int64_t ldv) const {
        if (BLOCK >= in.count) return;
        alignas(64) float sums[TILE_ROWS][16];
        store_tile<BLOCK>(sums, TILE_BYTES);
        for (int64_t row = 0; row < in.height; row++)
            store_first(v + (in.first(BLOCK) + row) * ldv, load(sums[row]), ranks);
    }
};

// What an adapter adds to some rows of y in one block of columns.
class TileExpansion {
   public:
    // `first` is where B's columns begin, in a tile at the pool's start.
    TileExpansion(const Pair& pair, const bf16* first, int64_t ldb, int64_t columns, int64_t rows)
        : pair(pair), first(first), ldb(ldb), columns(columns), in{rows}, depths(blocks(pair.rank, TILE_DEPTH)) {}

    // `next` is where the next unit's weights begin.
    void run(const float* v, int64_t ldv, const bf16* next, bf16* y, int64_t ldy) const {
        const Tile* const weights = rounded_weights(v, ldv);
        Tile even, odd;
        alignas(64) float sums[EXPAND_ROWS][STRIP<bf16>];
        const ShapedTiles shaped(in.height);
        for (int64_t c = 0; c < columns; c += STRIP<bf16>) {
            clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
            for (int64_t depth = 0; depth < depths; depth++) {
                interleave_ranks(depth * TILE_DEPTH, c, even, odd);
                load_tile<6>(&even, TILE_BYTES), load_tile<7>(&odd, TILE_BYTES);
                load_tile<4>(weights + depth, TILE_BYTES);
                add_tile_product<0, 4, 6>(), add_tile_product<1, 4, 7>();
                if (in.count < 2) continue;
                load_tile<5>(weights + depths + depth, TILE_BYTES);
                add_tile_product<2, 5, 6>(), add_tile_product<3, 5, 7>();
            }
            for (int64_t rank = 0; rank < RANK_TILE; rank++) __builtin_prefetch(next + rank * ldb + c);
            constexpr int64_t stride = sizeof sums[0];
            float* const second = sums[in.first(in.count - 1)];
            if (in.count > 1) store_tile<2>(second, stride), store_tile<3>(second + 16, stride);
            store_tile<0>(sums[0], stride), store_tile<1>(sums[0] + 16, stride);
            for (int64_t row = 0; row < in.rows; row++)
                finish_first(y + row * ldy + c, sums[row], pair.scale, columns - c);
        }
    }

   private:
    const Pair& pair;
    const bf16* const first;
    const int64_t ldb, columns;
    const TileBlocks in;
    const int64_t depths;

    // v, rounded, as tiles [block][depth], in memory of the calling thread. Ranks beyond the last are zeros.
    const Tile* rounded_weights(const float* v, int64_t ldv) const {
        static thread_local std::vector<Tile> memory;
        if ((int64_t)memory.size() < in.count * depths) memory.resize(in.count * depths);
        for (int64_t block = 0; block < in.count; block++)
            for (int64_t depth = 0; depth < depths; depth++)
                for (int64_t row = 0; row < in.height; row++)
                    for (int64_t half = 0; half < TILE_DEPTH; half += 16) {
                        const int64_t rank = depth * TILE_DEPTH + half, left = pair.rank - rank;
                        const float* from = v + (in.first(block) + row) * ldv + rank;
                        store(memory[block * depths + depth].rows[row] + half, left > 0 ? load_first(from, left) : f32x16{});
                    }
        return memory.data();
    }

    // Pairs of rank rows over a strip of columns. Ranks beyond the last are zeros.
    void interleave_ranks(int64_t rank, int64_t column, Tile& even, Tile& odd) const {
        const int64_t left = columns - column;
        for (int pair_of_ranks = 0; pair_of_ranks < TILE_ROWS; pair_of_ranks++, rank += 2) {
            const f32x16 upper = rank_row(rank, column, left), lower = rank_row(rank + 1, column, left);
            store((float*)even.rows[pair_of_ranks], interleave<false>(upper, lower));
            store((float*)odd.rows[pair_of_ranks], interleave<true>(upper, lower));
        }
    }

    f32x16 rank_row(int64_t rank, int64_t column, int64_t left) const {
        if (rank >= pair.rank) return f32x16{};
        const bf16* tile = first + pair.offsets[rank / RANK_TILE];
        return Unit<bf16>::load_first(tile + rank % RANK_TILE * ldb + column, left);
    }
};

}  // namespace

void shrink_by_tiles(const bf16* x, int64_t ldx, int64_t x_site, int64_t width, const bf16* pool, const LoraTableAbi& table,
                     const Group& group, const Segments& segments, float* v, int64_t ldv, int threads) {
    const int64_t all_rows = segments.rows[segments.count], lda = group.row_of(width);
    auto cost = [&](const Pair& p) {
        const int64_t ranks = ranks_of_unit(p), rows = p.rows < SHRINK_ROWS ? p.rows : SHRINK_ROWS;
        return Work{blocks(p.rank, ranks) * blocks(p.rows, SHRINK_ROWS), width * (ranks + rows)};
    };
    auto first_rank = [&](const Pair& p, int64_t unit) { return unit % blocks(p.rank, ranks_of_unit(p)) * ranks_of_unit(p); };
    auto start = [&](const Pair& p, int64_t unit) {
        const int64_t rank = first_rank(p, unit);
        return pool + p.offsets[rank / RANK_TILE] + rank % RANK_TILE * lda + group.column(p.site);
    };
    share_out(segments, group, table, table.a_offsets, threads, cost, start, [&](const Pair& p, int64_t unit, const bf16* next) {
        const int64_t rank = first_rank(p, unit), ranks = ranks_of_unit(p), left = p.rank - rank;
        const int64_t first = unit / blocks(p.rank, ranks) * SHRINK_ROWS, rows = p.rows - first, row = p.first_row + first;
        const TileShrink shrink(x + row * ldx + p.site * x_site, ldx, rows < SHRINK_ROWS ? rows : SHRINK_ROWS,
                                start(p, unit), lda, left < ranks ? left : ranks, width);
        shrink.run(next, v + (p.site * all_rows + row) * ldv + rank, ldv);
    });
}

void expand_by_tiles(const float* v, int64_t ldv, const bf16* pool, const LoraTableAbi& table, const Group& group,
                     const Segments& segments, bf16* y, int64_t ldy, int64_t y_site, int threads) {
    const int64_t all_rows = segments.rows[segments.count];
    auto width_of = [&](const Pair& p) { return group.starts[p.site + 1] - group.starts[p.site]; };
    auto cost = [&](const Pair& p) {
        const int64_t rows = p.rows < EXPAND_ROWS ? p.rows : EXPAND_ROWS;
        return Work{blocks(width_of(p), EXPAND_COLUMNS) * blocks(p.rows, EXPAND_ROWS), p.rank * EXPAND_COLUMNS * (TILE_ROWS + rows)};
    };
    auto first_column = [&](const Pair& p, int64_t unit) { return unit / blocks(p.rows, EXPAND_ROWS) * EXPAND_COLUMNS; };
    auto of_block = [&](const Pair& p, int64_t unit) { return pool + group.column(p.site) + first_column(p, unit); };
    auto start = [&](const Pair& p, int64_t unit) { return of_block(p, unit) + p.offsets[0]; };
    share_out(segments, group, table, table.b_offsets, threads, cost, start, [&](const Pair& p, int64_t unit, const bf16* next) {
        const int64_t width = width_of(p), column = first_column(p, unit), columns = width - column;
        const int64_t first = unit % blocks(p.rows, EXPAND_ROWS) * EXPAND_ROWS, rows = p.rows - first, row = p.first_row + first;
        const TileExpansion expansion(p, of_block(p, unit), group.row_of(width), columns < EXPAND_COLUMNS ? columns : EXPAND_COLUMNS,
                                      rows < EXPAND_ROWS ? rows : EXPAND_ROWS);
        expansion.run(v + (p.site * all_rows + row) * ldv, ldv, next,
                      y + row * ldy + group.output(p.site, y_site) + column, ldy);
    });
}

}  // namespace loramux
#endif
