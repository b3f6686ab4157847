// Vectors of sixteen floats, and the element types that tensors hold.
//
// Written with the vector extensions that GCC and Clang share, so that it compiles to AVX-512, AVX2 or NEON; intrinsics
// only where the extensions have no word for it, behind the feature macros that -march=native sets.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "lanes.hpp"

namespace loramux {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
struct e4m3 {
    uint8_t bits;
};

inline f32x16 splat(float x) { return x - f32x16{}; }

// sum + a * b, rounded once. Of two paths that meet again, clang contracts one and may leave the other in two operations:
// then equal rows would have unequal sums.
template <class V>
inline V fused(const V& sum, const V& a, const V& b) {
    if constexpr (is_halves<V>)
        return {fused(sum.low, a.low, b.low), fused(sum.high, a.high, b.high)};
    else
#if defined(__AVX512F__)
        return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
        return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
        return (V)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
        return sum + a * b;
#endif
}

// Asks memory for the line at `next`, which is read soon, and for the one `early` elements further on. That one comes into
// the second-level cache: the first-level cache cannot wait for as many lines as memory could be sending.
template <class T>
inline void fetch(const T* next, int64_t early) {
    __builtin_prefetch(next);
    __builtin_prefetch(next + early, 0, 2);
}

// Sixteen elements as floats, and back with one rounding to nearest even.

inline f32x16 load(const float* p) { return read_lanes<f32x16>(p); }

inline f32x16 load(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 widens in two halves
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    return bits_of<f32x16>(read_lanes<u32x16>((const uint16_t*)p) << 16);
#endif
}

inline void store(float* p, f32x16 v) { write_lanes(p, v); }

inline void store(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
    auto rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &rounded, 32);
#else
    u32x16 u = bits_of<u32x16>(v);
    u32x16 is_nan = bits_of<u32x16>((u & 0x7fffffffu) > 0x7f800000u);
    u32x16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    write_lanes((uint16_t*)p, (is_nan & 0x7fc0u) | (~is_nan & rounded));
#endif
}

#if defined(__aarch64__)  // GCC 12 converts vectors of halves one by one
template <class V>
inline V widened(const f16* p) {
    if constexpr (is_halves<V>)
        return {widened<decltype(V::low)>(p), widened<decltype(V::low)>(p + sizeof(V) / 8)};
    else
        return (V)vcvt_f32_f16(vld1_f16((const __fp16*)p));
}

template <class V>
inline void store_narrowed(f16* p, const V& v) {
    if constexpr (is_halves<V>) {
        store_narrowed(p, v.low);
        store_narrowed(p + sizeof(V) / 8, v.high);
    } else {
        vst1_f16((__fp16*)p, vcvt_f16_f32((float32x4_t)v));
    }
}
#endif

#if LORAMUX_HAS_F16
inline f32x16 load(const f16* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__aarch64__)
    return widened<f32x16>(p);
#else
    auto half = [](const f16* from) { return (decltype(f32x16::low))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); };
    return {half(p), half(p + 8)};
#endif
}

inline void store(f16* p, f32x16 v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    store_narrowed(p, v);
#else
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph((__m256)v.high, _MM_FROUND_TO_NEAREST_INT));
#endif
}
#endif

// The first `left` of sixteen elements, or all; past them reads as zero and is not written.

template <class T>
inline f32x16 load_first(const T* p, int64_t left) {
    if (left >= 16) return load(p);
    T padded[16] = {};
    std::memcpy(padded, p, left * sizeof(T));
    return load(padded);
}

template <class T>
inline void store_first(T* p, f32x16 v, int64_t left) {
    if (left >= 16) return store(p, v);
    T padded[16];
    store(padded, v);
    std::memcpy(p, padded, left * sizeof(T));
}

#if defined(__AVX512F__)
template <>
inline void store_first(float* p, f32x16 v, int64_t left) {
    _mm512_mask_storeu_ps(p, left >= 16 ? 0xffff : (1 << left) - 1, (__m512)v);
}
#endif

// As floats again after a store and a load.
template <class T>
inline f32x16 rounded(f32x16 v) {
    T stored[16];
    store(stored, v);
    return load(stored);
}
template <>
inline f32x16 rounded<float>(f32x16 v) { return v; }

inline float sum(f32x16 v) {  // always in the same order, so that equal rows give equal sums
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float x[16];
    store(x, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}

// Each of four vectors' sum, always in the same order.
inline void sums_of_four(const f32x16 v[4], float to[4]) {
#if defined(__AVX512F__)
    auto halves = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
    __m512d ab = (__m512d)halves((__m512)v[0], (__m512)v[1]), cd = (__m512d)halves((__m512)v[2], (__m512)v[3]);
    __m512 lanes = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)lanes, 1)));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    for (int i = 0; i < 4; i++) to[i] = sum(v[i]);
