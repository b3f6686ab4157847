// y = x @ W.T + bias, with W packed once into panels of 32 output columns:
//
//     packed[panel][k / E][32][E]      E elements fill four bytes, a unit: one float, or two bf16
//
// so that a panel streams from memory in the order of use. x is packed likewise, for each call, into blocks of few rows:
//
//     rows[block][k / E][rows of the block][E]
//
// A block's rows and columns of a panel are sums in registers. Every output is one chain of sums over k, whatever the number of
// rows: a row's answer does not depend on the rows beside it, and is the same while decoding as in prefill.
#include <vector>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

constexpr int PANEL = 32;

// Columns go by sixteens. SUMS of rows and sixteens are in registers; many rows come COLUMNS sixteens at a time.
#if defined(__AVX512F__)
constexpr int SUMS = 24, COLUMNS = 2;  // 12 x 2 sums, 2 columns, 1 broadcast of 32 registers
#else
constexpr int SUMS = 6, COLUMNS = 1;  // in halves: 6 x 2 sums, 2 columns, 1 broadcast of 16 registers
#endif
constexpr int MAX_ROWS = SUMS / COLUMNS;
constexpr int64_t MAX_STRETCHED_ROWS = 48;
constexpr int WORTH_TRANSPOSING = 4;  // from so many rows on, sixteen units at a time are packed faster than one

// The blocks of few rows meet a panel in stretches of this many units: for all but the first they are still in the
// first-level cache, and memory is read all the time, not only while the first block is multiplied.
constexpr int64_t STRETCH = 64;
constexpr int64_t MAX_STRETCHED_BLOCKS = (MAX_STRETCHED_ROWS + MAX_ROWS - 1) / MAX_ROWS;

struct Output {
    void* y;
    int64_t ldy, columns;
    const void* bias;
};

template <class T>
void write(const Output& out, int64_t row, int64_t column, f32x16 value) {
    int64_t left = out.columns - column;
    if (left <= 0) return;
    const T* bias = (const T*)out.bias;
    T* y = (T*)out.y + row * out.ldy + column;
    store_first(y, bias ? value + load_first(bias + column, left) : value, left);
}

// What a block fetches while it computes, for processors do not foresee a panel's end: a line of each of its sixteens
// of columns every `every` steps, from `offset` elements after where it starts in each.
struct Prefetch {
    int64_t offset;
    int every;
    int64_t early = 0;  // the same lines, which costs nothing
};
constexpr int64_t EARLY = 16 << 10;  // bytes

template <class T>
class Product {
    using U = Unit<T>;
    static constexpr int STEP = PANEL * U::elements;  // elements of a panel for one unit of k

   public:
    Product(const T* x, int64_t ldx, int64_t rows, int64_t width, const T* packed, const Output& out, int threads)
        : packed(packed), rows(rows), blocks((rows + MAX_ROWS - 1) / MAX_ROWS), units(width / U::elements), out(out) {
        static thread_local std::vector<T> memory;
        if (rows == 1) {
            x_packed = x;
            return;
        }
        if ((int64_t)memory.size() < rows * width) memory.resize(rows * width);
        pack_rows(x, ldx, memory.data(), threads);
        x_packed = memory.data();
    }

    void run(int threads) const {
        if (rows == 0) return;
        const int64_t panels = (out.columns + PANEL - 1) / PANEL, bytes = panels * panel_size() * (int64_t)sizeof(T);
        threads = threads_for(bytes, threads);
        Runs runs(panels, threads);
        on_threads(threads, [&](int, int) {
            runs.take([&](int64_t panel, int64_t end) {
                if (rows <= SUMS / 4)
                    for (; panel + 2 <= end; panel += 2) multiply_block<4>(0, 2 * panel, Prefetch{8192 / sizeof(T), 1});
                for (; panel < end; panel++) multiply_panel(panel);
            });
        });
    }

   private:
    const T *packed, *x_packed = nullptr;
    int64_t rows, blocks, units;
    Output out;

    int64_t panel_size() const { return units * STEP; }
    int64_t start_of(int64_t column) const { return column / 2 * panel_size() + column % 2 * (STEP / 2); }
    int64_t first_row(int64_t block) const { return rows * block / blocks; }

