// y = x @ W.T + bias, with W packed once into panels of 32 output columns:
//
//     packed[panel][k / E][32][E]      E elements fill four bytes: one float, or two bf16
//
// so that a panel streams from memory in the order of use. Every output is one chain of sums over k, whatever the
// number of rows: a row's answer does not depend on the rows beside it, and is the same while decoding as in prefill.
#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

constexpr int PANEL = 32;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;  // 12 x 2 sums, 2 columns, 1 broadcast of 32 registers
#else
constexpr int MAX_ROWS = 3;
#endif

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

// What a block fetches while it computes, for processors do not foresee a panel's end: two lines of each of its panels
// every `every` steps, from `offset` elements after each panel's start.
struct Prefetch {
    int64_t offset;
    int every;
};

// M rows times P panels
template <class T, int M, int P>
void multiply_block(const T* x, int64_t ldx, int64_t row, int64_t width, const T* packed, int64_t panel,
                    Prefetch prefetch, const Output& out) {
    using U = Unit<T>;
    constexpr int step = PANEL * U::elements;
    const int64_t panel_size = PANEL * width;
    const T *w = packed + panel * panel_size, *fetch = w + prefetch.offset, *in = x + row * ldx;
    f32x16 acc[M][2 * P] = {};
    int wait = prefetch.every;
    for (int64_t k = 0; k < width; k += U::elements, w += step) {
        if (--wait == 0) {
            for (int p = 0; p < 2 * P; p++) __builtin_prefetch(fetch + p / 2 * panel_size + p % 2 * step / 2);
            fetch += step;
            wait = prefetch.every;
        }
        f32x16 column[2 * P];
        for (int c = 0; c < 2 * P; c++) column[c] = U::load(w + c / 2 * panel_size + c % 2 * step / 2);
        for (int m = 0; m < M; m++) {
            float unit;
            std::memcpy(&unit, in + m * ldx + k, sizeof unit);
            for (int c = 0; c < 2 * P; c++) acc[m][c] = U::add_product(acc[m][c], column[c], splat(unit));
        }
    }
    for (int m = 0; m < M; m++)
        for (int c = 0; c < 2 * P; c++) write<T>(out, row + m, panel * PANEL + 16 * c, acc[m][c]);
}

template <class T, int P, int M = MAX_ROWS / P>
void multiply_rows(int64_t rows, const T* x, int64_t ldx, int64_t row, int64_t width, const T* packed, int64_t panel,
                   Prefetch prefetch, const Output& out) {
    if constexpr (M > 0) {
        if (rows == M) return multiply_block<T, M, P>(x, ldx, row, width, packed, panel, prefetch, out);
        multiply_rows<T, P, M - 1>(rows, x, ldx, row, width, packed, panel, prefetch, out);
    }
}

template <class T>
void multiply(const T* x, int64_t ldx, int64_t rows, int64_t width, const T* packed, const Output& out, int threads) {
    const int64_t panels = (out.columns + PANEL - 1) / PANEL, panel_size = PANEL * width;
    const int64_t row_blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const Prefetch soon{4096 / sizeof(T), 1};
    on_threads(threads_for(panels * panel_size * (int64_t)sizeof(T), threads), [&](int thread, int team) {
        int64_t panel = share(panels, thread, team), end = share(panels, thread + 1, team);
        if (rows <= MAX_ROWS / 2)
            for (; panel + 2 <= end; panel += 2) multiply_rows<T, 2>(rows, x, ldx, 0, width, packed, panel, soon, out);
        for (; panel < end; panel++)
            for (int64_t block = 0; block < row_blocks; block++) {
                int64_t row = rows * block / row_blocks, next = rows * (block + 1) / row_blocks;
                int64_t done = width * block / row_blocks / Unit<T>::elements * Unit<T>::elements;
                Prefetch later{panel_size + done * PANEL, (int)row_blocks};
                multiply_rows<T, 1>(next - row, x, ldx, row, width, packed, panel, row_blocks == 1 ? soon : later, out);
            }
    });
}

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
        multiply((const T*)x, ldx, rows, width, (const T*)packed, Output{y, ldy, columns, bias}, threads);
    });
}
