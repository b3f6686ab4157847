// Attention straight from the pages: one pass over a sequence's context with a running softmax in float32. The query
// heads that share a kv head, and a few query rows, are worked on together, so that each key and value is read once.
//
// Chunks of context start at multiples of CHUNK whatever the step, and a masked position adds exactly nothing: a row's
// answer does not depend on the rows beside it, nor on how its prompt was cut.
#include <atomic>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

constexpr int CHUNK = 64, GROUPS = CHUNK / 16;
constexpr int QUERY_ROWS = 64;  // rows of a block, unless a kv head serves more heads than that
// A block's sums, and what they are multiplied with, are in registers: rows, and columns of sixteen.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6, COLUMNS = 4;  // 6 x 4 sums, 4 columns, 1 broadcast of 32 registers
#else
constexpr int MAX_ROWS = 3, COLUMNS = 2;  // of halves
#endif
const float MASKED = -__builtin_inff(), NOTHING_YET = -1e30f;

struct Item {
    int64_t sequence, head, first, count;  // query rows first .. first + count of the sequence
};

// What a thread needs for one item; grows to the largest that it meets.
struct Scratch {
    std::vector<f32x16> memory;
    float *query, *keys, *scores, *sums, *highest, *total, *added, *rescale;

    void fit(int64_t rows, int64_t units, int64_t value_dim) {
        int64_t sizes[] = {rows * units, CHUNK * units, rows * CHUNK, rows * value_dim, rows, rows, rows, rows}, all = 0;
        for (int64_t size : sizes) all += (size + 15) / 16;
        if ((int64_t)memory.size() < all) memory.resize(all);
        float** parts[] = {&query, &keys, &scores, &sums, &highest, &total, &added, &rescale};
        f32x16* at = memory.data();
        for (int i = 0; i < 8; at += (sizes[i] + 15) / 16, i++) *parts[i] = (float*)at;
    }
};

// Queries of T over keys and values that are stored as S: T itself, or FP8 with scales, which are powers of two and may
// therefore multiply scores and weights instead of every element.
template <class T, class S>
class Attention {
    static constexpr bool HAS_SCALES = !std::is_same_v<T, S>;
    using U = Unit<std::conditional_t<HAS_SCALES, float, T>>;

   public:
    Attention(const AttentionAbi& call, const KvLayerAbi& layer, const AttentionBatchAbi& batch)
        : call(call), layer(layer), batch(batch) {}

    void run(int threads) const {
        std::vector<Item> items;
        int64_t work = list_items(items);
        std::atomic<size_t> taken{0};
        on_threads(threads_for(work * (int64_t)sizeof(T), threads), [&](int, int) {
            Scratch scratch;
            Chunk chunk, next;
            size_t i = taken++;
            if (i >= items.size()) return;
            Context now = context_of(items[i]);
            for (find(now, now.start, chunk);;) {
                size_t j = taken++;  // before it is needed, for its first chunk is fetched during this item's last
                Context later = j < items.size() ? context_of(items[j]) : Context{};
                scratch.fit(now.rows, units, padded_value_dim);
                begin(now, scratch);
                for (bool last = false; !last; std::swap(chunk, next)) {
                    last = chunk.start + CHUNK >= now.stop;
                    find(last ? later : now, last ? later.start : chunk.start + CHUNK, next);
                    Ahead ahead{*this, next};
                    gather_keys(chunk, ahead, scratch.keys);
                    multiply_keys(now.rows, chunk.tokens, ahead, scratch);
                    weigh(now, chunk, ahead, scratch);
                    add_values(now.rows, chunk, ahead, scratch);
                }
                end(now, scratch);
                if (j >= items.size()) return;
                now = later;
            }
        });
    }

   private:
    const AttentionAbi& call;
    const KvLayerAbi& layer;
    const AttentionBatchAbi& batch;
    const int64_t heads_per_kv = call.num_heads / layer.num_kv_heads;
    const int64_t units = (layer.key_dim + U::elements - 1) / U::elements;
    const int64_t padded_value_dim = (layer.value_dim + 15) / 16 * 16;

