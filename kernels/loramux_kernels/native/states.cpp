// One token of sequences that decode, in layers whose states have a fixed size: the convolution, then the gated delta rule
// or Mamba 2, on the states in their pages.
#include <cmath>
#include <vector>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

inline f32x16 silu(f32x16 x) { return x / (1.f + exp(-x)); }

inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

template <class T>
float value_of(const void* tensor, int64_t element) {
    T padded[16] = {};
    padded[0] = ((const T*)tensor)[element];
    return load(padded)[0];
}

// The units of one sequence.
struct Units {
    const StateStepAbi& call;
    const int32_t* table;

    Units(const StateStepAbi& call, int64_t sequence) : call(call), table(call.tables + sequence * call.table_row) {}

    float* at(int64_t unit) const {
        const int64_t number = call.first + unit;
        return call.units + table[number / call.per_page] * call.page_stride + number % call.per_page * call.unit;
    }

    // body(place, number of elements, elements before), for the pieces of `length` elements of the inputs from `element` on
    template <class Body>
    void pieces(int64_t element, int64_t length, const Body& body) const {
        for (int64_t done = 0; done < length;) {
            const int64_t inside = (element + done) % call.unit, left = call.unit - inside;
            const int64_t count = left < length - done ? left : length - done;
            body(at(call.heads + (element + done) / call.unit) + inside, count, done);
            done += count;
        }
    }
};

// Convolves `length` neighbouring channels of a row, whose inputs are at `x`, and moves their inputs in the state on.
template <class T>
void convolve(const StateStepAbi& call, const Units& units, const T* x, int64_t channel, int64_t length, float* y) {
    constexpr int64_t BLOCK = 64;
    float earlier[BLOCK * MAX_TAPS], taps[MAX_TAPS + 1][BLOCK];
    for (int64_t start = 0; start < length; start += BLOCK) {
        const int64_t count = length - start < BLOCK ? length - start : BLOCK, first = channel + start;
        const int64_t element = first * call.taps, size = count * call.taps;
        units.pieces(element, size, [&](float* place, int64_t n, int64_t done) {
            std::memcpy(earlier + done, place, n * sizeof(float));
        });
        for (int64_t c = 0; c < count; c += 16) store_first(taps[call.taps] + c, load_first(x + start + c, count - c), 16);
        for (int64_t c = 0; c < count; c++) {
            for (int64_t tap = 0; tap < call.taps; tap++) taps[tap][c] = earlier[c * call.taps + tap];
            for (int64_t tap = 0; tap < call.taps; tap++) earlier[c * call.taps + tap] = taps[tap + 1][c];
        }
        for (int64_t c = 0; c < count; c += 16) {
            const int64_t left = count - c;
            f32x16 total = call.bias ? load_first(call.bias + first + c, left) : f32x16{};
            for (int64_t tap = 0; tap <= call.taps; tap++)
                total += load_first(taps[tap] + c, left) * load_first(call.kernel + tap * call.channels + first + c, left);
            total = rounded<T>(total);
            store_first(y + start + c, rounded<T>(silu(total)), left);
        }
        units.pieces(element, size, [&](float* place, int64_t n, int64_t done) {
            std::memcpy(place, earlier + done, n * sizeof(float));
        });
    }
}

// Columns [start, start + 16 * N) of a head's matrix after a token, and its result there.
template <class T, int N>
void update(const StateStepAbi& call, float* matrix, const float* q, const float* k, const float* v, float decay,
            float beta, float skip, int64_t start, T* out) {
    const int64_t width = call.value_dim;
    f32x16 change[N], result[N];
    for (int i = 0; i < N; i++) change[i] = load_first(v + start + 16 * i, width - start - 16 * i), result[i] = change[i] * skip;
    if (call.is_delta) {
        f32x16 recalled[N] = {};
        for (int64_t d = 0; d < call.key_dim; d++)
            for (int i = 0; i < N; i++)
                recalled[i] += load_first(matrix + d * width + start + 16 * i, width - start - 16 * i) * k[d];
        for (int i = 0; i < N; i++) change[i] -= recalled[i] * decay;
    }
    for (int i = 0; i < N; i++) change[i] = change[i] * beta;
    for (int64_t d = 0; d < call.key_dim; d++)
        for (int i = 0; i < N; i++) {
            const int64_t left = width - start - 16 * i;
            float* place = matrix + d * width + start + 16 * i;
            f32x16 s = load_first(place, left) * decay + change[i] * k[d];
            store_first(place, s, left);
            result[i] += s * q[d];
        }
    for (int i = 0; i < N; i++) store_first(out + start + 16 * i, result[i], width - start - 16 * i);
}

