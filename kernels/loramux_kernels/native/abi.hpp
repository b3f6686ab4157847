// What crosses from Python: plain integers and pointers. Layouts here are repeated in native/abi.py.
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

enum Coding { INT8 = 0, INT4 = 1, TABLE4 = 2, E4M3 = 3 };

enum Activation { SILU = 0, GELU_TANH = 1 };

constexpr int MAX_HEAD_DIM = 512;

// Packed codes; layouts in coded_linear.cpp.
struct CodedWeightsAbi {
    const void* packed;
    const float *scales, *offsets, *values;  // null: none
    int64_t width, group, columns;           // columns: of whole panels
};

struct LoraTableAbi {
    const int64_t *a_offsets, *b_offsets;
    const int32_t* ranks;
    const float* scales;
    int64_t num_sites, max_tiles;
};

struct KvLayerAbi {
    void *key, *value;
    float *key_scale, *value_scale;  // null: keys and values are of the queries' dtype, else in FP8
    int64_t key_page, key_head, key_token, value_page, value_head, value_token;  // strides in elements
    int64_t key_scale_page, value_scale_page;
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

// A root-mean-square normalisation's parameters.
struct NormAbi {
    const float* weight;   // null: nothing is normalised
    float eps;
    int32_t rounds_first;  // the normalised values are rounded before the product with the weight
};

struct RmsNormAbi {
    void* x;  // changed where there is a delta
    const void* delta;
    void* y;
    int64_t x_row, delta_row, rows, width;
    NormAbi norm;
    float factor;  // of delta
};

struct RopeAbi {
    void* query;
    const void *key, *value, *cos, *sin;
    const int64_t* slots;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides in elements
    int64_t tokens, num_heads, rotary_dim, rotation_is_float;  // else of the queries' dtype
    NormAbi query_norm, key_norm;
};

// How the token of one row of logits is drawn.
struct DrawAbi {
    int64_t row, top_k;  // 0: all
    double temperature, top_p, min_p, number;
};

}  // namespace loramux
