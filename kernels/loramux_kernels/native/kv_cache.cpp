// New keys and values, row by row to their pages; keys alone where the values are a part of them.
#include "kv_rows.hpp"

using namespace loramux;

LORAMUX_EXPORT void loramux_write_kv(int dtype, const KvLayerAbi* layer, const void* key, int64_t key_token,
                                     int64_t key_head, const void* value, int64_t value_token, int64_t value_head,
                                     const int64_t* slots, int64_t tokens, int threads) {
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const KvRows keys = KvRows::keys(*layer), values = KvRows::values(*layer);
        const int64_t bytes = tokens * layer->num_kv_heads * (keys.dim + values.dim) * (int64_t)sizeof(T);
        for_tokens(*layer, slots, tokens, threads_for(bytes, threads), [&](int64_t t) {
            for (int64_t h = 0; h < layer->num_kv_heads; h++) {
                keys.put(slots[t], h, (const T*)key + t * key_token + h * key_head);
                if (value) values.put(slots[t], h, (const T*)value + t * value_token + h * value_head);
            }
        });
    });
}
