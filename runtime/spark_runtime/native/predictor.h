// What a layer will select, guessed from what the one or two layers before it selected for the same token.
//
// Pure, and whole numbers only: every processor and every order of additions gives the same bits, so the kernels of
// kernels.cu guess and learn alike. A layer's guess is a sum of rows of its weights, a row for each expert that was
// selected before and one for the expert's own frequency, in units of 1 / PREDICTED_ONE of a selection. It is learned by
// the rule of Widrow and Hoff (1960), one small step for each token, with one change: a guess that errs on the right side
// is not corrected, because only the order of guesses matters.

#pragma once

#include "huge_memory.h"

#include <cstdint>
#include <vector>

namespace spark {

constexpr int32_t PREDICTED_ONE = 1 << 14;   // the guess for an expert that is certain to be selected
constexpr uint32_t LEARNING_SHIFT = 6;       // an error is corrected by 1 / 64 in every row that made it
constexpr uint32_t PREDICTED_FROM = 2;       // layers before

// The ids of one token in one layer; none where they are not known.
struct selection {
    const int32_t * ids = nullptr;
    uint32_t n = 0;
};

using weight_array = std::vector<int16_t, huge_memory<int16_t>>;

class predictor {
  public:
    // As many weights as such layers need, all 0; what was learned stays if they are the same layers as before.
    void prepare(const std::vector<uint32_t> & n_experts);
    void forget() { *this = predictor(); }

    // Where a layer's weights start: a row of its experts for each expert of the layer before, then of the one before
    // that, then one row that is always added. The first layer has none.
    uint32_t first(uint32_t layer) const { return starts[layer]; }
    uint32_t n_rows(uint32_t layer) const;

    // Guesses for every expert of a layer from 1 on; before[0] is of the layer before it.
    void predict(uint32_t layer, const selection * before, int32_t * scores);
    // Corrects them by what was selected, given predict()'s `scores`, which become the corrections.
    void learn(uint32_t layer, const selection * before, const selection & selected, uint32_t top_k, int32_t * scores);

    std::vector<uint32_t> n_experts;  // by layer; empty: nothing is predicted
    weight_array weights;

  private:
    std::vector<uint32_t> starts;
    std::vector<int16_t *> rows;  // of one guess; these two are kept for their memory
    std::vector<int32_t> of_selected;
    void find_rows(uint32_t layer, const selection * before);
};

// By how many bits an error is shifted: less where more rows share it.
inline uint32_t learning_shift(uint32_t top_k) {
    uint32_t shift = LEARNING_SHIFT;
    while ((1u << shift) < 2 * (PREDICTED_FROM * top_k + 1)) {
        shift++;
    }
    return shift;
}

}  // namespace spark
