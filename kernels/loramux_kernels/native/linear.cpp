// y = x @ W.T + bias, with W packed once into panels of 32 output columns:
//
//     packed[panel][k / E][32][E]      E elements are a unit: one float, or two bf16, or four by Arm's squares
//     packed[panel][k][32]             f16 that are multiplied as floats
//     packed[panel][k][16][2]          bf16 that are multiplied as floats: columns c and 16 + c lie side by side
//
// so that a panel streams from memory in the order of use. x is packed likewise, for each call, into blocks of few rows:
//
//     rows[block][k / E][rows of the block][E]
//
// A block's rows and columns of a panel are sums in registers. Every output is one chain of sums over k, whatever the number of
// rows: a row's answer does not depend on the rows beside it, and is the same while decoding as in prefill.
//
// Squares multiply two rows with two columns, and a register holds their four sums. One row takes both places: it costs as many
// instructions as by pairs.
#include <algorithm>
#include <vector>

#include "abi.hpp"
#include "panels.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

// GCC keeps sums in memory that it addresses by a loop's counter. By itself it unrolls small loops only.
#define UNROLL _Pragma("GCC unroll 16")

// Columns go by sixteens. SUMS of rows and sixteens are in registers; many rows come COLUMNS sixteens at a time.
#if defined(__AVX512F__)
constexpr int SUMS = 24, COLUMNS = 2;  // 12 x 2 sums, 2 columns, 1 broadcast of 32 registers
#else
constexpr int SUMS = 6, COLUMNS = 1;  // in halves: 6 x 2 sums, 2 columns, 1 broadcast of 16 registers
#endif
constexpr int MAX_ROWS = SUMS / COLUMNS;  // even
constexpr int64_t MAX_STRETCHED_ROWS = 48;
constexpr int WORTH_TRANSPOSING = 4;  // from so many rows on, sixteen units at a time are packed faster than one

// The blocks of few rows meet a panel in stretches of this many bytes of a row: for all but the first they are still in the
// first-level cache, and memory is read all the time, not only while the first block is multiplied.
constexpr int64_t STRETCH = 256;
constexpr int64_t MAX_STRETCHED_BLOCKS = (MAX_STRETCHED_ROWS + MAX_ROWS - 1) / MAX_ROWS;

// A unit of `rows` rows of x together, and their sums: sixteen lanes for each of the rows.
template <class T>
struct RowUnit : Unit<T> {
    static constexpr int rows = 1;
    static f32x16 load_rows(const T* p, int64_t) {
        float unit;
        std::memcpy(&unit, p, sizeof unit);
        return splat(unit);
    }
    static f32x16 sum_of_row(const f32x16* sums, int64_t, int64_t) { return *sums; }
};

#if LORAMUX_BF16_SQUARES
template <>
struct RowUnit<bf16> : Unit<bf16> {
    static constexpr int elements = 4, rows = 2;
    static f32x16 load_rows(const bf16* p, int64_t count) {
        uint64_t unit;
        std::memcpy(&unit, p, sizeof unit);
        return repeated<f32x16>(count > 1 ? vreinterpretq_u64_u16(vld1q_u16((const uint16_t*)p)) : vdupq_n_u64(unit));
    }
    static f32x16 add_product(f32x16 sum, f32x16 columns, f32x16 rows) { return add_squares(sum, rows, columns); }
    static f32x16 sum_of_row(const f32x16* sums, int64_t next, int64_t row) {
        return row % 2 ? row_of_squares<1>(sums[0], sums[next]) : row_of_squares<0>(sums[0], sums[next]);
    }
};
#endif

// How weights W lie in a panel for a product of T.
template <class T, class W>
struct Panel {
    static constexpr int E = RowUnit<T>::elements;
    static constexpr int elements = PANEL * E;  // for one unit of k
    static void put(const W* from, int column, W* to) { std::memcpy(to + column * E, from, sizeof(W) * E); }
    // Sixteen columns by one row of x, or a half of them by two.
    static f32x16 load(const W* unit, int sixteen, int half) {
        return Unit<T>::load(unit + sixteen * (elements / 2) + half * (elements / 4));
    }
};

template <>
struct Panel<float, bf16> {
    static constexpr int elements = PANEL;
    static void put(const bf16* from, int column, bf16* to) { to[column % 16 * 2 + column / 16] = *from; }
    static f32x16 load(const bf16* unit, int sixteen, int) {
        const u32x16 pairs = read_lanes<u32x16>((const uint32_t*)unit);
        return bits_of<f32x16>(sixteen == 0 ? pairs << 16 : pairs & 0xffff0000u);
    }
};

// What a block fetches while it computes, for processors do not foresee a panel's end: a line of each of its sixteens
// of columns every `every` steps, from `offset` elements after where it starts in each.
struct Prefetch {
    int64_t offset;
    int every;
    int64_t early = 0;  // the same lines, which costs nothing
};
constexpr int64_t EARLY = 16 << 10;  // bytes