    int64_t list_items(std::vector<Item>& items) const {
        const int64_t block = heads_per_kv < QUERY_ROWS ? QUERY_ROWS / heads_per_kv : 1;
        int64_t work = 0;
        for (int64_t s = 0; s < batch.num_sequences; s++) {
            int64_t rows = batch.cu_seqlens[s + 1] - batch.cu_seqlens[s];
            const auto [first_key, end] = keys_of(s);
            if (first_key >= end) continue;
            work += rows * (end - first_key) * layer.num_kv_heads * layer.key_dim;
            for (int64_t first = 0; first < rows; first += block)
                for (int64_t head = 0; head < layer.num_kv_heads; head++)
                    items.push_back({s, head, first, rows - first < block ? rows - first : block});
        }
        return work;
    }

    // The first and one past the last position that rows of a sequence may see.
    std::pair<int64_t, int64_t> keys_of(int64_t sequence) const {
        if (!batch.key_ranges) return {0, batch.context_lens[sequence]};
        return {batch.key_ranges[2 * sequence], batch.key_ranges[2 * sequence + 1]};
    }

    struct Context {
        const S *key, *value;   // of the kv head, in page 0
        int64_t kv_head;
        const int32_t* pages;
        int64_t rows;           // of query and head together
        int64_t position;       // of the first query row
        int64_t start, stop;    // of what the rows see; the start a multiple of CHUNK
        int64_t first_key;      // before it the rows see nothing
        int64_t first_row, head;  // in the packed query
    };

    // Where a chunk's tokens are; pages are looked up, not divided for, token by token.
    struct Chunk {
        int64_t start, tokens;
        const S *key[CHUNK], *value[CHUNK];
        alignas(64) float key_scale[CHUNK], value_scale[CHUNK];  // where there are scales
    };

    void find(const Context& c, int64_t start, Chunk& chunk) const {
        chunk.start = start;
        chunk.tokens = c.stop - start < CHUNK ? c.stop - start : CHUNK;
        int64_t page = start / layer.block_size, offset = start % layer.block_size;
        for (int64_t t = 0; t < chunk.tokens; page++, offset = 0) {
            const S* key = c.key + c.pages[page] * layer.key_page;
            const S* value = c.value + c.pages[page] * layer.value_page;
            for (; offset < layer.block_size && t < chunk.tokens; offset++, t++) {
                chunk.key[t] = key + offset * layer.key_token;
                chunk.value[t] = value + offset * layer.value_token;
                if constexpr (HAS_SCALES) {
                    chunk.key_scale[t] = layer.key_scale[c.pages[page] * layer.key_scale_page + c.kv_head];
                    chunk.value_scale[t] = layer.value_scale[c.pages[page] * layer.value_scale_page + c.kv_head];
                }
            }
        }
        for (int64_t t = chunk.tokens; t > 0 && t % 16; t++) {  // whole vectors; masked later
            chunk.key[t] = chunk.key[0];
            if constexpr (HAS_SCALES) chunk.key_scale[t] = chunk.value_scale[t] = 0.f;
        }
    }

    Context context_of(const Item& item) const {
        int64_t first_row = batch.cu_seqlens[item.sequence] + item.first;
        int64_t after = batch.cu_seqlens[item.sequence + 1] - first_row;
        int64_t position = batch.context_lens[item.sequence] - after;
        const auto [first_key, end] = keys_of(item.sequence);
        int64_t hidden = call.sliding_window > 0 ? position - call.sliding_window + 1 : 0;
        if (hidden < first_key) hidden = first_key;
        int64_t stop = position + item.count;
        for (int64_t row = first_row; batch.row_ends && row < first_row + item.count; row++)
            if (batch.row_ends[row] > stop) stop = batch.row_ends[row];
        if (stop > end) stop = end;
        return {(const S*)layer.key + item.head * layer.key_head,
                (const S*)layer.value + item.head * layer.value_head,
                item.head,
                batch.block_table + item.sequence * batch.max_blocks,
                item.count * heads_per_kv,
                position,
                hidden / CHUNK * CHUNK,
                stop,
                first_key,
                first_row,
                item.head * heads_per_kv};
    }

    void begin(const Context& c, Scratch& scratch) const {
        for (int64_t row = 0; row < c.rows; row++) {
            const T* q = (const T*)call.query + (c.first_row + row / heads_per_kv) * call.query_row +
                         (c.head + row % heads_per_kv) * call.query_head;
            for (int64_t u = 0; u < units; u += 16) {
                f32x16 part = U::load_first(q + u * U::elements, layer.key_dim - u * U::elements);
                store_first(scratch.query + row * units + u, part, units - u);
            }
            const float* sinks = call.sinks;
            scratch.highest[row] = sinks ? sinks[c.head + row % heads_per_kv] : NOTHING_YET;
            scratch.total[row] = sinks ? 1.f : 0.f;
        }
        std::memset(scratch.sums, 0, c.rows * padded_value_dim * sizeof(float));
    }

