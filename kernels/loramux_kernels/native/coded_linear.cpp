// y = x @ W.T + bias with a coded W: w = scale * (value(code) - offset), a scale and an offset for each column and group
// of `group` neighbouring k. Codes are packed into panels of 32 output columns:
//
//     packed[panel][k / E][32][E]      E elements of a column lie side by side, two four-bit codes in a byte
//     scales[group][columns]           and offsets alike, already multiplied with their scales; whole panels; floats,
//                                      of MXFP4 the exponents of powers of two
//
// With VNNI integer codes are multiplied as integers: a stretch of a row of x becomes 16-bit integers and a scale of its
// own, sixteen bits of its largest element, which is finer than bf16, and sums of products are exact. Other codes, and
// other processors, widen W to floats on its way. A row's answer does not depend on the rows beside it.
#include <cmath>
#include <vector>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

constexpr int PANEL = 32;
constexpr int64_t STRETCH = 256;  // 256 * 32767 * 255 < 2^31: sums of a stretch cannot overflow

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 3;
#endif

struct Output {
    void* y;
    int64_t ldy, columns;
    const float* bias;
    void (*write)(const Output&, int64_t row, int64_t column, f32x16 value);  // in the dtype of y
};

struct Weights {
    const uint8_t* packed;
    const void* scales;
    const float* offsets;           // none: null
    const float* values;            // of sixteen codes, where a table says them
    int64_t width, group, columns;  // columns: whole panels
};

template <class T>
void write(const Output& out, int64_t row, int64_t column, f32x16 value) {
    const int64_t left = out.columns - column;
    if (left <= 0) return;
    if (out.bias) value += load_first(out.bias + column, left);
    store_first((T*)out.y + row * out.ldy + column, value, left);
}

// The scales of a group of neighbouring k in sixteen columns, as they are held.

struct FloatScales {
    static f32x16 scales(const Weights& w, int64_t at) { return load((const float*)w.scales + at); }
};

// A byte s for 2^(s - 127). Zero alone stands for a float without an exponent.
struct ExponentScales {
    static f32x16 scales(const Weights& w, int64_t at) {
        const i32x16 exponents = read_lanes<i32x16>((const uint8_t*)w.scales + at);
        return bits_of<f32x16>(exponents << 23 | ((exponents == 0) & (1 << 22)));
    }
};

// How a row of x is multiplied: as integers with a scale for each stretch, or as it is.

struct Floats {
    typedef float Element;
    typedef f32x16 Sum;
    template <class T>
    static float prepare(const T* x, int64_t count, Element* to) {
        for (int64_t k = 0; k < count; k += 16) store(to + k, load_first(x + k, count - k));
        return 1.f;
    }
    static f32x16 as_floats(Sum sum) { return sum; }
};

#if defined(__AVX512VNNI__)
struct Integers {
    typedef int16_t Element;
    typedef i32x16 Sum;
    // One stretch of a row as integers; returns their scale, NaN where an element is not finite.
    template <class T>
    static float prepare(const T* x, int64_t count, Element* to) {
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
    static f32x16 as_floats(Sum sum) { return converted<f32x16>(sum); }
};

// A coding decodes E elements of sixteen columns once, and `add` multiplies them with E elements of any row of x.
struct Pairs : Integers {
    static constexpr int E = 2;
    typedef __m512i Decoded;
    static void add(Sum& sum, Decoded w, const Element* x) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        sum = (i32x16)_mm512_dpwssd_epi32((__m512i)sum, w, _mm512_set1_epi32(pair));
    }
};

struct Int8 : Pairs, FloatScales {
    static constexpr int BITS = 8;
    explicit Int8(const Weights&) {}
    Decoded decode(const uint8_t* w) const { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w)); }
};

struct Int4 : Pairs, FloatScales {
    static constexpr int BITS = 4;
    explicit Int4(const Weights&) {}
    Decoded decode(const uint8_t* w) const {
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)w));
        __m512i pairs = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), _mm512_set1_epi32(0xf000f));
        return _mm512_sub_epi16(pairs, _mm512_set1_epi16(8));
    }
};

// Floats of 2 bits of exponent and 1 of mantissa: half of an integer each.
template <class Scales>
struct E2m1 : Pairs, Scales {
    static constexpr int BITS = 4;
    explicit E2m1(const Weights&) {}
    Decoded decode(const uint8_t* w) const {
        const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        const __m128i nibble = _mm_set1_epi8(15), bytes = _mm_loadu_si128((const __m128i*)w);
        const __m128i first = _mm_shuffle_epi8(twice, _mm_and_si128(bytes, nibble));
        const __m128i second = _mm_shuffle_epi8(twice, _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
        return _mm512_cvtepi8_epi16(
            _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second)));
    }
    static f32x16 as_floats(Sum sum) { return Pairs::as_floats(sum) * 0.5f; }
};
#else
struct Int8 : Floats, FloatScales {
    static constexpr int BITS = 8, E = 1;
    typedef f32x16 Decoded;
    explicit Int8(const Weights&) {}
    Decoded decode(const uint8_t* w) const {
        return read_lanes<f32x16>((const int8_t*)w);
    }
    static void add(Sum& sum, Decoded w, const Element* x) { sum += w * *x; }
};
#endif

