#include "predictor.h"

#include <algorithm>

// The loops below are the cost of a guess. x86-64's oldest vectors take twice as long as AVX2 does; the loader chooses.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define SPARK_VECTORS __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define SPARK_VECTORS
#endif

namespace spark {

namespace {

SPARK_VECTORS void add_row(int32_t * scores, const int16_t * row, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        scores[i] += row[i];
    }
}

SPARK_VECTORS void correct_row(int16_t * row, const int32_t * steps, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        const int32_t value = row[i] + steps[i];
        row[i] = int16_t(value > INT16_MAX ? INT16_MAX : value < INT16_MIN ? INT16_MIN : value);
    }
}

// Of experts that were not selected.
SPARK_VECTORS void steps_down(int32_t * scores, uint32_t n, uint32_t shift) {
    for (uint32_t i = 0; i < n; i++) {
        const int32_t error = scores[i] > 0 ? -scores[i] : 0;
        scores[i] = (error + (1 << (shift - 1))) >> shift;
    }
}

constexpr uint32_t CACHE_LINE = 64;

}  // namespace

void predictor::prepare(const std::vector<uint32_t> & sizes) {
    if (n_experts == sizes) {
        return;
    }
    n_experts = sizes;
    starts.clear();
    uint32_t total = 0;
    for (uint32_t layer = 0; layer < sizes.size(); layer++) {
        starts.push_back(total);
        total += n_rows(layer) * sizes[layer];
    }
    weights.assign(total, 0);
}

uint32_t predictor::n_rows(uint32_t layer) const {
    uint32_t rows = layer > 0;
    for (uint32_t back = 1; back <= PREDICTED_FROM && back <= layer; back++) {
        rows += n_experts[layer - back];
    }
    return rows;
}

template <typename action> void predictor::each_row(uint32_t layer, const selection * before, action && act) const {
    const size_t width = n_experts[layer];
    size_t start = starts[layer];
    for (uint32_t back = 1; back <= PREDICTED_FROM && back <= layer; back++) {
        for (uint32_t i = 0; i < before[back - 1].n; i++) {
            act(start + size_t(before[back - 1].ids[i]) * width);
        }
        start += n_experts[layer - back] * width;
    }
    act(start);
}

void predictor::predict(uint32_t layer, const selection * before, int32_t * scores) const {
    const uint32_t n = n_experts[layer];
    // The rows lie far apart in more memory than a cache holds: asked for together they come in the time of a few.
    each_row(layer, before, [&](size_t row) {
        for (uint32_t i = 0; i < n; i += CACHE_LINE / sizeof(int16_t)) {
            __builtin_prefetch(&weights[row + i]);
        }
    });
    std::fill_n(scores, n, 0);
    each_row(layer, before, [&](size_t row) { add_row(scores, &weights[row], n); });
}

void predictor::learn(uint32_t layer, const selection * before, const selection & selected, uint32_t top_k, int32_t * scores) {
    const uint32_t n = n_experts[layer], shift = learning_shift(top_k);
    const int32_t half = 1 << (shift - 1);
    of_selected.clear();
    for (uint32_t i = 0; i < selected.n; i++) {
        of_selected.push_back(scores[selected.ids[i]]);
    }
    steps_down(scores, n, shift);
    for (uint32_t i = 0; i < selected.n; i++) {
        scores[selected.ids[i]] = (std::max(PREDICTED_ONE - of_selected[i], 0) + half) >> shift;
    }
    each_row(layer, before, [&](size_t row) { correct_row(&weights[row], scores, n); });
}

}  // namespace spark
