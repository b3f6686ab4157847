// The most likely tokens of rows of logits, and tokens drawn from them: temperature, top-k, top-p, min-p, and one number
// for each row.
//
// A row is worked on by one thread, in its cache. Nothing sorts the vocabulary: a histogram over distances from the best
// finds the bin in which a cut falls, and only this bin is sorted.
#include <algorithm>
#include <cmath>
#include <vector>

#include "abi.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace loramux {
namespace {

typedef double f64x8 __attribute__((vector_size(64)));

constexpr int BINS = 4096;
constexpr float REACH = 40.f;  // e^-40 is below float's precision; the last bin takes all that is further away
constexpr int64_t BLOCK = 256;

struct Scratch {
    std::vector<float> values, weights;
    std::vector<int32_t> ids, edge;
    std::vector<uint16_t> bins;

    void fit(int64_t vocab) {
        const size_t padded = (vocab + 15) / 16 * 16;
        if (values.size() >= padded) return;
        values.resize(padded), weights.resize(padded), ids.resize(padded), bins.resize(padded);
    }
};

// The tokens that are left: value i belongs to token ids[i], ascending. Values are differences from the best, over the
// temperature, so that the best's is 0.
struct Tokens {
    Scratch& scratch;
    int64_t count;

    float* values() const { return scratch.values.data(); }
    int32_t* ids() const { return scratch.ids.data(); }

    template <class Keep>
    void filter(const Keep& keep) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++)
            if (keep(i)) {
                values()[kept] = values()[i];
                ids()[kept++] = ids()[i];
            }
        count = kept;
    }

    void find_bins() {
        constexpr float scale = (BINS - 1) / REACH;
        for (int64_t i = 0; i < count; i++) scratch.bins[i] = (uint16_t)(std::min(-values()[i], REACH) * scale);
    }

    void weigh() {
        std::fill(values() + count, values() + (count + 15) / 16 * 16, -__builtin_inff());
        for (int64_t i = 0; i < count; i += 16) store(scratch.weights.data() + i, exp(load(values() + i)));
    }

    void collect_edge(int bin) {
        scratch.edge.clear();
        for (int64_t i = 0; i < count; i++)
            if (scratch.bins[i] == bin) scratch.edge.push_back((int32_t)i);
    }
};

template <class T>
void read(const T* logits, int64_t vocab, float temperature, Tokens& tokens) {
    float* values = tokens.values();
    f32x16 best = splat(-__builtin_inff());
    int64_t i = 0;
    for (; i + 16 <= vocab; i += 16) {
        f32x16 v = load(logits + i);
        best = max(best, v);
        store(values + i, v);
    }
    float highest = largest(best);
    if (i < vocab) {
        store(values + i, load_first(logits + i, vocab - i));
        for (int64_t j = i; j < vocab; j++) highest = std::max(highest, values[j]);
    }
    for (i = 0; i < vocab; i += 16) store(values + i, (load(values + i) - highest) / temperature);
    for (i = 0; i < vocab; i++) tokens.ids()[i] = (int32_t)i;
    tokens.count = vocab;
}

// Equals of the k-th stay.
void keep_top_k(Tokens& tokens, int64_t k) {
    std::vector<int64_t> sizes(BINS, 0);
    tokens.find_bins();
    for (int64_t i = 0; i < tokens.count; i++) sizes[tokens.scratch.bins[i]]++;
    int bin = 0;
    for (; k > sizes[bin]; bin++) k -= sizes[bin];
    tokens.collect_edge(bin);
    auto& edge = tokens.scratch.edge;
    const float* values = tokens.values();
    std::nth_element(edge.begin(), edge.begin() + (k - 1), edge.end(),
                     [&](int32_t a, int32_t b) { return values[a] > values[b]; });
    const float lowest = values[edge[k - 1]];
    tokens.filter([&](int64_t i) { return values[i] >= lowest; });
}

