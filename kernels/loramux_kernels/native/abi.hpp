// What crosses from Python: plain integers and pointers. Layouts here are repeated in loramux_kernels/native.py.
#pragma once

#include <cstdint>

#include "simd.hpp"

#define LORAMUX_EXPORT extern "C" __attribute__((visibility("default")))

namespace loramux {

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

template <class Body>
void on_dtype(int dtype, const Body& body) {
    switch (dtype) {
        case FLOAT32: return body(float{});
        case BFLOAT16: return body(bf16{});
#if defined(__F16C__)
        case FLOAT16: return body(f16{});
#endif
    }
}

// The dtypes that linears are packed in.
template <class Body>
void on_packed_dtype(int dtype, const Body& body) {
    if (dtype == FLOAT32) return body(float{});
    if (dtype == BFLOAT16 && LORAMUX_BF16_PAIRS) return body(bf16{});
}

struct LoraTableAbi {
    const int64_t *a_offsets, *b_offsets;
    const int32_t* ranks;
    const float* scales;
    int64_t num_sites, max_tiles;
};

struct KvLayerAbi {
    void *key, *value;
    int64_t key_page, key_head, key_token, value_page, value_head, value_token;  // strides in elements
    int64_t block_size, num_kv_heads, key_dim, value_dim;
};

struct AttentionBatchAbi {
    const int32_t *cu_seqlens, *context_lens, *block_table;
    int64_t num_sequences, max_blocks;
};

struct AttentionAbi {
    const void* query;
    void* output;
    const float* sinks;
    int64_t query_row, query_head, num_heads;  // strides in elements
    int64_t sliding_window;                    // 0: none
    float scaling, softcap;                    // 0: none
};

}  // namespace loramux
