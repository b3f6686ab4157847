// Root-mean-square normalisation, with the addition to the residual stream that comes before it.
#include <cmath>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

template <class T>
void normalise(const RmsNormAbi& call, int64_t row) {
    T* x = (T*)call.x + row * call.x_row;
    const T* delta = call.delta ? (const T*)call.delta + row * call.delta_row : nullptr;
    T* y = (T*)call.y + row * call.width;
    f32x16 squares = {};
    for (int64_t c = 0; c < call.width; c += 16) {
        const int64_t left = call.width - c;
        f32x16 v = load_first(x + c, left);
        if (delta) {
            v = rounded<T>(v + rounded<T>(load_first(delta + c, left) * call.factor));
            store_first(x + c, v, left);
        }
        squares += v * v;
    }
    const float scale = 1.f / std::sqrt(sum(squares) / (float)call.width + call.norm.eps);
    for (int64_t c = 0; c < call.width; c += 16) {
        const int64_t left = call.width - c;
        f32x16 v = load_first(x + c, left) * scale;
        if (call.norm.rounds_first) v = rounded<T>(v);
        store_first(y + c, v * load_first(call.norm.weight + c, left), left);
    }
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_rms_norm(int dtype, const RmsNormAbi* call, int threads) {
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const int64_t bytes = 3 * call->rows * call->width * (int64_t)sizeof(T);
        on_threads(threads_for(bytes, threads), [&](int thread, int team) {
            const int64_t last = share(call->rows, thread + 1, team);
            for (int64_t row = share(call->rows, thread, team); row < last; row++) normalise<T>(*call, row);
        });
    });
}
