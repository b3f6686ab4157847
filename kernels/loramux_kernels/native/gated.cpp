// The product of an activated gate and what passes it; it may be written over the gate.
#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

inline f32x16 silu(f32x16 x) { return x / (1.f + exp(-x)); }

// x / 2 * (1 + tanh(u)) = x / (1 + e^(-2 u))
inline f32x16 gelu_tanh(f32x16 x) { return x / (1.f + exp(-1.5957691216057308f * (x + 0.044715f * x * x * x))); }

template <class T, class Activation>
void multiply(const T* gate, int64_t gate_row, const T* up, int64_t up_row, int64_t rows, int64_t width, T* y,
              int64_t y_row, int threads, const Activation& activation) {
    on_threads(threads_for(6 * rows * width * (int64_t)sizeof(T), threads), [&](int thread, int team) {
        const int64_t last = share(rows, thread + 1, team);
        for (int64_t row = share(rows, thread, team); row < last; row++) {
            const T *g = gate + row * gate_row, *u = up + row * up_row;
            T* out = y + row * y_row;
            for (int64_t left = width; left > 0; left -= 16, g += 16, u += 16, out += 16) {
                f32x16 open = rounded<T>(activation(load_first(g, left)));
                store_first(out, open * load_first(u, left), left);
            }
        }
    });
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_gated(int dtype, int activation, const void* gate, int64_t gate_row, const void* up,
                                  int64_t up_row, int64_t rows, int64_t width, void* y, int64_t y_row, int threads) {
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        auto run = [&](auto act) {
            multiply((const T*)gate, gate_row, (const T*)up, up_row, rows, width, (T*)y, y_row, threads, act);
        };
        if (activation == SILU) run([](f32x16 x) { return silu(x); });
        if (activation == GELU_TANH) run([](f32x16 x) { return gelu_tanh(x); });
    });
}
