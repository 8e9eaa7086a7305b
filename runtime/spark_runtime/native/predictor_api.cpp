// The predictor by itself, for Python: what would have been guessed of a trace, whatever is in slots.

#include "ggml_layout.h"
#include "predictor.h"

#include <algorithm>
#include <new>

using namespace spark;

extern "C" {

// Null without memory.
SPARK_EXPORT predictor * spark_predictor_new(const uint32_t * n_experts, size_t n_layers) {
    try {
        predictor * self = new predictor;
        try {
            self->prepare(std::vector<uint32_t>(n_experts, n_experts + n_layers));
        } catch (const std::bad_alloc &) {
            delete self;
            return nullptr;
        }
        return self;
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

SPARK_EXPORT void spark_predictor_free(predictor * self) { delete self; }

// How many rows of weights a layer has; they go out and come in, unless null.
SPARK_EXPORT uint32_t spark_predictor_weights(predictor * self, uint32_t layer, int16_t * out, const int16_t * in) {
    const uint32_t n_rows = self->n_rows(layer);
    const size_t n = size_t(n_rows) * self->n_experts[layer];
    int16_t * mine = self->weights.data() + self->first(layer);
    if (out != nullptr) {
        std::copy_n(mine, n, out);
    }
    if (in != nullptr) {
        std::copy_n(in, n, mine);
    }
    return n_rows;
}

// Guesses for tokens one after the other, ids[token][layer][k], which must be experts of their layers, and learns from
// each. Of every layer the experts guessed at `least` or more go to `found`, the best first, then the lower number, and how
// many they are to counts[token][layer]. How many tokens there was room for: each needs room for all experts of all
// layers. -1 without memory.
SPARK_EXPORT int64_t spark_predictor_replay(predictor * self, const int32_t * ids, size_t n_tokens, uint32_t top_k, int32_t least, bool learning,
                                            uint16_t * counts, uint16_t * found, size_t room) {
    const uint32_t n_layers = uint32_t(self->n_experts.size());
    size_t n_entries = 0;
    for (uint32_t n : self->n_experts) {
        n_entries += n;
    }
    try {
        std::vector<int32_t> scores(n_entries ? *std::max_element(self->n_experts.begin(), self->n_experts.end()) : 0);
        for (size_t token = 0; token < n_tokens; token++) {
            if (room < n_entries) {
                return int64_t(token);
            }
            const int32_t * selected = ids + token * n_layers * top_k;
            uint16_t * of_layers = counts + token * n_layers;
            of_layers[0] = 0;
            for (uint32_t layer = 1; layer < n_layers; layer++) {
                selection before[PREDICTED_FROM];
                for (uint32_t back = 1; back <= PREDICTED_FROM && back <= layer; back++) {
                    before[back - 1] = {selected + size_t(layer - back) * top_k, top_k};
                }
                self->predict(layer, before, scores.data());
                uint16_t * end = found;
                for (uint32_t expert = 0; expert < self->n_experts[layer]; expert++) {
                    if (scores[expert] >= least) {
                        *end++ = uint16_t(expert);
                    }
                }
                std::sort(found, end, [&](uint16_t a, uint16_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
                of_layers[layer] = uint16_t(end - found);
                room -= size_t(end - found);
                found = end;
                if (learning) {
                    self->learn(layer, before, {selected + size_t(layer) * top_k, top_k}, top_k, scores.data());
                }
            }
        }
    } catch (const std::bad_alloc &) {
        return -1;
    }
    return int64_t(n_tokens);
}

}  // extern "C"
