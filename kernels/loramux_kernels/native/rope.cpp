// Rotary embedding of queries, in place, and of keys on their way to the pages; values go there as they are.
#include <cmath>

#include "kv_rows.hpp"

namespace loramux {
namespace {

// One head's vector as floats, normalised where the model normalises heads.
template <class T>
void read_head(const T* from, int64_t dim, const NormAbi& norm, float* to) {
    f32x16 squares = {};
    for (int64_t d = 0; d < dim; d += 16) {
        f32x16 v = load_first(from + d, dim - d);
        squares += v * v;
        store(to + d, v);
    }
    if (!norm.weight) return;
    const float scale = 1.f / std::sqrt(sum(squares) / (float)dim + norm.eps);
    for (int64_t d = 0; d < dim; d += 16) {
        f32x16 v = load(to + d) * scale;
        if (norm.rounds_first) v = rounded<T>(v);
        store(to + d, rounded<T>(v * load_first(norm.weight + d, dim - d)));
    }
}

// The first `rotary` elements turn by pairs (d, d + rotary / 2); the others stay.
template <class T, class R>
void write_head(const float* from, int64_t dim, const R* cos, const R* sin, int64_t rotary, T* to) {
    const int64_t half = rotary / 2;
    for (int64_t d = 0; d < half; d += 16) {
        const int64_t left = half - d;
        f32x16 a = load_first(from + d, left), b = load_first(from + half + d, left);
        f32x16 first = a * load_first(cos + d, left) - b * load_first(sin + d, left);
        f32x16 second = b * load_first(cos + half + d, left) + a * load_first(sin + half + d, left);
        store_first(to + d, first, left);
        store_first(to + half + d, second, left);
    }
    for (int64_t d = rotary; d < dim; d += 16) store_first(to + d, load_first(from + d, dim - d), dim - d);
}

template <class T, class R>
void store_token(const RopeAbi& call, const KvLayerAbi& layer, int64_t t) {
    alignas(64) float buffer[MAX_HEAD_DIM];
    T turned[MAX_HEAD_DIM];
    const R *cos = (const R*)call.cos + t * call.rotary_dim, *sin = (const R*)call.sin + t * call.rotary_dim;
    T* query = (T*)call.query + t * call.query_token;
    for (int64_t h = 0; h < call.num_heads; h++) {
        T* head = query + h * call.query_head;
        read_head(head, layer.key_dim, call.query_norm, buffer);
        write_head(buffer, layer.key_dim, cos, sin, call.rotary_dim, head);
    }
    const KvRows keys = KvRows::keys(layer), values = KvRows::values(layer);
    for (int64_t h = 0; h < layer.num_kv_heads; h++) {
        read_head((const T*)call.key + t * call.key_token + h * call.key_head, layer.key_dim, call.key_norm, buffer);
        write_head(buffer, layer.key_dim, cos, sin, call.rotary_dim, turned);
        keys.put(call.slots[t], h, turned);
        values.put(call.slots[t], h, (const T*)call.value + t * call.value_token + h * call.value_head);
    }
}

template <class T, class R>
void store_tokens(const RopeAbi& call, const KvLayerAbi& layer, int threads) {
    const int64_t heads = call.num_heads + 2 * layer.num_kv_heads;
    // Twice what it reads and writes, for pages are seldom in a cache.
    const int64_t bytes = 4 * call.tokens * heads * layer.key_dim * (int64_t)sizeof(T);
    for_tokens(layer, call.slots, call.tokens, threads_for(bytes, threads),
               [&](int64_t t) { store_token<T, R>(call, layer, t); });
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_rope(int dtype, const RopeAbi* call, const KvLayerAbi* layer, int threads) {
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        if (call->rotation_is_float)
            store_tokens<T, float>(*call, *layer, threads);
        else
            store_tokens<T, T>(*call, *layer, threads);
    });
}