#endif
}

inline float largest(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[16];
    store(x, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
#endif
}

// b where either is NaN

inline f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return blend(a > b, a, b);
#endif
}

inline f32x16 min(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return blend(a < b, a, b);
#endif
}

// E4M3: a sign, four bits of exponent with a bias of 7, three of mantissa; 0x7f is NaN, and there is no infinity.

inline f32x16 load(const e4m3* p) {
    i32x16 bytes = read_lanes<i32x16>((const uint8_t*)p), sign = (bytes & 0x80) << 24, rest = bytes & 0x7f;
#if defined(__AVX512F__)  // by way of half precision, whose subnormals cost nothing; the biases differ by 8
    __m256i half = _mm512_cvtepi32_epi16((__m512i)(rest << 7));
    f32x16 size = (f32x16)_mm512_cvtph_ps(half) * 256.f;
#else  // moved bits are a normal float's; subnormals are counted in units of 2^-9
    f32x16 normal = bits_of<f32x16>((rest << 20) + (120 << 23)), small = converted<f32x16>(rest) * 0x1p-9f;
    f32x16 size = blend(rest < 8, small, normal);
#endif
    size = blend(rest == 0x7f, splat(__builtin_nanf("")), size);
    return bits_of<f32x16>(bits_of<i32x16>(size) | sign);
}

// Rounded to nearest even; what is larger than 448 becomes 448.
inline void store(e4m3* p, f32x16 v) {
    i32x16 bits = bits_of<i32x16>(v), is_nan = v != v;
    f32x16 size = bits_of<f32x16>(bits & 0x7fffffff);
    size = min(splat(448.f), size);
    i32x16 s = bits_of<i32x16>(size);
    i32x16 normal = ((s + 0x7ffff + ((s >> 20) & 1)) >> 20) - (120 << 3);
    i32x16 small = bits_of<i32x16>(size + 16384.f) - bits_of<i32x16>(splat(16384.f));  // the sum's last bit stands for 2^-9
    i32x16 code = blend(size < splat(0x1p-6f), small, normal);
    code = (is_nan & 0x7f) | (~is_nan & code) | ((bits >> 24) & 0x80);
    write_lanes((uint8_t*)p, code);
}

