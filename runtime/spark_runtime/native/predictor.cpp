#include "predictor.h"

#include "guess_loops.h"

#include <algorithm>

namespace spark {

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

// The rows of a guess, and all of them asked for. They lie far apart in more memory than a cache holds: together they come
// in the time of a few. Into the second-level cache, because a processor can wait for more lines there than in the first.
void predictor::find_rows(uint32_t layer, const selection * before) {
    const size_t width = n_experts[layer];
    int16_t * start = weights.data() + starts[layer];
    rows.clear();
    for (uint32_t back = 1; back <= PREDICTED_FROM && back <= layer; back++) {
        for (uint32_t i = 0; i < before[back - 1].n; i++) {
            rows.push_back(start + size_t(before[back - 1].ids[i]) * width);
        }
        start += n_experts[layer - back] * width;
    }
    rows.push_back(start);
    for (const int16_t * row : rows) {
        for (size_t i = 0; i < width; i += CACHE_LINE_BYTES / sizeof(int16_t)) {
            __builtin_prefetch(row + i, 0, 2);
        }
    }
}

void predictor::predict(uint32_t layer, const selection * before, int32_t * scores) {
    find_rows(layer, before);
    add_rows(scores, rows.data(), rows.size(), n_experts[layer]);
}

void predictor::learn(uint32_t layer, const selection * before, const selection & selected, uint32_t top_k, int32_t * scores) {
    const uint32_t n = n_experts[layer], shift = learning_shift(top_k);
    const int32_t half = 1 << (shift - 1);
    find_rows(layer, before);
    of_selected.clear();
    for (uint32_t i = 0; i < selected.n; i++) {
        of_selected.push_back(scores[selected.ids[i]]);
    }
    steps_down(scores, n, shift);
    for (uint32_t i = 0; i < selected.n; i++) {
        scores[selected.ids[i]] = (std::max(PREDICTED_ONE - of_selected[i], 0) + half) >> shift;
    }
    correct_rows(rows.data(), rows.size(), scores, n);
}

}  // namespace spark