    // What comes next, asked of memory a few rows at a time wherever a chunk is worked on: all at once would be more lines
    // than a core can wait for.
    struct Ahead {
        const Attention& attention;
        const Chunk& chunk;
        int64_t row = 0;  // a token's key, then its value

        void fetch(int rows) {
            for (; rows > 0 && row < 2 * chunk.tokens; rows--, row++) {
                const int64_t t = row / 2;
                const S* from = row % 2 ? chunk.value[t] : chunk.key[t];
                const int64_t width = row % 2 ? attention.layer.value_dim : attention.layer.key_dim;
                for (int64_t d = 0; d < width; d += 64 / sizeof(S)) __builtin_prefetch(from + d);
            }
        }
    };

    // keys[group][unit][16 tokens]
    void gather_keys(const Chunk& chunk, Ahead& ahead, float* keys) const {
        for (int64_t first = 0; first < chunk.tokens; first += 16, keys += units * 16) {
            for (int64_t u = 0; u < units; u += 16) {
                ahead.fetch(8);
                const int64_t element = u * U::elements, left = layer.key_dim - element;
                f32x16 rows[16];
                if (left >= 16 * U::elements)
#pragma GCC unroll 16
                    for (int t = 0; t < 16; t++) rows[t] = U::load(chunk.key[first + t] + element);
                else
                    for (int t = 0; t < 16; t++) rows[t] = U::load_first(chunk.key[first + t] + element, left);
                transpose(rows);
                for (int i = 0; i < 16 && u + i < units; i++) store(keys + (u + i) * 16, rows[i]);
            }
        }
    }

    void multiply_keys(int64_t rows, int64_t tokens, Ahead& ahead, Scratch& scratch) const {
        int64_t groups = (tokens + 15) / 16;
        for (int64_t row = 0; row < rows; row += MAX_ROWS) {
            int64_t count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            ahead.fetch(16);
            const float* query = scratch.query + row * units;
            float* scores = scratch.scores + row * CHUNK;
            int64_t g = 0;
            for (; g + COLUMNS <= groups; g += COLUMNS)
                multiply_rows<COLUMNS>(count, query, scratch.keys + g * units * 16, scores + g * 16);
            for (; g < groups; g++) multiply_rows<1>(count, query, scratch.keys + g * units * 16, scores + g * 16);
        }
    }

    template <int G, int M = MAX_ROWS>
    void multiply_rows(int64_t rows, const float* query, const float* keys, float* scores) const {
        if constexpr (M > 0) {
            if (rows == M) return multiply_block<G, M>(query, keys, scores);
            multiply_rows<G, M - 1>(rows, query, keys, scores);
        }
    }

    template <int G, int M>
    void multiply_block(const float* query, const float* keys, float* scores) const {
        f32x16 acc[M][G] = {};
        for (int64_t u = 0; u < units; u++, keys += 16) {
            f32x16 column[G];
            for (int g = 0; g < G; g++) column[g] = load(keys + g * units * 16);
            for (int m = 0; m < M; m++)
                for (int g = 0; g < G; g++)
                    acc[m][g] = U::add_product(acc[m][g], column[g], splat(query[m * units + u]));
        }
        for (int m = 0; m < M; m++)
            for (int g = 0; g < G; g++) store(scores + m * CHUNK + g * 16, acc[m][g]);
    }