// e^x within 2 units in the last place up to 88, infinity from 89; 0 below the smallest normal number; NaN stays NaN. Coefficients: Cephes, expf.
inline f32x16 exp(f32x16 x) {
    const float shifter = 12582912.f;  // 1.5 * 2^23: adding and taking it away rounds to a whole number
    const f32x16 lowest = splat(-87.3f), bounded = min(splat(89.f), max(lowest, x));
    f32x16 n = (bounded * 1.44269504088896341f + shifter) - shifter;
    f32x16 r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
#if defined(__AVX512F__)
    f32x16 scaled = (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    f32x16 scaled = p * bits_of<f32x16>((converted<i32x16>(n) + 127) << 23);
#endif
    return blend(x < lowest, f32x16{}, scaled);
}

// Coefficients: Cephes, tanhf.
inline f32x16 tanh(f32x16 x) {
    f32x16 z = x * x;
    f32x16 p = splat(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    f32x16 near = p * z * x + x;
    f32x16 far = 1.f - 2.f / (exp(x + x) + 1.f);
    return blend(z < splat(0.390625f), near, far);
}

// Dot products go by units: two bf16 where the processor multiplies such pairs, else one element, widened to a float.

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define LORAMUX_BF16_PAIRS 1
#else
#define LORAMUX_BF16_PAIRS 0
#endif

// Arm multiplies squares too: two rows of four bf16 with two columns.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define LORAMUX_BF16_SQUARES 1
#else
#define LORAMUX_BF16_SQUARES 0
#endif

template <class T>
struct Unit {
    static constexpr int elements = 1;
    template <class From>
    static f32x16 load(const From* p) { return loramux::load(p); }
    template <class From>
    static f32x16 load_first(const From* p, int64_t left) { return loramux::load_first(p, left); }
    static f32x16 add_product(f32x16 sum, f32x16 a, f32x16 b) { return fused(sum, a, b); }
};

#if LORAMUX_BF16_PAIRS
// sum + the products of a's and b's pairs, each lane by itself.
template <class V>
inline V add_pairs(const V& sum, const V& a, const V& b) {
#if defined(__AVX512BF16__)
    return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
#else
    if constexpr (is_halves<V>)
        return {add_pairs(sum.low, a.low, b.low), add_pairs(sum.high, a.high, b.high)};
    else
        return (V)vbfdotq_f32((float32x4_t)sum, bits_of<bfloat16x8_t>(a), bits_of<bfloat16x8_t>(b));
#endif
}

#if LORAMUX_BF16_SQUARES
// sum + four products each, in every four lanes: of two rows and two columns, of four bf16. As two pairs one after the other
// would be added, to the bit.
template <class V>
inline V add_squares(const V& sum, const V& rows, const V& columns) {
    if constexpr (is_halves<V>)
        return {add_squares(sum.low, rows.low, columns.low), add_squares(sum.high, rows.high, columns.high)};
    else
        return (V)vbfmmlaq_f32((float32x4_t)sum, bits_of<bfloat16x8_t>(rows), bits_of<bfloat16x8_t>(columns));
}

// Row 0 or 1 of eight squares that lie side by side, four in each vector.
template <int ROW>
inline f32x16 row_of_squares(const f32x16& left, const f32x16& right) {
    auto row = [](const auto& two) {
        const auto a = bits_of<uint64x2_t>(two.low), b = bits_of<uint64x2_t>(two.high);
        return bits_of<std::decay_t<decltype(two.low)>>(ROW ? vzip2q_u64(a, b) : vzip1q_u64(a, b));
    };
    return {{row(left.low), row(left.high)}, {row(right.low), row(right.high)}};
}

template <class V>
inline V repeated(uint64x2_t bits) {
    if constexpr (is_halves<V>)
        return {repeated<decltype(V::low)>(bits), repeated<decltype(V::low)>(bits)};
    else
        return bits_of<V>(bits);
}
#endif

// The lower, or the upper, four bf16 of every eight of two vectors: an element of `even`, then the same of `odd`.
template <bool UPPER, class V>
inline V interleave(const V& even, const V& odd) {
#if defined(__AVX512BF16__)
    return (V)(UPPER ? _mm512_unpackhi_epi16((__m512i)even, (__m512i)odd) : _mm512_unpacklo_epi16((__m512i)even, (__m512i)odd));
#else
    if constexpr (is_halves<V>) {
        return {interleave<UPPER>(even.low, odd.low), interleave<UPPER>(even.high, odd.high)};
    } else {
        const auto a = bits_of<uint16x8_t>(even), b = bits_of<uint16x8_t>(odd);
        return bits_of<V>(UPPER ? vzip2q_u16(a, b) : vzip1q_u16(a, b));
    }
#endif
}

template <>
struct Unit<bf16> {
    static constexpr int elements = 2;
    static f32x16 load(const bf16* p) { return loramux::load((const float*)p); }
    static f32x16 load_first(const bf16* p, int64_t left) {
        if (left >= 32) return load(p);
        bf16 padded[32] = {};
        std::memcpy(padded, p, left * sizeof(bf16));
        return load(padded);
    }
    static f32x16 add_product(f32x16 sum, f32x16 a, f32x16 b) { return add_pairs(sum, a, b); }
};
#endif

#if defined(__AVX__) && !defined(__AVX512F__)
inline void transpose(__m256 rows[8]) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
            u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
        rows[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
    }
}
#endif

// rows[i][j] becomes rows[j][i]
inline void transpose(f32x16 rows[16]) {
#if defined(__AVX512F__)
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
    __m512 u[16];
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + j]), _mm512_castps_pd(t[i + 2 + j])));
            u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + j]), _mm512_castps_pd(t[i + 2 + j])));
        }
    for (int i = 0; i < 4; i++) {
        __m512 a = _mm512_shuffle_f32x4(u[i], u[4 + i], 0x88), b = _mm512_shuffle_f32x4(u[i], u[4 + i], 0xdd);
        __m512 c = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0x88), d = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0xdd);
        rows[i] = (f32x16)_mm512_shuffle_f32x4(a, c, 0x88);
        rows[8 + i] = (f32x16)_mm512_shuffle_f32x4(a, c, 0xdd);
        rows[4 + i] = (f32x16)_mm512_shuffle_f32x4(b, d, 0x88);
        rows[12 + i] = (f32x16)_mm512_shuffle_f32x4(b, d, 0xdd);
    }
#elif defined(__AVX__)  // four squares of eight by eight
    __m256 squares[2][2][8];
    for (int i = 0; i < 16; i++) {
        squares[0][i / 8][i % 8] = (__m256)rows[i].low;
        squares[1][i / 8][i % 8] = (__m256)rows[i].high;
    }
    for (auto& pair : squares)
        for (auto& square : pair) transpose(square);
    for (int i = 0; i < 16; i++)
        rows[i] = {(decltype(f32x16::low))squares[i / 8][0][i % 8], (decltype(f32x16::low))squares[i / 8][1][i % 8]};
#else
    float from[16][16], to[16][16];
    std::memcpy(from, rows, sizeof from);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j][i] = from[i][j];
    std::memcpy(rows, to, sizeof to);
#endif
}

}  // namespace loramux