struct TwoFloats {
    f32x16 low, high;
};

struct FloatPairs : Floats {
    static constexpr int BITS = 4, E = 2;
    typedef TwoFloats Decoded;
    static void add(Sum& sum, const Decoded& w, const Element* x) {
        sum += w.low * x[0];
        sum += w.high * x[1];
    }
};

#if !defined(__AVX512VNNI__)
struct Int4 : FloatPairs, FloatScales {
    explicit Int4(const Weights&) {}
    Decoded decode(const uint8_t* w) const {
        i32x16 bytes = read_lanes<i32x16>(w);
        return {converted<f32x16>((bytes & 15) - 8), converted<f32x16>((bytes >> 4) - 8)};
    }
};
#endif

// Sixteen values that a table says, such as those of NF4.
struct TablePairs : FloatPairs {
    f32x16 values;
    explicit TablePairs(const Weights& w) : values(load(w.values)) {}
#if defined(__AVX512F__)
    Decoded decode(const uint8_t* w) const {  // the permutation reads the lowest four bits only
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)w));
        return {(f32x16)_mm512_permutexvar_ps(bytes, (__m512)values),
                (f32x16)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), (__m512)values)};
    }
#else
    f32x16 look_up(i32x16 codes) const {
        float from[16], found[16];
        int32_t places[16];
        store(from, values);
        write_lanes(places, codes);
        for (int i = 0; i < 16; i++) found[i] = from[places[i]];
        return load(found);
    }
    Decoded decode(const uint8_t* w) const {
        i32x16 bytes = read_lanes<i32x16>(w);
        return {look_up(bytes & 15), look_up(bytes >> 4)};
    }
#endif
};

template <class Scales>
struct ScaledTable : TablePairs, Scales {
    using TablePairs::TablePairs;
};

typedef ScaledTable<FloatScales> Table4;
#if !defined(__AVX512VNNI__)
template <class Scales>
using E2m1 = ScaledTable<Scales>;
#endif

// Floats of 4 bits of exponent and 3 of mantissa. Their bits, moved, are a smaller number's of a wider format.
struct E4m3 : Floats, FloatScales {
    static constexpr int BITS = 8, E = 1;
    typedef f32x16 Decoded;
    explicit E4m3(const Weights&) {}
    Decoded decode(const uint8_t* w) const {
#if defined(__AVX512F__)  // by way of half precision, whose subnormals cost nothing
        __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w)), 7);
        return (f32x16)_mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16((short)0xbfff)));  // the sign came twice
#else
        return load((const e4m3*)w);
#endif
    }
    static void add(Sum& sum, Decoded w, const Element* x) { sum += w * *x; }
#if defined(__AVX512F__)
    static f32x16 as_floats(Sum sum) { return sum * 256.f; }  // 2^(15 - 7), the difference of the exponents' biases
#endif
};

// Rows of x as elements, padded to whole stretches; the scale of each stretch, and the sum of each segment.
template <class Coding>
struct Prepared {
    typedef typename Coding::Element Element;
    std::vector<Element> elements;
    std::vector<float> scales, sums;
    int64_t stretches = 0, segments = 0;

    template <class T>
    void fill(const T* x, int64_t ldx, int64_t rows, int64_t width, int64_t segment, bool wants_sums, int threads) {
        stretches = (width + STRETCH - 1) / STRETCH, segments = stretches * (STRETCH / segment);
        elements.resize(rows * stretches * STRETCH);
        scales.resize(rows * stretches);
        if (wants_sums) sums.resize(rows * segments);
        on_threads(threads_for(rows * width * (int64_t)sizeof(T), threads), [&](int thread, int team) {
            const int64_t last = share(rows * stretches, thread + 1, team);
            for (int64_t i = share(rows * stretches, thread, team); i < last; i++) {
                const int64_t row = i / stretches, k = i % stretches * STRETCH;
                const int64_t count = width - k < STRETCH ? width - k : STRETCH;
                Element* to = elements.data() + i * STRETCH;
                for (int64_t pad = count; pad < STRETCH; pad++) to[pad] = 0;
                scales[i] = Coding::prepare(x + row * ldx + k, count, to);
                for (int64_t pad = count; pad < STRETCH; pad++) to[pad] = 0;
                if (wants_sums) add_up(to, segment, scales[i], sums.data() + i * (STRETCH / segment));
            }
        });
    }

    static void add_up(const Element* x, int64_t segment, float scale, float* to) {
        for (int64_t s = 0; s < STRETCH / segment; s++) {
            float total = 0.f;
            for (int64_t k = 0; k < segment; k++) total += (float)x[s * segment + k];
            to[s] = total * scale;
        }
    }
};

