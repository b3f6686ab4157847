// y = x @ W.T + bias with W as a checkpoint has it, row by row: for an output head, which the embedding shares, so that
// panels would be a second copy of it. And for heads, each with its own x, W and y, whose matrices are small.
//
// Sixteen sums at a time, of R rows of x and 16 / R rows of W. A row's answer does not depend on the rows beside it.
#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

constexpr int64_t EARLY = 32 << 10;  // bytes

template <class T, class W>
class RowProduct {
    using U = Unit<T>;

   public:
    const T *x, *bias;
    const W* weight;
    int64_t ldx, rows, width, columns;
    T* y;
    int64_t ldy;

    int64_t heads, x_head, y_head;  // elements from a head's rows to the next one's; W is [heads][columns][width]

    void run(int threads) const {
        const int64_t blocks = (columns + 15) / 16;
        threads = threads_for(heads * columns * width * (int64_t)sizeof(W), threads);
        Runs runs(heads * blocks, threads);
        on_threads(threads, [&](int, int) {
            runs.take([&](int64_t block, int64_t end) {
                for (; block < end; block++) of_head(block / blocks).multiply_columns(block % blocks * 16);
            });
        });
    }

   private:
    RowProduct of_head(int64_t head) const {
        RowProduct product = *this;
        product.x += head * x_head;
        product.y += head * y_head;
        product.weight += head * columns * width;
        return product;
    }

    // Sixteen columns. Four rows of W stay in the first-level cache from one group of rows of x to the next.
    void multiply_columns(int64_t column) const {
        int64_t row = rows / 4 * 4;
        for (int64_t c = column; c < column + 16; c += 4)
            for (int64_t first = 0; first < row; first += 4) multiply<4>(first, c, (int)(row / 4));
        for (; row + 2 <= rows; row += 2)
            for (int64_t c = column; c < column + 16; c += 8) multiply<2>(row, c);
        if (row < rows) multiply<1>(row, column);
    }

    // Rows of W are too short for processors to foresee the next ones: each of `groups` groups of rows fetches its share.
    template <int R>
    void multiply(int64_t row, int64_t column, int groups = 1) const {
        constexpr int C = 16 / R;
        const int64_t last = columns - 1;
        if (column > last) return;
        const W* w[C];  // past the last column its row is read again, and nothing written
        for (int c = 0; c < C; c++) w[c] = weight + (column + c < last ? column + c : last) * width;
        const T* in = x + row * ldx;
        constexpr int step = 16 * U::elements;
        f32x16 acc[16] = {};
        int64_t k = 0;
        int wait = row < R * groups ? 1 + (int)(row / R) : -1;
        for (; k + step <= width; k += step) {
            const bool fetches = --wait == 0;
            if (fetches) wait = groups;
            f32x16 own[R];
            for (int r = 0; r < R; r++) own[r] = U::load(in + r * ldx + k);
            for (int c = 0; c < C; c++) {
                const f32x16 other = U::load(w[c] + k);
                if (fetches) fetch(w[c] + C * width + k, EARLY / sizeof(W));
                for (int r = 0; r < R; r++) acc[r * C + c] = U::add_product(acc[r * C + c], own[r], other);
            }
        }
        if (const int64_t rest = width - k)
            for (int c = 0; c < C; c++)
                for (int r = 0; r < R; r++)
                    acc[r * C + c] = U::add_product(acc[r * C + c], U::load_first(in + r * ldx + k, rest),
                                                    U::load_first(w[c] + k, rest));
        float sums[R][16] = {};  // C of them
        for (int i = 0; i < 16; i += 4) sums_of_four(acc + i, sums[i / C] + i % C);
        const int64_t count = columns - column < C ? columns - column : C;
        for (int r = 0; r < R; r++) {
            f32x16 value = load(sums[r]);
            if (bias) value += load_first(bias + column, count);
            store_first(y + (row + r) * ldy + column, value, count);
        }
    }
};

}  // namespace
}  // namespace loramux

using namespace loramux;

// The weights' dtype is that of x, or any where x is floats.
LORAMUX_EXPORT void loramux_rows_linear(int dtype, int weight_dtype, const void* x, int64_t ldx, int64_t rows,
                                        int64_t width, const void* weight, const void* bias, void* y, int64_t ldy,
                                        int64_t columns, int64_t heads, int64_t x_head, int64_t y_head, int threads) {
    auto multiply = [&](auto zero, auto zero_weight) {
        using T = decltype(zero);
        using W = decltype(zero_weight);
        const RowProduct<T, W> product{
            (const T*)x, (const T*)bias, (const W*)weight, ldx, rows, width, columns, (T*)y, ldy, heads, x_head, y_head};
        product.run(threads);
    };
    if (dtype == FLOAT32)
        on_dtype(weight_dtype, [&](auto zero_weight) { multiply(float{}, zero_weight); });
    else
        on_dtype(dtype, [&](auto zero) { multiply(zero, zero); });
}