// Rows of x, and their units side by side by blocks.
template <class T>
struct Rows {
    using U = RowUnit<T>;
    const T* x;
    int64_t ldx, count, units, blocks = (count + MAX_ROWS - 1) / MAX_ROWS;

    int64_t first(int64_t block) const {
        return std::min(count, (count + U::rows - 1) / U::rows * block / blocks * U::rows);
    }

    // In memory of the calling thread, until its next call.
    const T* packed(int threads) const {
        if (count == 1) return x;
        static thread_local std::vector<T> memory;
        const int64_t elements = count * units * U::elements;
        if ((int64_t)memory.size() < elements) memory.resize(elements);
        T* to = memory.data();
        // A thread packs rows that follow one another, which it has mostly written itself.
        on_threads(threads_for(2 * elements * (int64_t)sizeof(T), threads), [&](int thread, int team) {
            const int64_t last = share(blocks * units, thread + 1, team);
            for (int64_t at = share(blocks * units, thread, team); at < last;) {
                const int64_t block = at / units, unit = at % units, left = last - at;
                const int64_t row = first(block), rows = first(block + 1) - row, length = std::min(units - unit, left);
                pack(x + row * ldx + unit * U::elements, rows, length, to + (row * units + unit * rows) * U::elements);
                at += length;
            }
        });
        return to;
    }

   private:
    // A unit of one row is four bytes, and moves as a float.
    void pack(const T* from, int64_t rows, int64_t length, T* to) const {
        int64_t u = 0;
        if (U::rows == 1 && rows >= WORTH_TRANSPOSING)
            for (; u + 16 <= length; u += 16) {
                f32x16 tile[16] = {};
                for (int64_t row = 0; row < rows; row++) tile[row] = U::load(from + row * ldx + u * U::elements);
                transpose(tile);
                for (int i = 0; i < 16; i++, to += rows * U::elements) store_first((float*)to, tile[i], rows);
            }
        for (; u < length; u++)
            for (int64_t row = 0; row < rows; row++, to += U::elements)
                std::memcpy(to, from + row * ldx + u * U::elements, sizeof(T) * U::elements);
    }
};

template <class T, class W>
class Product {
    using U = RowUnit<T>;
    using P = Panel<T, W>;
    static constexpr int STEP = P::elements;
    static constexpr int max_rows(int sixteens) { return SUMS / sixteens / U::rows * U::rows; }

   public:
    Product(const Rows<T>& in, const T* x, const W* packed, const Output& out)
        : in(in), rows(in.count), blocks(in.blocks), units(in.units), x(x), packed(packed), out(out) {}

    void multiply(int64_t panel, int64_t end) const {
        if (rows <= max_rows(4))
            for (; panel + 2 <= end; panel += 2) multiply_block<4>(0, 2 * panel, Prefetch{8192 / sizeof(W), 1});
        for (; panel < end; panel++) multiply_panel(panel);
    }

   private:
    const Rows<T>& in;
    const int64_t rows, blocks, units;
    const T* const x;
    const W* const packed;
    const Output& out;

    int64_t panel_size() const { return units * STEP; }
    int64_t start_of(int64_t column) const { return column / 2 * panel_size() + column % 2 * (STEP / 2); }