// A token goes when those before it, by value and then by id, already hold top_p. The best stays.
void keep_top_p(Tokens& tokens, double top_p) {
    std::vector<double> mass(BINS, 0.);
    tokens.find_bins();
    tokens.weigh();
    Scratch& scratch = tokens.scratch;
    for (int64_t i = 0; i < tokens.count; i++) mass[scratch.bins[i]] += scratch.weights[i];
    double total = 0., held = 0.;
    for (double part : mass) total += part;
    const double target = top_p * total;
    int bin = 0;
    for (; bin < BINS - 1 && held + mass[bin] < target; bin++) held += mass[bin];
    tokens.collect_edge(bin);
    auto& edge = scratch.edge;
    const float* values = tokens.values();
    std::sort(edge.begin(), edge.end(), [&](int32_t a, int32_t b) {
        return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
    size_t inside = 0;
    for (; inside < edge.size() && (held < target || (bin == 0 && inside == 0)); inside++)
        held += scratch.weights[edge[inside]];
    for (; inside < edge.size(); inside++) scratch.bins[edge[inside]] = BINS;
    tokens.filter([&](int64_t i) { return scratch.bins[i] <= bin; });
}

// The first token at which the cumulated weight exceeds `number` of the sum.
int64_t choose(Tokens& tokens, double number) {
    tokens.weigh();
    const float* weights = tokens.scratch.weights.data();
    auto sum_of = [&](int64_t from, int64_t to) {
        f64x8 low = {}, high = {};
        for (int64_t i = from; i < to; i += 16) {
            float w[16];
            std::memcpy(w, weights + i, sizeof w);
            for (int j = 0; j < 8; j++) low[j] += w[j], high[j] += w[8 + j];
        }
        double sum = 0.;
        for (int j = 0; j < 8; j++) sum += low[j] + high[j];
        return sum;
    };
    double total = 0., held = 0.;
    for (int64_t i = 0; i < tokens.count; i += BLOCK) total += sum_of(i, std::min(i + BLOCK, tokens.count));
    const double target = number * total;
    int64_t last = 0;
    for (int64_t i = 0; i < tokens.count; i += BLOCK) {
        const int64_t end = std::min(i + BLOCK, tokens.count);
        const double block = sum_of(i, end);
        if (held + block <= target) {
            held += block;
            continue;
        }
        for (int64_t j = i; j < end; j++)
            if ((held += weights[j]) > target) return tokens.ids()[j];
    }
    // Rounding carried the target to the sum itself.
    for (int64_t i = 0; i < tokens.count; i++)
        if (weights[i] > 0.f) last = i;
    return tokens.ids()[last];
}

template <class T>
int64_t draw(const T* logits, int64_t vocab, const DrawAbi& asked, Scratch& scratch) {
    scratch.fit(vocab);
    Tokens tokens{scratch, 0};
    read(logits, vocab, (float)asked.temperature, tokens);
    if (asked.top_k > 0 && asked.top_k < vocab) keep_top_k(tokens, asked.top_k);
    if (asked.top_p < 1.) keep_top_p(tokens, asked.top_p);
    if (asked.min_p > 0.) {
        const float lowest = (float)std::log(std::min(asked.min_p, 1.));
        tokens.filter([&](int64_t i) { return tokens.values()[i] >= lowest; });
    }
    return choose(tokens, asked.number);
}

// The first of the highest logits; -1 where the highest is infinite, or any is NaN.
template <class T>
int64_t most_likely(const T* logits, int64_t vocab) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 best = splat(-__builtin_inff());
    i32x16 at = {}, is_nan = {};
    for (int64_t i = 0; i < vocab; i += 16) {
        f32x16 v = load_first(logits + i, vocab - i);
        const i32x16 token = lane + (int32_t)i;
        if (vocab - i < 16) v = blend(token < (int32_t)vocab, v, splat(-__builtin_inff()));
        is_nan |= v != v;
        const i32x16 higher = v > best;
        best = blend(higher, v, best);
        at = (higher & token) | (~higher & at);
    }
    int64_t found = -1;
    const float highest = largest(best);
    for (int i = 0; i < 16; i++) {
        if (is_nan[i]) return -1;
        if (best[i] == highest && (found < 0 || at[i] < found)) found = at[i];
    }
    return std::isfinite(highest) ? found : -1;
}

}  // namespace
}  // namespace loramux

using namespace loramux;

LORAMUX_EXPORT void loramux_most_likely(int dtype, const void* logits, int64_t ldl, int64_t rows, int64_t vocab,
                                        int64_t* tokens, int threads) {
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        on_threads(threads_for(rows * vocab * (int64_t)sizeof(T), threads), [&](int thread, int team) {
            for (int64_t i = share(rows, thread, team); i < share(rows, thread + 1, team); i++)
                tokens[i] = most_likely((const T*)logits + i * ldl, vocab);
        });
    });
}

LORAMUX_EXPORT void loramux_draw_tokens(int dtype, const void* logits, int64_t ldl, int64_t vocab, const DrawAbi* draws,
                                        int64_t count, int64_t* tokens, int threads) {
    on_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        on_threads((int)std::min<int64_t>(threads, count), [&](int thread, int team) {
            thread_local Scratch scratch;  // kept: a new one would be paged in at every step
            const int64_t last = share(count, thread + 1, team);
            for (int64_t i = share(count, thread, team); i < last; i++)
                tokens[i] = draw((const T*)logits + draws[i].row * ldl, vocab, draws[i], scratch);
        });
    });
}