    void pack_rows(const T* x, int64_t ldx, T* to, int threads) const {
        const int64_t bytes = 2 * rows * units * U::elements * (int64_t)sizeof(T);
        on_threads(threads_for(bytes, threads), [&](int thread, int team) {
            const int64_t from = share(units, thread, team), last = share(units, thread + 1, team);
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t first = first_row(block), count = first_row(block + 1) - first;
                pack_block(x + first * ldx + from * U::elements, ldx, count, last - from,
                           to + (first * units + from * count) * U::elements);
            }
        });
    }

    // A unit is four bytes, and moves as a float.
    static void pack_block(const T* x, int64_t ldx, int64_t count, int64_t length, T* to) {
        int64_t u = 0;
        if (count >= WORTH_TRANSPOSING)
            for (; u + 16 <= length; u += 16) {
                f32x16 tile[16] = {};
                for (int64_t row = 0; row < count; row++) tile[row] = U::load(x + row * ldx + u * U::elements);
                transpose(tile);
                for (int i = 0; i < 16; i++, to += count * U::elements) store_first((float*)to, tile[i], count);
            }
        for (; u < length; u++)
            for (int64_t row = 0; row < count; row++, to += U::elements)
                std::memcpy(to, x + row * ldx + u * U::elements, sizeof(T) * U::elements);
    }

    // `column` counts sixteens from here on.
    void multiply_panel(int64_t panel) const {
        const int64_t column = 2 * panel;
        if (rows <= SUMS / 2) return multiply_block<2>(0, column, Prefetch{8192 / sizeof(T), 1, EARLY / sizeof(T)});
        if (rows <= MAX_STRETCHED_ROWS) return multiply_stretches(column);
        for (int64_t c = column; c < column + 2; c += COLUMNS)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t next = start_of(c + COLUMNS) - start_of(c), done = units * block / blocks;
                multiply_block<COLUMNS>(block, c, Prefetch{next + done * STEP, (int)blocks});
            }
    }

    void multiply_stretches(int64_t column) const {
        f32x16 sums[2 / COLUMNS][MAX_STRETCHED_BLOCKS][SUMS] = {};
        for (int64_t unit = 0; unit < units; unit += STRETCH) {
            const int64_t count = units - unit < STRETCH ? units - unit : STRETCH;
            for (int c = 0; c < 2 / COLUMNS; c++)
                for (int64_t block = 0; block < blocks; block++) {
                    const Prefetch next{(STRETCH + STRETCH / blocks * block) * STEP, (int)blocks, EARLY / sizeof(T)};
                    add<COLUMNS>(block, column + c * COLUMNS, unit, count, next, sums[c][block]);
                }
        }
        for (int c = 0; c < 2 / COLUMNS; c++)
            for (int64_t block = 0; block < blocks; block++)
                write_sums<COLUMNS>(block, column + c * COLUMNS, sums[c][block]);
    }

    template <int C>
    void multiply_block(int64_t block, int64_t column, Prefetch prefetch) const {
        f32x16 sums[SUMS] = {};
        add<C>(block, column, 0, units, prefetch, sums);
        write_sums<C>(block, column, sums);
    }

    template <int C>
    void write_sums(int64_t block, int64_t column, const f32x16* sums) const {
        for (int64_t row = first_row(block); row < first_row(block + 1); row++)
            for (int c = 0; c < C; c++) write<T>(out, row, 16 * (column + c), *sums++);
    }

    // Adds the products of `count` units from `unit` on to the sums of a block's rows and C columns.
    template <int C, int M = SUMS / C>
    void add(int64_t block, int64_t column, int64_t unit, int64_t count, Prefetch prefetch, f32x16* sums) const {
        if constexpr (M > 0) {
            if (first_row(block + 1) - first_row(block) == M)
                return add_rows<C, M>(block, column, unit, count, prefetch, sums);
            add<C, M - 1>(block, column, unit, count, prefetch, sums);
        }
    }

    template <int C, int M>
    void add_rows(int64_t block, int64_t column, int64_t unit, int64_t count, Prefetch prefetch, f32x16* sums) const {
        const T *w = packed + start_of(column) + unit * STEP, *next = w + prefetch.offset;
        const T* in = x_packed + (first_row(block) * units + unit * M) * U::elements;
        auto line = [&](const T* from, int c) { return from + c / 2 * panel_size() + c % 2 * (STEP / 2); };
        f32x16 acc[M][C];
        for (int m = 0; m < M; m++)
            for (int c = 0; c < C; c++) acc[m][c] = sums[m * C + c];
        int wait = prefetch.every;
        for (int64_t u = 0; u < count; u++, w += STEP, in += M * U::elements) {
            if (--wait == 0) {
                for (int c = 0; c < C; c++) fetch(line(next, c), prefetch.early);
                next += STEP;
                wait = prefetch.every;
            }
            f32x16 weights[C];
            for (int c = 0; c < C; c++) weights[c] = U::load(line(w, c));
            for (int m = 0; m < M; m++) {
                float element;
                std::memcpy(&element, in + m * U::elements, sizeof element);
                for (int c = 0; c < C; c++) acc[m][c] = U::add_product(acc[m][c], weights[c], splat(element));
            }
        }
        for (int m = 0; m < M; m++)
            for (int c = 0; c < C; c++) sums[m * C + c] = acc[m][c];
    }
};

// weight[rows][width] becomes the packed columns from first_column on
template <class T>
void pack(const T* weight, int64_t ldw, int64_t rows, int64_t width, int64_t first_column, T* packed, int threads) {
    constexpr int e = Unit<T>::elements;
    on_threads(threads, [&](int thread, int team) {
        for (int64_t row = share(rows, thread, team), end = share(rows, thread + 1, team); row < end; row++) {
            int64_t column = first_column + row;
            T* to = packed + column / PANEL * PANEL * width + column % PANEL * e;
            const T* from = weight + row * ldw;
            for (int64_t k = 0; k < width; k += e, to += PANEL * e) std::memcpy(to, from + k, sizeof(T) * e);
        }
    });
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_linear_pack(int dtype, const void* weight, int64_t ldw, int64_t rows, int64_t width,
                                        int64_t first_column, void* packed, int threads) {
    on_packed_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        pack((const T*)weight, ldw, rows, width, first_column, (T*)packed, threads);
    });
}

LORAMUX_EXPORT void loramux_linear(int dtype, const void* x, int64_t ldx, int64_t rows, int64_t width,
                                   const void* packed, const void* bias, void* y, int64_t ldy, int64_t columns,
                                   int threads) {
    on_packed_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        Product<T>((const T*)x, ldx, rows, width, (const T*)packed, Output{y, ldy, columns, bias}, threads).run(threads);
    });
}