// M rows times P panels; what follows in memory is fetched on the way.
template <class Coding, int M, int P>
void multiply_block(const Prepared<Coding>& x, int64_t row, const Weights& weights, int64_t segment, int64_t panel,
                    const Output& out) {
    constexpr int E = Coding::E, step = PANEL * E * Coding::BITS / 8;
    const Coding coding(weights);
    const int64_t depth = (weights.width + E - 1) / E * E, panel_size = depth / E * step, ldx = x.stretches * STRETCH;
    const uint8_t* w = weights.packed + panel * panel_size;
    const typename Coding::Element* in = x.elements.data() + row * ldx;
    f32x16 total[M][2 * P] = {};
    for (int64_t start = 0, s = 0; start < depth; start += segment, s++) {
        typename Coding::Sum sums[M][2 * P] = {};
        const int64_t end = start + segment < depth ? start + segment : depth;
        for (int64_t k = start; k < end; k += E, w += step) {
            for (int p = 0; p < P; p++) __builtin_prefetch(w + p * panel_size + 4096);
            for (int c = 0; c < 2 * P; c++) {
                const auto decoded = coding.decode(w + c / 2 * panel_size + c % 2 * (step / 2));
                for (int m = 0; m < M; m++) Coding::add(sums[m][c], decoded, in + m * ldx + k);
            }
        }
        const int64_t at = start / weights.group * weights.columns + panel * PANEL;
        for (int c = 0; c < 2 * P; c++) {
            const f32x16 scale = Coding::scales(weights, at + 16 * c);
            for (int m = 0; m < M; m++)
                total[m][c] += Coding::as_floats(sums[m][c]) * x.scales[(row + m) * x.stretches + start / STRETCH] * scale;
            if (weights.offsets)
                for (int m = 0; m < M; m++)
                    total[m][c] -= load(weights.offsets + at + 16 * c) * x.sums[(row + m) * x.segments + s];
        }
    }
    for (int m = 0; m < M; m++)
        for (int c = 0; c < 2 * P; c++) out.write(out, row + m, panel * PANEL + 16 * c, total[m][c]);
}

template <class Coding, int P, int M = MAX_ROWS / P>
void multiply_rows(int64_t rows, const Prepared<Coding>& x, int64_t row, const Weights& weights, int64_t segment,
                   int64_t panel, const Output& out) {
    if constexpr (M > 0) {
        if (rows == M) return multiply_block<Coding, M, P>(x, row, weights, segment, panel, out);
        multiply_rows<Coding, P, M - 1>(rows, x, row, weights, segment, panel, out);
    }
}

template <class Coding>
void multiply_panels(const Prepared<Coding>& x, int64_t rows, const Weights& weights, int64_t segment, const Output& out,
                     int threads) {
    const int64_t panels = weights.columns / PANEL, blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    on_threads(threads_for(weights.columns * weights.width * Coding::BITS / 8, threads), [&](int thread, int team) {
        int64_t panel = share(panels, thread, team), end = share(panels, thread + 1, team);
        if (rows <= MAX_ROWS / 2)
            for (; panel + 2 <= end; panel += 2) multiply_rows<Coding, 2>(rows, x, 0, weights, segment, panel, out);
        for (; panel < end; panel++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t row = rows * block / blocks, next = rows * (block + 1) / blocks;
                multiply_rows<Coding, 1>(next - row, x, row, weights, segment, panel, out);
            }
    });
}

template <class T, class Coding>
void multiply(const T* x, int64_t ldx, int64_t rows, const Weights& weights, const Output& out, int threads) {
    static thread_local Prepared<Coding> prepared;
    const int64_t segment = weights.group < STRETCH ? weights.group : STRETCH;
    prepared.fill(x, ldx, rows, weights.width, segment, weights.offsets != nullptr, threads);
    multiply_panels<Coding>(prepared, rows, weights, segment, out, threads);
}

// The codings that weights are held in.
template <class Body>
void on_coding(int coding, const Body& body) {
    switch (coding) {
        case INT8: return body((Int8*)nullptr);
        case INT4: return body((Int4*)nullptr);
        case TABLE4: return body((Table4*)nullptr);
        case E4M3: return body((E4m3*)nullptr);
        case MXFP4: return body((E2m1<ExponentScales>*)nullptr);
        case NVFP4: return body((E2m1<FloatScales>*)nullptr);
    }
}

}  // namespace
}  // namespace loramux

using namespace loramux;

// Elements of a column that lie side by side.
LORAMUX_EXPORT int loramux_coded_unit(int coding) {
    int unit = 0;
    on_coding(coding, [&](auto* kind) { unit = std::remove_pointer_t<decltype(kind)>::E; });
    return unit;
}

// weights->group divides 256 or is a multiple of it, or is the whole width.
LORAMUX_EXPORT void loramux_coded_linear(int dtype, int coding, const void* x, int64_t ldx, int64_t rows,
                                         const CodedWeightsAbi* weights, const float* bias, void* y, int64_t ldy,
                                         int64_t columns, int threads) {
    const Weights coded{(const uint8_t*)weights->packed, weights->scales, weights->offsets, weights->values,
                        weights->width, weights->group, weights->columns};
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        on_coding(coding, [&](auto* kind) {
            using Kind = std::remove_pointer_t<decltype(kind)>;
            multiply<T, Kind>((const T*)x, ldx, rows, coded, Output{y, ldy, columns, bias, write<T>}, threads);
        });
    });
}
