// New keys and values, copied row by row to their pages.
#include <cstring>

#include "abi.hpp"
#include "parallel.hpp"

namespace loramux {
namespace {

struct Rows {
    const char* from;
    char* to;
    int64_t from_token, from_head, page, head, token, bytes;  // strides in bytes
};

void copy(const Rows& rows, const int64_t* slots, int64_t first, int64_t last, int64_t heads, int64_t block_size) {
    for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < heads; h++)
            std::memcpy(rows.to + slots[t] / block_size * rows.page + h * rows.head + slots[t] % block_size * rows.token,
                        rows.from + t * rows.from_token + h * rows.from_head, rows.bytes);
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_write_kv(int64_t element, const KvLayerAbi* layer, const void* key, int64_t key_token,
                                     int64_t key_head, const void* value, int64_t value_token, int64_t value_head,
                                     const int64_t* slots, int64_t tokens, int threads) {
    const KvLayerAbi& l = *layer;
    Rows keys{(const char*)key,       (char*)l.key,         key_token * element,   key_head * element,
              l.key_page * element,   l.key_head * element, l.key_token * element, l.key_dim * element};
    Rows values{(const char*)value,     (char*)l.value,         value_token * element,   value_head * element,
                l.value_page * element, l.value_head * element, l.value_token * element, l.value_dim * element};
    int64_t bytes = tokens * l.num_kv_heads * (keys.bytes + values.bytes);
    on_threads(threads_for(bytes, threads), [&](int thread, int team) {
        int64_t first = share(tokens, thread, team), last = share(tokens, thread + 1, team);
        copy(keys, slots, first, last, l.num_kv_heads, l.block_size);
        copy(values, slots, first, last, l.num_kv_heads, l.block_size);
    });
}
