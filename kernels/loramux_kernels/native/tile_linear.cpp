// y = x @ W.T + bias in bfloat16, by products of tiles. W lies in the panels of linear.cpp, for a panel's 16 pairs of inputs are
// the rows of two tiles. Two blocks of up to 16 rows of x meet two tiles of W at a time, so that every tile is loaded for two
// products.
//
// Every output is one chain of sums over tiles, whatever the number of rows: a row's answer does not depend on the rows beside
// it. It is another chain than that of linear.cpp, so all numbers of rows go by tiles, or none does.
#include <vector>

#include "abi.hpp"
#include "panels.hpp"
#include "parallel.hpp"
#include "tiles.hpp"

#if LORAMUX_TILES
namespace loramux {
namespace {

constexpr int64_t STEP = PANEL * TILE_DEPTH;                // elements of a panel for so many inputs
constexpr int64_t PANEL_STRIDE = 2 * PANEL * sizeof(bf16);  // bytes from a pair of inputs to the next one
constexpr int64_t SHARED_BLOCKS = 3;                        // from so many blocks on, threads pack rows together

// Rows of x, packed as tiles: packed[block][k / TILE_DEPTH][height][TILE_DEPTH].
struct TileRows : TileBlocks {
    const bf16* x;
    int64_t ldx, steps;

    TileRows(const bf16* x, int64_t ldx, int64_t rows, int64_t width)
        : TileBlocks{rows}, x(x), ldx(ldx), steps(width / TILE_DEPTH) {}

    int64_t tile_size() const { return height * TILE_DEPTH; }
    int64_t block_size() const { return steps * tile_size(); }

    // In memory of the calling thread, until its next call.
    const bf16* packed(int threads) const {
        static thread_local std::vector<bf16> memory;
        const int64_t elements = count * block_size();
        if ((int64_t)memory.size() < elements) memory.resize(elements);
        bf16* const to = memory.data();
        on_threads(threads_for(2 * elements * (int64_t)sizeof(bf16), threads), [&](int thread, int team) {
            for (int64_t row = share(count * height, thread, team); row < share(count * height, thread + 1, team); row++) {
                const int64_t block = row / height, of_block = row % height;
                const bf16* from = x + (first(block) + of_block) * ldx;
                bf16* tile = to + block * block_size() + of_block * TILE_DEPTH;
                for (int64_t step = 0; step < steps; step++, from += TILE_DEPTH, tile += tile_size())
                    std::memcpy(tile, from, TILE_BYTES);
            }
        });
        return to;
    }
};

// What two blocks of rows fetch while they meet a panel: the lines of a step, every `every` steps, from `offset` elements after
// where it starts.
struct Prefetch {
    int64_t offset;
    int every;
    int64_t early = 0;  // the same lines, which costs nothing
};

// x, packed, by W's panels.
class TileProduct {
   public:
    TileProduct(const TileRows& in, const bf16* x, const bf16* packed, const Output& out)
        : in(in), x(x), packed(packed), out(out) {}

    void multiply(int64_t panel) const {
        const int64_t pairs = (in.count + 1) / 2, size = in.steps * STEP;
        for (int64_t pair = 0; pair < pairs; pair++) {
            // A single pair of blocks reads memory all the time, many pairs a part each of the panel that follows.
            const Prefetch next = pairs == 1 ? Prefetch{8192 / sizeof(bf16), 1, 8192}
                                             : Prefetch{size + in.steps * pair / pairs * STEP, (int)pairs};
            if (2 * pair + 1 < in.count)
                multiply_blocks<2>(2 * pair, panel, next);
            else
                multiply_blocks<1>(2 * pair, panel, next);
        }
    }

   private:
    const TileRows& in;
    const bf16* const x;
    const bf16* const packed;
    const Output& out;

    template <int BLOCKS>
    void multiply_blocks(int64_t block, int64_t panel, Prefetch prefetch) const {
        const bf16 *upper = x + block * in.block_size(), *lower = upper + in.block_size();
        const bf16 *w = packed + panel * in.steps * STEP, *next = w + prefetch.offset;
        clear_tile<0>(), clear_tile<1>();
        if (BLOCKS == 2) clear_tile<2>(), clear_tile<3>();
        const int64_t steps = in.steps, tile_size = in.tile_size();
        int wait = prefetch.every;
        for (int64_t step = 0; step < steps; step++, w += STEP, upper += tile_size, lower += tile_size) {
            if (--wait == 0) {
                for (int64_t line = 0; line < STEP; line += 64 / sizeof(bf16)) fetch(next + line, prefetch.early);
                next += STEP;
                wait = prefetch.every;
            }
            load_tile<6>(w, PANEL_STRIDE);
            load_tile<4>(upper, TILE_BYTES);
            add_tile_product<0, 4, 6>();
            load_tile<7>(w + PANEL, PANEL_STRIDE);
            add_tile_product<1, 4, 7>();
            if (BLOCKS == 2) {
                load_tile<5>(lower, TILE_BYTES);
                add_tile_product<2, 5, 6>();
                add_tile_product<3, 5, 7>();
            }
        }
        write_sums<0>(block, 2 * panel);
        write_sums<1>(block, 2 * panel + 1);
        if (BLOCKS == 2) {
            write_sums<2>(block + 1, 2 * panel);
            write_sums<3>(block + 1, 2 * panel + 1);
        }
    }

    template <int TILE>
    void write_sums(int64_t block, int64_t sixteen) const {
        alignas(64) float sums[TILE_ROWS][16];
        store_tile<TILE>(sums, TILE_BYTES);
        for (int64_t row = 0; row < in.height; row++) write<bf16>(out, in.first(block) + row, 16 * sixteen, load(sums[row]));
    }
};

void multiply(const TileRows& rows, const bf16* packed, const Output& out, int threads) {
    const int64_t panels = (out.columns + PANEL - 1) / PANEL;
    threads = threads_for(panels * rows.steps * STEP * (int64_t)sizeof(bf16), threads);
    const bf16* shared = rows.count >= SHARED_BLOCKS ? rows.packed(threads) : nullptr;
    Runs runs(panels, threads);
    on_threads(threads, [&](int, int) {
        const TileProduct product(rows, shared ? shared : rows.packed(1), packed, out);
        const ShapedTiles shaped(rows.height);
        runs.take([&](int64_t panel, int64_t end) {
            for (; panel < end; panel++) product.multiply(panel);
        });
    });
}

}  // namespace
}  // namespace loramux

using namespace loramux;

// As loramux_linear, in bfloat16; the width is a multiple of 32.
LORAMUX_EXPORT void loramux_tile_linear(const void* x, int64_t ldx, int64_t rows, int64_t width, const void* packed,
                                        const void* bias, void* y, int64_t ldy, int64_t columns, int threads) {
    const TileRows in((const bf16*)x, ldx, rows, width);
    if (rows > 0) multiply(in, (const bf16*)packed, Output{y, ldy, columns, bias}, threads);
}

#else

LORAMUX_EXPORT void loramux_tile_linear(const void*, int64_t, int64_t, int64_t, const void*, const void*, void*, int64_t,
                                        int64_t, int) {}

#endif