void normalise(float* x, int64_t length, float factor) {
    f32x16 squares = {};
    for (int64_t c = 0; c < length; c += 16) {
        f32x16 v = load_first(x + c, length - c);
        squares += v * v;
    }
    const float scale = factor / std::sqrt(sum(squares) + 1e-6f);
    for (int64_t c = 0; c < length; c += 16) store_first(x + c, load_first(x + c, length - c) * scale, length - c);
}

// A head of a sequence's row; `mixed` has the row's channels after the convolution.
template <class T>
void step_head(const StateStepAbi& call, int64_t sequence, int64_t head, const float* mixed) {
    const int64_t row = call.rows[sequence], repeats = call.heads / call.key_heads;
    const int64_t group = head / repeats, member = head % repeats, keys = call.key_heads * call.key_dim;
    const float* q = mixed + group * call.key_dim;
    const float* v = mixed + 2 * keys + head * call.value_dim;
    float beta = softplus(value_of<T>(call.a, row * call.a_row + group * call.a_group + member) + call.shift[head]);
    if (!call.is_delta && call.in_prompt[sequence]) beta = std::fmin(std::fmax(beta, call.least), call.most);
    const float decay = std::exp(call.decay[head] * beta);
    if (call.is_delta) {
        const float b = value_of<T>(call.b, row * call.b_row + group * call.b_group + member);
        beta = rounded<T>(splat(1.f / (1.f + std::exp(-b))))[0] * call.delta_factor;
    }
    float* matrix = Units(call, sequence).at(head);
    T* out = (T*)call.out + (row * call.heads + head) * call.value_dim;
    const float skip = call.skip ? call.skip[head] : 0.f;
    for (int64_t start = 0; start < call.value_dim; start += 64) {
        auto columns = [&](auto blocks) {
            update<T, decltype(blocks)::value>(call, matrix, q, q + keys, v, decay, beta, skip, start, out);
        };
        switch ((call.value_dim - start + 15) / 16) {
            case 1: columns(std::integral_constant<int, 1>{}); break;
            case 2: columns(std::integral_constant<int, 2>{}); break;
            case 3: columns(std::integral_constant<int, 3>{}); break;
            default: columns(std::integral_constant<int, 4>{});
        }
    }
}

template <class T>
void step(const StateStepAbi& call, int threads) {
    const int64_t keys = call.key_heads * call.key_dim, values = call.heads / call.key_heads * call.value_dim;
    std::vector<float> mixed(call.num_sequences * call.channels);
    const int64_t matrices = call.num_sequences * call.heads * call.key_dim * call.value_dim * (int64_t)sizeof(float);
    const int team = threads_for(matrices, threads);
    on_threads(team, [&](int thread, int team) {
        const int64_t total = call.num_sequences * call.key_heads;
        for (int64_t i = share(total, thread, team); i < share(total, thread + 1, team); i++) {
            const int64_t sequence = i / call.key_heads, group = i % call.key_heads, row = call.rows[sequence];
            const Units units(call, sequence);
            float* y = mixed.data() + sequence * call.channels;
            const int64_t q = group * call.key_dim, k = keys + q, v = 2 * keys + group * values;
            convolve(call, units, (const T*)call.query + row * call.query_row + group * call.query_head, q, call.key_dim, y + q);
            convolve(call, units, (const T*)call.key + row * call.key_row + group * call.key_head, k, call.key_dim, y + k);
            convolve(call, units, (const T*)call.value + row * call.value_row + group * call.value_group, v, values, y + v);
            if (call.is_delta) {
                normalise(y + q, call.key_dim, 1.f / std::sqrt((float)call.key_dim));
                normalise(y + k, call.key_dim, 1.f);
            }
        }
    });
    on_threads(team, [&](int thread, int team) {
        const int64_t total = call.num_sequences * call.heads;
        for (int64_t i = share(total, thread, team); i < share(total, thread + 1, team); i++)
            step_head<T>(call, i / call.heads, i % call.heads, mixed.data() + i / call.heads * call.channels);
    });
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_state_step(int dtype, const StateStepAbi* call, int threads) {
    on_dtype(dtype, [&](auto zero) { step<decltype(zero)>(*call, threads); });
}
