// y = x @ (scale * W).T + bias with integers W of -127 to 127, packed into panels of 32 output columns:
//
//     packed[panel][k / E][32][E]      E = 2 where the processor multiplies pairs of 16-bit integers (VNNI), else 1
//
// With VNNI a stretch of a row of x becomes 16-bit integers and a scale of its own: sixteen bits of its largest element,
// which is finer than bf16, and sums of products are exact. Elsewhere W is widened to floats on its way. A row's answer
// does not depend on the rows beside it.
#include <cmath>
#include <vector>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

typedef int8_t i8x16 __attribute__((vector_size(16)));

constexpr int PANEL = 32;
constexpr int64_t STRETCH = 256;  // 256 * 32767 * 127 < 2^31: sums of a stretch cannot overflow

struct Output {
    void* y;
    int64_t ldy, columns;
    const void* bias;
    const float* scales;
};

template <class T>
void write(const Output& out, int64_t row, int64_t column, f32x16 value) {
    const int64_t left = out.columns - column;
    if (left <= 0) return;
    value *= load_first(out.scales + column, left);
    if (out.bias) value += load_first((const T*)out.bias + column, left);
    store_first((T*)out.y + row * out.ldy + column, value, left);
}

#if defined(__AVX512VNNI__)
constexpr int E = 2, MAX_ROWS = 12;
typedef int16_t Element;
typedef i32x16 Sum;

inline void add_products(Sum& sum, const int8_t* w, const Element* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    __m512i column = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w));
    sum = (i32x16)_mm512_dpwssd_epi32((__m512i)sum, column, _mm512_set1_epi32(pair));
}

// One stretch of a row as integers; returns their scale, NaN where an element is not finite.
template <class T>
float prepare(const T* x, int64_t count, Element* to) {
    f32x16 highest = {}, poison = {};
    for (int64_t k = 0; k < count; k += 16) {
        f32x16 v = load_first(x + k, count - k);
        highest = max(highest, max(v, -v));
        poison += v - v;
    }
    const float scale = largest(highest) / 32767.f, inverse = scale > 0.f ? 1.f / scale : 0.f;
    for (int64_t k = 0; k < count; k += 16) {
        f32x16 v = load_first(x + k, count - k) * inverse;
        __m256i rounded = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)v));
        std::memcpy(to + k, &rounded, sizeof rounded);
    }
    return scale + sum(poison);
}
#else
constexpr int E = 1;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 3;
#endif
typedef float Element;
typedef f32x16 Sum;

inline void add_products(Sum& sum, const int8_t* w, const Element* x) {
    i8x16 narrow;
    std::memcpy(&narrow, w, sizeof narrow);
    sum += __builtin_convertvector(narrow, f32x16) * *x;
}

template <class T>
float prepare(const T* x, int64_t count, Element* to) {
    for (int64_t k = 0; k < count; k += 16) store(to + k, load_first(x + k, count - k));
    return 1.f;
}
#endif

inline f32x16 as_floats(f32x16 v) { return v; }
inline f32x16 as_floats(i32x16 v) { return __builtin_convertvector(v, f32x16); }

// Rows of x as elements, padded to whole stretches, and the scale of each stretch.
struct Prepared {
    std::vector<Element> elements;
    std::vector<float> scales;
    int64_t stretches = 0;

    template <class T>
    void fill(const T* x, int64_t ldx, int64_t rows, int64_t width, int threads) {
        stretches = (width + STRETCH - 1) / STRETCH;
        elements.resize(rows * stretches * STRETCH);
        scales.resize(rows * stretches);
        on_threads(threads_for(rows * width * (int64_t)sizeof(T), threads), [&](int thread, int team) {
            const int64_t last = share(rows * stretches, thread + 1, team);
            for (int64_t i = share(rows * stretches, thread, team); i < last; i++) {
                const int64_t row = i / stretches, k = i % stretches * STRETCH;
                const int64_t count = width - k < STRETCH ? width - k : STRETCH;
                Element* to = elements.data() + i * STRETCH;
                for (int64_t pad = count; pad < STRETCH; pad++) to[pad] = 0;
                scales[i] = prepare(x + row * ldx + k, count, to);
            }
        });
    }
};

// M rows times P panels; what follows in memory is fetched on the way.
template <class T, int M, int P>
void multiply_block(const Prepared& x, int64_t row, int64_t depth, const int8_t* packed, int64_t panel, const Output& out) {
    const int64_t panel_size = PANEL * depth, ldx = x.stretches * STRETCH;
    const int8_t* w = packed + panel * panel_size;
    const Element* in = x.elements.data() + row * ldx;
    f32x16 total[M][2 * P] = {};
    for (int64_t stretch = 0; stretch < x.stretches; stretch++) {
        Sum sums[M][2 * P] = {};
        const int64_t end = (stretch + 1) * STRETCH < depth ? (stretch + 1) * STRETCH : depth;
        for (int64_t k = stretch * STRETCH; k < end; k += E, w += PANEL * E) {
            for (int p = 0; p < P; p++) __builtin_prefetch(w + p * panel_size + 4096);
            for (int c = 0; c < 2 * P; c++)
                for (int m = 0; m < M; m++)
                    add_products(sums[m][c], w + c / 2 * panel_size + c % 2 * (PANEL / 2) * E, in + m * ldx + k);
        }
        for (int m = 0; m < M; m++)
            for (int c = 0; c < 2 * P; c++)
                total[m][c] += as_floats(sums[m][c]) * x.scales[(row + m) * x.stretches + stretch];
    }
    for (int m = 0; m < M; m++)
        for (int c = 0; c < 2 * P; c++) write<T>(out, row + m, panel * PANEL + 16 * c, total[m][c]);
}

template <class T, int P, int M = MAX_ROWS / P>
void multiply_rows(int64_t rows, const Prepared& x, int64_t row, int64_t depth, const int8_t* packed, int64_t panel,
                   const Output& out) {
    if constexpr (M > 0) {
        if (rows == M) return multiply_block<T, M, P>(x, row, depth, packed, panel, out);
        multiply_rows<T, P, M - 1>(rows, x, row, depth, packed, panel, out);
    }
}

template <class T>
void multiply(const T* x, int64_t ldx, int64_t rows, int64_t width, const int8_t* packed, const Output& out,
              int threads) {
    static thread_local Prepared prepared;
    prepared.fill(x, ldx, rows, width, threads);
    const Prepared& ready = prepared;  // the caller's, on every thread of the team
    const int64_t panels = (out.columns + PANEL - 1) / PANEL, depth = (width + E - 1) / E * E;
    const int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    on_threads(threads_for(panels * PANEL * depth, threads), [&](int thread, int team) {
        int64_t panel = share(panels, thread, team), end = share(panels, thread + 1, team);
        if (rows <= MAX_ROWS / 2)
            for (; panel + 2 <= end; panel += 2) multiply_rows<T, 2>(rows, ready, 0, depth, packed, panel, out);
        for (; panel < end; panel++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t row = rows * block / blocks, next = rows * (block + 1) / blocks;
                multiply_rows<T, 1>(next - row, ready, row, depth, packed, panel, out);
            }
    });
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT int loramux_int8_unit() { return E; }

LORAMUX_EXPORT void loramux_int8_linear(int dtype, const void* x, int64_t ldx, int64_t rows, int64_t width,
                                        const void* packed, const float* scales, const void* bias, void* y, int64_t ldy,
                                        int64_t columns, int threads) {
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        Output out{y, ldy, columns, bias, scales};
        multiply((const T*)x, ldx, rows, width, (const int8_t*)packed, out, threads);
    });
}