    // `column` counts sixteens from here on.
    void multiply_panel(int64_t panel) const {
        const int64_t column = 2 * panel;
        if (rows <= max_rows(2)) return multiply_block<2>(0, column, Prefetch{8192 / sizeof(W), 1, EARLY / sizeof(W)});
        if (rows <= MAX_STRETCHED_ROWS) return multiply_stretches(column);
        for (int64_t c = column; c < column + 2; c += COLUMNS)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t next = start_of(c + COLUMNS) - start_of(c), done = units * block / blocks;
                multiply_block<COLUMNS>(block, c, Prefetch{next + done * STEP, (int)blocks});
            }
    }

    void multiply_stretches(int64_t column) const {
        f32x16 sums[2 / COLUMNS][MAX_STRETCHED_BLOCKS][SUMS] = {};
        constexpr int64_t stretch = STRETCH / (U::elements * sizeof(T));
        for (int64_t unit = 0; unit < units; unit += stretch) {
            const int64_t count = units - unit < stretch ? units - unit : stretch;
            for (int c = 0; c < 2 / COLUMNS; c++)
                for (int64_t block = 0; block < blocks; block++) {
                    const Prefetch next{(stretch + stretch / blocks * block) * STEP, (int)blocks, EARLY / sizeof(W)};
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
        const int64_t first = in.first(block), count = in.first(block + 1) - first;
        for (int64_t m = 0; m < count; m++)
            for (int c = 0; c < C; c++)
                write<T>(out, first + m, 16 * (column + c), U::sum_of_row(sums + m / U::rows * U::rows * C + c, C, m));
    }

    // Adds the products of `count` units from `unit` on to the sums of a block's rows and C columns.
    template <int C, int M = max_rows(C)>
    void add(int64_t block, int64_t column, int64_t unit, int64_t count, Prefetch prefetch, f32x16* sums) const {
        if constexpr (M > 0) {
            if (in.first(block + 1) - in.first(block) == M)
                return add_rows<C, M>(block, column, unit, count, prefetch, sums);
            add<C, M - 1>(block, column, unit, count, prefetch, sums);
        }
    }

    template <int C, int M>
    void add_rows(int64_t block, int64_t column, int64_t unit, int64_t count, Prefetch prefetch, f32x16* sums) const {
        constexpr int LINE = 64 / sizeof(W), EACH = STEP > LINE ? 1 : 2;  // both sixteens may share a line
        constexpr int SETS = (M + U::rows - 1) / U::rows * U::rows;
        const int first = C == 1 ? column % 2 : 0;
        const W* w = packed + column / 2 * panel_size() + unit * STEP;
        const W* next = packed + start_of(column) + unit * STEP + prefetch.offset;
        const T* from = x + (in.first(block) * units + unit * M) * U::elements;
        f32x16 acc[SETS][C];
        UNROLL for (int m = 0; m < SETS; m++)
            UNROLL for (int c = 0; c < C; c++) acc[m][c] = sums[m * C + c];
        int wait = prefetch.every;
        for (int64_t u = 0; u < count; u++, w += STEP, from += M * U::elements) {
            if (--wait == 0) {
                for (int c = 0; c < C; c += EACH)
                    for (int line = 0; line < EACH * STEP / 2; line += LINE) fetch(next + start_of(c) + line, prefetch.early);
                next += STEP;
                wait = prefetch.every;
            }
            UNROLL for (int part = 0; part < U::rows; part++) {
                f32x16 weights[C];
                UNROLL for (int c = 0; c < C; c++) weights[c] = P::load(w + c / 2 * panel_size(), (first + c) % 2, part);
                UNROLL for (int m = 0; m < M; m += U::rows) {
                    const f32x16 own = U::load_rows(from + m * U::elements, M - m);
                    UNROLL for (int c = 0; c < C; c++) acc[m + part][c] = U::add_product(acc[m + part][c], weights[c], own);
                }
            }
        }
        UNROLL for (int m = 0; m < SETS; m++)
            UNROLL for (int c = 0; c < C; c++) sums[m * C + c] = acc[m][c];
    }
};

// Few rows are packed by every thread for itself: on another core's caches it would wait longer.
template <class T, class W>
void multiply(const Rows<T>& rows, const W* packed, const Output& out, int threads) {
    const int64_t panels = (out.columns + PANEL - 1) / PANEL;
    threads = threads_for(panels * rows.units * Panel<T, W>::elements * (int64_t)sizeof(W), threads);
    const T* shared = rows.count > MAX_STRETCHED_ROWS ? rows.packed(threads) : nullptr;
    Runs runs(panels, threads);
    on_threads(threads, [&](int, int) {
        const Product<T, W> product(rows, shared ? shared : rows.packed(1), packed, out);
        runs.take([&](int64_t panel, int64_t end) { product.multiply(panel, end); });
    });
}

// weight[rows][width] becomes the packed columns from first_column on
template <class T, class W>
void pack(const W* weight, int64_t ldw, int64_t rows, int64_t width, int64_t first_column, W* packed, int threads) {
    using P = Panel<T, W>;
    on_threads(threads, [&](int thread, int team) {
        for (int64_t row = share(rows, thread, team), end = share(rows, thread + 1, team); row < end; row++) {
            const int64_t column = first_column + row;
            W* to = packed + column / PANEL * PANEL * width;
            const W* from = weight + row * ldw;
            for (int64_t k = 0; k < width; k += RowUnit<T>::elements, to += P::elements)
                P::put(from + k, column % PANEL, to);
        }
    });
}

// Products of what dtype, by weights of what dtype.
template <class Body>
void on_panels(int dtype, int weight_dtype, const Body& body) {
    if (dtype == FLOAT32) on_dtype(weight_dtype, [&](auto zero_weight) { body(float{}, zero_weight); });
    if (dtype == BFLOAT16 && LORAMUX_BF16_PAIRS) return body(bf16{}, bf16{});
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_linear_pack(int dtype, int weight_dtype, const void* weight, int64_t ldw, int64_t rows,
                                        int64_t width, int64_t first_column, void* packed, int threads) {
    on_panels(dtype, weight_dtype, [&](auto zero, auto zero_weight) {
        using W = decltype(zero_weight);
        pack<decltype(zero)>((const W*)weight, ldw, rows, width, first_column, (W*)packed, threads);
    });
}

LORAMUX_EXPORT void loramux_linear(int dtype, int weight_dtype, const void* x, int64_t ldx, int64_t rows, int64_t width,
                                   const void* packed, const void* bias, void* y, int64_t ldy, int64_t columns,
                                   int threads) {
    on_panels(dtype, weight_dtype, [&](auto zero, auto zero_weight) {
        using T = decltype(zero);
        using W = decltype(zero_weight);
        const Rows<T> in{(const T*)x, ldx, rows, width / RowUnit<T>::elements};
        if (rows > 0) multiply(in, (const W*)packed, Output{y, ldy, columns, bias}, threads);
    });
}
