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
#if LORAMUX_HAS_F16
        case FLOAT16: return body(f16{});
#endif
    }
}

enum Coding { INT8 = 0, INT4 = 1, TABLE4 = 2, E4M3 = 3, MXFP4 = 4, NVFP4 = 5 };

enum Activation { SILU = 0, GELU_TANH = 1 };

constexpr int MAX_HEAD_DIM = 512;
constexpr int MAX_TAPS = 7;

// Packed codes; layouts in coded_linear.cpp.
struct CodedWeightsAbi {
    const void *packed, *scales;     // scales: floats; of MXFP4 bytes s for 2^(s - 127)
    const float *offsets, *values;   // null: none
    int64_t width, group, columns;   // columns: of whole panels
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
    const int32_t* row_ends;  // one past the last position that a row sees; null: its own
    const int32_t* key_ranges;  // first and one past the last position that a sequence's rows may see; null: all
    int64_t num_sequences, max_blocks;
};

struct AttentionAbi {
    const void* query;
    void* output;
    const float* sinks;
    int64_t query_row, query_head, num_heads;  // strides in elements
    int64_t sliding_window;                    // 0: none
    float scaling, softcap;                    // 0: none
    float* lse;                                // [rows, num_heads]; null: not wanted
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

// One product of a layer: weights as loramux_linear and loramux_tile_linear read them or, where they are coded,
// loramux_coded_linear.
struct LayerLinearAbi {
    const void* panels;  // null: coded
    const CodedWeightsAbi* coded;
    const void* bias;      // null: none; of floats where the weights are coded
    const int64_t* group;  // of sites, as lora_shrink reads it
    int64_t panels_dtype, by_tiles, coding, width, columns;
};

// What a decoder layer is, for all steps.
struct LayerAbi {
    NormAbi before_attention, after_attention, before_network, after_network;  // no weight: none
    NormAbi query_norm, key_norm;                                              // of each head
    LayerLinearAbi qkv, out, gate_up, down;
    const float* sinks;
    int64_t num_heads, sliding_window, turns, activation;
    float scaling, softcap;
    float factor;  // of what is added to the residual stream
};

// What a step brings to each of its layers.
struct LayerStepAbi {
    void* x;  // the residual stream [rows][width], changed
    const void *cos, *sin;
    const int64_t* slots;
    const void* pool;
    const LoraTableAbi* table;
    const int64_t* segments;  // null: no row has an adapter
    float* shrunk;            // what lora_shrink writes, for the group with the most sites
    const int64_t* kept;      // the rows that are read behind the last layer, ascending; null: all
    const int64_t* kept_segments;  // of the kept rows alone
    int64_t num_kept, dtype, rows, rotary_dim, rotation_is_float, max_rank;
};

// One token of sequences that decode, in a layer that keeps states. Strides in elements.
struct StateStepAbi {
    const void *query, *key, *value, *a, *b;  // b: null where the rule is not the gated delta rule
    const float *shift, *kernel, *bias, *decay, *skip;  // kernel [taps + 1][channels]; bias, skip: null: none
    float* units;
    const int32_t* tables;
    const int64_t *rows, *in_prompt;  // of each sequence
    void* out;                        // [rows][heads][value_dim]
    int64_t query_row, query_head, key_row, key_head, value_row, value_group, a_row, a_group, b_row, b_group;
    int64_t table_row, page_stride, per_page, unit, first;
    int64_t num_sequences, key_heads, heads, key_dim, value_dim, channels, taps, is_delta;
    float delta_factor, least, most;
};

// How the token of one row of logits is drawn.
struct DrawAbi {
    int64_t row, top_k;  // 0: all
    double temperature, top_p, min_p, number;
};

}  // namespace loramux

// Operators that loramux_layers calls too.

LORAMUX_EXPORT void loramux_rms_norm(int dtype, const loramux::RmsNormAbi* call, int threads);
LORAMUX_EXPORT void loramux_linear(int dtype, int weight_dtype, const void* x, int64_t ldx, int64_t rows, int64_t width,
                                   const void* packed, const void* bias, void* y, int64_t ldy, int64_t columns,
                                   int threads);
LORAMUX_EXPORT void loramux_tile_linear(const void* x, int64_t ldx, int64_t rows, int64_t width, const void* packed,
                                        const void* bias, void* y, int64_t ldy, int64_t columns, int threads);
LORAMUX_EXPORT void loramux_coded_linear(int dtype, int coding, const void* x, int64_t ldx, int64_t rows,
                                         const loramux::CodedWeightsAbi* weights, const float* bias, void* y, int64_t ldy,
                                         int64_t columns, int threads);
// x_site, y_site: from a head's input or output to the next one's, in a group of heads.
LORAMUX_EXPORT void loramux_lora_shrink(int dtype, const void* x, int64_t ldx, int64_t x_site, int64_t width,
                                        const void* pool, const loramux::LoraTableAbi* table, const int64_t* group,
                                        const int64_t* segments, float* v, int64_t ldv, int threads);
LORAMUX_EXPORT void loramux_lora_expand(int dtype, const float* v, int64_t ldv, const void* pool,
                                        const loramux::LoraTableAbi* table, const int64_t* group,
                                        const int64_t* segments, void* y, int64_t ldy, int64_t y_site, int threads);
LORAMUX_EXPORT void loramux_rope(int dtype, const loramux::RopeAbi* call, const loramux::KvLayerAbi* layer, int threads);
LORAMUX_EXPORT void loramux_attention(int dtype, const loramux::AttentionAbi* call, const loramux::KvLayerAbi* layer,
                                      const loramux::AttentionBatchAbi* batch, int threads);
LORAMUX_EXPORT void loramux_gated(int dtype, int activation, const void* gate, int64_t gate_row, const void* up,
                                  int64_t up_row, int64_t rows, int64_t width, void* y, int64_t y_row, int threads);