    // Scores become weights relative to the highest score so far; rescale[row] brings earlier sums to the same scale.
    void weigh(const Context& c, const Chunk& chunk, Ahead& ahead, Scratch& scratch) const {
        const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int groups = (int)(chunk.tokens + 15) / 16;
        for (int64_t row = 0; row < c.rows; row++) {
            int64_t position = c.position + row / heads_per_kv - chunk.start;
            int64_t from = c.first_key > chunk.start ? c.first_key - chunk.start : 0;
            if (call.sliding_window > 0 && position - call.sliding_window >= from) from = position - call.sliding_window + 1;
            int64_t last = position;
            if (batch.row_ends) last = batch.row_ends[c.first_row + row / heads_per_kv] - 1 - chunk.start;
            if (last >= chunk.tokens) last = chunk.tokens - 1;
            const bool sees_all = from == 0 && last == groups * 16 - 1;
            ahead.fetch(8);
            float* scores = scratch.scores + row * CHUNK;
            f32x16 s[GROUPS], high = splat(scratch.highest[row]);
            for (int g = 0; g < groups; g++) {
                s[g] = load(scores + g * 16) * call.scaling;
                if constexpr (HAS_SCALES) s[g] *= load(chunk.key_scale + g * 16);
                if (call.softcap > 0) s[g] = call.softcap * tanh(s[g] / call.softcap);
                i32x16 token = lane + g * 16;
                if (!sees_all) s[g] = blend((token >= (int)from) & (token <= (int)last), s[g], splat(MASKED));
                high = max(high, s[g]);
            }
            const float highest = largest(high);
            f32x16 sums = {};
            for (int g = 0; g < groups; g++) {
                f32x16 weight = exp(s[g] - highest);
                sums += weight;
                if constexpr (HAS_SCALES) weight *= load(chunk.value_scale + g * 16);
                store(scores + g * 16, weight);
            }
            scratch.rescale[row] = scratch.highest[row] - highest;
            scratch.highest[row] = highest;
            scratch.added[row] = sum(sums);
        }
        for (int64_t row = 0; row < c.rows; row += 16) {
            const f32x16 scale = exp(load(scratch.rescale + row));
            store(scratch.rescale + row, scale);
            store(scratch.total + row, fused(load(scratch.added + row), load(scratch.total + row), scale));
        }
    }

    void add_values(int64_t rows, const Chunk& chunk, Ahead& ahead, Scratch& scratch) const {
        for (int64_t row = 0; row < rows; row += MAX_ROWS) {
            int64_t count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS, d = 0;
            for (; d + 16 * COLUMNS <= layer.value_dim; d += 16 * COLUMNS)
                add_rows<COLUMNS>(count, chunk, ahead, d, row, scratch);
            for (; d < layer.value_dim; d += 16) add_rows<1>(count, chunk, ahead, d, row, scratch);
        }
        ahead.fetch(2 * CHUNK);  // the rest
    }

    template <int V, int M = MAX_ROWS>
    void add_rows(int64_t rows, const Chunk& chunk, Ahead& ahead, int64_t d, int64_t row, Scratch& scratch) const {
        if constexpr (M > 0) {
            if (rows == M) return add_block<V, M>(chunk, ahead, d, row, scratch);
            add_rows<V, M - 1>(rows, chunk, ahead, d, row, scratch);
        }
    }

    template <int V, int M>
    void add_block(const Chunk& chunk, Ahead& ahead, int64_t d, int64_t row, Scratch& scratch) const {
        const float* weight = scratch.scores + row * CHUNK;
        float* sums = scratch.sums + row * padded_value_dim + d;
        const int64_t left = V > 1 ? 16 : layer.value_dim - d;
        f32x16 acc[M][V];
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) acc[m][v] = load(sums + m * padded_value_dim + v * 16) * scratch.rescale[row + m];
        for (int64_t t = 0; t < chunk.tokens; t++, weight++) {
            ahead.fetch(1);
            f32x16 column[V];
            for (int v = 0; v < V; v++) column[v] = load_first(chunk.value[t] + d + v * 16, left);
            for (int m = 0; m < M; m++)
                for (int v = 0; v < V; v++) acc[m][v] = fused(acc[m][v], splat(weight[m * CHUNK]), column[v]);
        }
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) store(sums + m * padded_value_dim + v * 16, acc[m][v]);
    }

    void end(const Context& c, Scratch& scratch) const {
        for (int64_t row = 0; row < c.rows; row++) {
            const int64_t place = (c.first_row + row / heads_per_kv) * call.num_heads + c.head + row % heads_per_kv;
            T* out = (T*)call.output + place * layer.value_dim;
            if (call.lse) call.lse[place] = scratch.highest[row] + std::log(scratch.total[row]);
            for (int64_t d = 0; d < layer.value_dim; d += 16) {
                f32x16 mean = load(scratch.sums + row * padded_value_dim + d) / scratch.total[row];
                store_first(out + d, mean, layer.value_dim - d);
            }
        }
    }
};

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_attention(int dtype, const AttentionAbi* call, const KvLayerAbi* layer,
                                      const AttentionBatchAbi* batch, int threads) {
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        if (layer->key_scale)
            Attention<T, e4m3>(*call, *layer, *batch).run(threads);
        else
            Attention<T, T>(*call, *layer, *batch).run(threads);
    });
}
