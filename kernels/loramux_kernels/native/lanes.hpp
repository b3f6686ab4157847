// Sixteen lanes of four bytes each, in the registers that the processor has. GCC keeps a vector that is wider than those in
// memory; here it is two halves, and an operator works on one and then on the other.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace loramux {

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

#if defined(__F16C__) || defined(__aarch64__)
#define LORAMUX_HAS_F16 1
#else
#define LORAMUX_HAS_F16 0
#endif

template <class Half>
struct Halves {
    Half low, high;
    auto operator[](int lane) const {
        constexpr int lanes = sizeof(Half) / 4;
        return lane < lanes ? low[lane] : high[lane - lanes];
    }
};

template <class E, int N, bool FITS = N * sizeof(E) <= REGISTER>
struct LanesOf {
    typedef E type __attribute__((vector_size(N * sizeof(E))));
};
template <class E, int N>
struct LanesOf<E, N, false> {
    typedef Halves<typename LanesOf<E, N / 2>::type> type;
};

typedef LanesOf<float, 16>::type f32x16;
typedef LanesOf<int32_t, 16>::type i32x16;
typedef LanesOf<uint32_t, 16>::type u32x16;

template <class V>
constexpr bool is_halves = false;
template <class Half>
constexpr bool is_halves<Halves<Half>> = true;

template <class S>
using IfNumber = std::enable_if_t<std::is_arithmetic_v<S>>;

#define LORAMUX_ON_HALVES(op)                                                          \
    template <class H>                                                                 \
    inline auto operator op(const Halves<H>& a, const Halves<H>& b) {                  \
        return Halves<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};     \
    }                                                                                  \
    template <class H, class S, class = IfNumber<S>>                                   \
    inline auto operator op(const Halves<H>& a, S b) {                                 \
        return Halves<decltype(a.low op b)>{a.low op b, a.high op b};                  \
    }                                                                                  \
    template <class H, class S, class = IfNumber<S>>                                   \
    inline auto operator op(S a, const Halves<H>& b) {                                 \
        return Halves<decltype(a op b.low)>{a op b.low, a op b.high};                  \
    }
LORAMUX_ON_HALVES(+)
LORAMUX_ON_HALVES(-)
LORAMUX_ON_HALVES(*)
LORAMUX_ON_HALVES(/)
LORAMUX_ON_HALVES(&)
LORAMUX_ON_HALVES(|)
LORAMUX_ON_HALVES(<<)
LORAMUX_ON_HALVES(>>)
LORAMUX_ON_HALVES(<)
LORAMUX_ON_HALVES(<=)
LORAMUX_ON_HALVES(>)
LORAMUX_ON_HALVES(>=)
LORAMUX_ON_HALVES(==)
LORAMUX_ON_HALVES(!=)
#undef LORAMUX_ON_HALVES

template <class H>
inline Halves<H> operator-(const Halves<H>& a) { return {-a.low, -a.high}; }
template <class H>
inline Halves<H> operator~(const Halves<H>& a) { return {~a.low, ~a.high}; }
template <class H, class B>
inline Halves<H>& operator+=(Halves<H>& a, const B& b) { return a = a + b; }
template <class H, class B>
inline Halves<H>& operator-=(Halves<H>& a, const B& b) { return a = a - b; }
template <class H, class B>
inline Halves<H>& operator*=(Halves<H>& a, const B& b) { return a = a * b; }
template <class H, class B>
inline Halves<H>& operator|=(Halves<H>& a, const B& b) { return a = a | b; }

// The same bits under another type.
template <class To, class From>
inline To bits_of(const From& from) {
    if constexpr (is_halves<To>) {
        return {bits_of<decltype(To::low)>(from.low), bits_of<decltype(To::low)>(from.high)};
    } else {
        static_assert(sizeof(To) == sizeof(From));
        To to;
        std::memcpy(&to, &from, sizeof to);
        return to;
    }
}

// a's lanes where a comparison held, else b's.
template <class Mask, class V>
inline V blend(const Mask& take_a, const V& a, const V& b) {
    if constexpr (is_halves<V>)
        return {blend(take_a.low, a.low, b.low), blend(take_a.high, a.high, b.high)};
    else
        return take_a ? a : b;
}

// Each lane's number in the other type.
template <class To, class From>
inline To converted(const From& from) {
    if constexpr (is_halves<To>)
        return {converted<decltype(To::low)>(from.low), converted<decltype(To::low)>(from.high)};
    else
        return __builtin_convertvector(from, To);
}

// Neighbouring elements, of any type, each converted; and back.

template <class V, class E>
inline V read_lanes(const E* p) {
    if constexpr (is_halves<V>) {
        return {read_lanes<decltype(V::low)>(p), read_lanes<decltype(V::low)>(p + sizeof(V) / 8)};
    } else {
        typedef E Elements __attribute__((vector_size(sizeof(V) / 4 * sizeof(E))));
        Elements elements;
        std::memcpy(&elements, p, sizeof elements);
        return __builtin_convertvector(elements, V);
    }
}

template <class V, class E>
inline void write_lanes(E* p, const V& v) {
    if constexpr (is_halves<V>) {
        write_lanes(p, v.low);
        write_lanes(p + sizeof(V) / 8, v.high);
    } else {
        typedef E Elements __attribute__((vector_size(sizeof(V) / 4 * sizeof(E))));
        const Elements elements = __builtin_convertvector(v, Elements);
        std::memcpy(p, &elements, sizeof elements);
    }
}

}  // namespace loramux
