// A step's keys and values on their way into their pages: copied, or as FP8 in units of their page's scale.
#pragma once

#include <cstring>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {

// In steps of the exponent: a page's first row lies at 2 to 4, of 448. Rows below 2^-100 have a scale of 1.
constexpr int HEADROOM = 1, LEAST_EXPONENT = -100;

// A power of two that brings the largest of `dim` elements to its headroom.
template <class T>
float scale_for(const T* row, int64_t dim) {
    f32x16 highest = {}, poison = {};
    for (int64_t d = 0; d < dim; d += 16) {
        f32x16 v = load_first(row + d, dim - d);
        highest = max(highest, max(v, -v));
        poison += v - v;
    }
    const int exponent = bits_of<int32_t>(largest(highest)) >> 23;  // biased
    if (sum(poison) != 0.f || exponent < LEAST_EXPONENT + 127) return 1.f;
    return bits_of<float>((exponent - HEADROOM) << 23);
}

// The keys of a layer, or its values.
struct KvRows {
    void* pages;
    float* scales;
    int64_t page, head, token, scale_page;  // strides in elements
    int64_t block_size, dim;

    static KvRows keys(const KvLayerAbi& l) {
        return {l.key, l.key_scale, l.key_page, l.key_head, l.key_token, l.key_scale_page, l.block_size, l.key_dim};
    }
    static KvRows values(const KvLayerAbi& l) {
        return {l.value, l.value_scale, l.value_page, l.value_head, l.value_token, l.value_scale_page, l.block_size,
                l.value_dim};
    }

    template <class T>
    void put(int64_t slot, int64_t h, const T* row) const {
        const int64_t number = slot / block_size, offset = slot % block_size;
        const int64_t at = number * page + h * head + offset * token;
        if (!scales) {
            std::memcpy((T*)pages + at, row, dim * sizeof(T));
            return;
        }
        float& scale = scales[number * scale_page + h];
        if (offset == 0) scale = scale_for(row, dim);
        const float steps = 1.f / scale;
        for (int64_t d = 0; d < dim; d += 16)
            store_first((e4m3*)pages + at + d, load_first(row + d, dim - d) * steps, dim - d);
    }
};

// Calls body(token) for each token; in FP8 those that begin a page, and set its scale, come first.
template <class Body>
void for_tokens(const KvLayerAbi& layer, const int64_t* slots, int64_t tokens, int threads, const Body& body) {
    const int passes = layer.key_scale ? 2 : 1;
    for (int pass = 0; pass < passes; pass++)
        on_threads(threads, [&](int thread, int team) {
            const int64_t last = share(tokens, thread + 1, team);
            for (int64_t t = share(tokens, thread, team); t < last; t++)
                if (passes == 1 || (slots[t] % layer.block_size != 0) == pass) body(t);
        });
}

}  // namespace loramux
