// Decoder layers in one call: the operators of the other files, one after the other, by threads that stay awake between
// them. Called one by one from Python, they cost a small step a third of its time: each is some ten microseconds of
// interpreter around fewer of arithmetic, and then two threads have to be woken.
#include <memory>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

// What lies between the operators. It grows to the largest step and is kept: fresh memory is paid for page by page.
template <class T>
T* scratch(int64_t elements) {
    static thread_local std::unique_ptr<T[]> memory;
    static thread_local int64_t size = 0;
    if (size < elements) {
        memory.reset();
        memory.reset(new T[elements]);
        size = elements;
    }
    return memory.get();
}

template <class T>
class Layer {
   public:
    Layer(const LayerAbi& layer, const LayerStepAbi& step, const KvLayerAbi& kv, const AttentionBatchAbi& batch, int threads)
        : layer(layer), step(step), kv(kv), batch(batch), threads(threads) {}

    void run() const {
        T* const mixed = attend();
        finish(mixed);
    }

    // For a step's last layer: of what follows attention, which is nearly all of a layer's work, only the kept rows are
    // computed. Rows that are not kept are worth nothing afterwards.
    void run_and_keep() const {
        T *const mixed = attend(), *const x = (T*)step.x;
        LayerStepAbi few = step;
        few.rows = step.num_kept, few.segments = step.kept_segments;
        if (few.rows == 0) return;
        for (int64_t i = 0; i < few.rows; i++) {
            move_row(x, i, step.kept[i], hidden);
            move_row(mixed, i, step.kept[i], layer.out.width);
        }
        Layer(layer, few, kv, batch, threads).finish(mixed);
        for (int64_t i = few.rows; i-- > 0;) move_row(x, step.kept[i], i, hidden);
    }

   private:
    const LayerAbi& layer;
    const LayerStepAbi& step;
    const KvLayerAbi& kv;
    const AttentionBatchAbi& batch;
    const int threads;
    const int64_t hidden = layer.qkv.width;

    // The kept rows are ascending, so that none is written before it has been read.
    static void move_row(T* rows, int64_t to, int64_t from, int64_t width) {
        std::memmove(rows + to * width, rows + from * width, width * sizeof(T));
    }

    // normed and delta, [rows][hidden] each, and after them what lies within a sublayer
    T* memory() const { return scratch<T>(step.rows * (2 * hidden + widest())); }

    int64_t widest() const {
        const int64_t attention = layer.qkv.columns + layer.out.width;
        return attention > layer.gate_up.columns ? attention : layer.gate_up.columns;
    }

    // Returns where the normalised rows are: at y, or at x where there is no such norm.
    const T* normalise(const NormAbi& norm, T* x, const T* delta, T* y) const {
        if (!norm.weight) return x;
        const RmsNormAbi call{x, delta, y, hidden, hidden, step.rows, hidden, norm, layer.factor};
        loramux_rms_norm(step.dtype, &call, threads);
        return y;
    }

    void multiply(const LayerLinearAbi& linear, const T* x, int64_t ldx, T* y) const {
        const int64_t columns = linear.columns;
        if (linear.by_tiles)
            loramux_tile_linear(x, ldx, step.rows, linear.width, linear.panels, linear.bias, y, columns, columns, threads);
        else if (linear.panels)
            loramux_linear(step.dtype, linear.panels_dtype, x, ldx, step.rows, linear.width, linear.panels, linear.bias, y,
                           columns, columns, threads);
        else
            loramux_coded_linear(step.dtype, linear.coding, x, ldx, step.rows, linear.coded, (const float*)linear.bias, y,
                                 columns, columns, threads);
        if (!step.segments) return;
        loramux_lora_shrink(step.dtype, x, ldx, 0, linear.width, step.pool, step.table, linear.group, step.segments,
                            step.shrunk, step.max_rank, threads);
        loramux_lora_expand(step.dtype, step.shrunk, step.max_rank, step.pool, step.table, linear.group, step.segments, y,
                            columns, 0, threads);
    }

    // Returns the rows that the output projection reads; writes the step's KV.
    T* attend() const {
        T *const normed = memory(), *const qkv = normed + 2 * step.rows * hidden;
        multiply(layer.qkv, normalise(layer.before_attention, (T*)step.x, nullptr, normed), hidden, qkv);
        const int64_t row = layer.qkv.columns, keys = layer.num_heads * kv.key_dim;
        const T *key = qkv + keys, *value = key + kv.num_kv_heads * kv.key_dim;
        const RopeAbi turn{qkv, key, value, step.cos, step.sin, step.slots,
                           row, kv.key_dim, row, kv.key_dim, row, kv.value_dim,
                           step.rows, layer.num_heads, layer.turns ? step.rotary_dim : 0, step.rotation_is_float,
                           layer.query_norm, layer.key_norm};
        loramux_rope(step.dtype, &turn, &kv, threads);
        T* const mixed = qkv + step.rows * row;
        const AttentionAbi call{qkv, mixed, layer.sinks, row, kv.key_dim, layer.num_heads, layer.sliding_window,
                                layer.scaling, layer.softcap};
        loramux_attention(step.dtype, &call, &kv, &batch, threads);
        return mixed;
    }

    void finish(const T* mixed) const {
        T *const x = (T*)step.x, *const normed = memory();
        T *const delta = normed + step.rows * hidden, *const inner = delta + step.rows * hidden;
        multiply(layer.out, mixed, layer.out.width, delta);
        const T* added = normalise(layer.after_attention, delta, nullptr, normed);
        T* const free = added == normed ? delta : normed;
        T* const out = free == normed ? delta : normed;
        feed_forward(normalise(layer.before_network, x, added, free), inner, out);
        add(x, normalise(layer.after_network, out, nullptr, free));
    }

    void feed_forward(const T* x, T* gate_up, T* y) const {
        multiply(layer.gate_up, x, hidden, gate_up);
        const int64_t row = layer.gate_up.columns, width = row / 2;
        loramux_gated(step.dtype, layer.activation, gate_up, row, gate_up + width, row, step.rows, width, gate_up, row, threads);
        multiply(layer.down, gate_up, row, y);
    }

    void add(T* x, const T* delta) const {
        const int64_t elements = step.rows * hidden;
        on_threads(threads_for(3 * elements * (int64_t)sizeof(T), threads), [&](int thread, int team) {
            const int64_t last = share(step.rows, thread + 1, team) * hidden;
            for (int64_t i = share(step.rows, thread, team) * hidden; i < last; i += 16) {
                const int64_t left = last - i;
                store_first(x + i, load_first(x + i, left) + layer.factor * load_first(delta + i, left), left);
            }
        });
    }
};

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_layers(const LayerAbi* layers, const KvLayerAbi* const* kv, int64_t count,
                                   const LayerStepAbi* step, const AttentionBatchAbi* batch, int threads) {
    on_dtype(step->dtype, [&](auto zero) {
        Team::hold(threads, [&] {
            for (int64_t i = 0; i < count; i++) {
                const Layer<decltype(zero)> layer(layers[i], *step, *kv[i], *batch, threads);
                if (step->kept && i == count - 1)
                    layer.run_and_keep();
                else
                    layer.run();
            }
        });
    });
}
