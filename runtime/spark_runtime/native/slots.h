// Which experts of a class of layers are in slots, which one leaves when another is needed, and what was selected.
//
// Pure: no ggml, no device. The kernels of kernels.cu keep the same tables in device memory and decide the same way;
// a test replays traces through both. Layers whose experts have the same tensors share one pool of slots.
//
// The policy: an expert's score is its selections, each worth decay^age (age in tokens of its layer), plus a constant
// prior. The lowest score leaves, never one that the current call selected. Scores of layers that the call has not come
// to yet count double, because their routers may still ask for what would leave. Decay 0 is LRU, 1 counts without
// forgetting, a prior of +infinity pins.
//
// Layers are in the order in which a call computes them, so those after the one that misses are those to come.

//
// Experts may also be fetched early, by what predictor.h guesses of the next layer. That moves slots and time, never
// what is computed: ensure() still brings whatever was selected.

#pragma once

#include "predictor.h"

#include <cstdint>
#include <string>
#include <vector>

namespace spark {

constexpr int PHASES = 2;             // prefill, decode
constexpr int DECODE = 1;             // reuse distances are of this phase alone: prefill goes around the slots
constexpr uint32_t DECAY_STEP = 256;  // decay^age is the product of two table entries: age % 256 and age / 256
constexpr uint32_t SCORE_EXPONENT = 1u << 23;  // the lowest bit of a score's exponent, which is its lowest normal number

struct alignas(16) expert_meta {
    float score;       // decayed selections, as of `stamp`
    uint32_t stamp;    // the layer's selections up to and with the expert's last one; 0: never selected
    float prior;
    uint32_t touched;  // the step in which it was last selected
};

struct layer_state {
    uint32_t first;  // its first entry: entry = first + expert
    uint32_t n_experts;
    uint32_t top_k;
    uint32_t floor;       // it keeps at least so many slots
    uint32_t n_resident;
    uint32_t clock;       // selections so far; tokens = clock / top_k
    uint32_t n_pinned;
    uint32_t first_distance;  // its first counter of reuse distances, of n_experts + 1
    uint32_t recency_clock;   // as clock, of the session that is counted
    uint32_t first_weight;    // of its predictor
};

struct move {
    uint32_t expert;
    uint32_t slot;
};

// Counted since the last reset, apart for each phase.
struct phase_counts {
    std::vector<uint64_t> selections;  // per entry
    std::vector<uint64_t> distances;   // per layer n_experts + 1: reuse distances in decode, the last one first uses
    std::vector<uint64_t> tokens;      // per layer
    std::vector<uint64_t> cold;        // per layer: selections that found no slot
    std::vector<uint64_t> loads;       // per layer: experts copied to where they are multiplied
    std::vector<uint64_t> early;       // per layer: experts fetched early
    std::vector<uint64_t> used;        // per layer: of those, selected while they were there
    std::vector<uint64_t> wasted;      // per layer: of those, gone before anything selected them
    std::vector<std::vector<uint64_t> *> parts() { return {&selections, &distances, &tokens, &cold, &loads, &early, &used, &wasted}; }
};

constexpr uint32_t MAX_EARLY = 16;

// How experts are fetched early.
struct early_options {
    uint32_t most = 0;       // experts of a layer and token, at most MAX_EARLY; 0: nothing is guessed, learned or fetched early
    int32_t threshold = 0;   // guesses below stay where they are, in units of 1 / PREDICTED_ONE
    bool learning = true;
};

struct layer_start {
    uint32_t n_experts;
    uint32_t top_k;
    uint32_t slots;
    uint32_t pinned;
    const int32_t * order;  // all experts, hottest first
    const float * prior;    // per expert
};

class slot_pool {
  public:
    // Checks and takes over; an empty text, or what is wrong. Counts, scores, stamps and clocks of an earlier placement go on.
    std::string place(const std::vector<layer_start> & starts, float decay);

    // The most different experts that one call may select in a layer and find slots for.
    uint32_t capacity(uint32_t layer) const;

    // Makes the experts of one call resident: ids[n] in, slots[n] out, with what must be copied. At most capacity()
    // different experts. False for an id that is no expert; nothing has changed then.
    bool ensure(uint32_t layer, const int32_t * ids, uint32_t n, int phase, int32_t * slots, std::vector<move> & moves);

    // A call that goes around the slots: counts cold hits without moving anything.
    bool pass(uint32_t layer, const int32_t * ids, uint32_t n, int phase);

    // What one call selects, before fetch_early() and learn() of its step. Of several tokens nothing is guessed.
    void follow(uint32_t layer, const int32_t * ids, uint32_t n_used, uint32_t n_tokens);

    // The experts of the layer after `layer` to copy early, best guess first. They take slots of what nothing in this step
    // selected and nothing is guessed to select. Right after ensure() and follow() of `layer`.
    void fetch_early(uint32_t layer, int phase, std::vector<move> & moves);

    // After a step that succeeded, before end_step().
    void learn();
    void set_early(const early_options & options);
    // How many rows of weights a layer has; they go out and come in, unless null.
    uint32_t exchange_weights(uint32_t layer, int16_t * out, const int16_t * in);

    // The tokens of one step, after it succeeded, in order: counts, reuse distances, scores.
    void observe(uint32_t layer, const int32_t * ids, uint32_t n_used, uint32_t n_tokens, int phase);
    void end_step() { step++; }
    void reset_counts();

    uint32_t n_slots = 0;
    uint32_t step = 1;
    std::vector<layer_state> layers;
    std::vector<int32_t> slot_of;  // per entry; -1: not resident
    std::vector<expert_meta> meta;
    // Per entry, like a stamp, but of the one session that is counted: its reuse distances are its own, whoever else
    // uses the slots in between. Callers exchange it when another session goes on.
    std::vector<uint32_t> recency;
    float decay_low[DECAY_STEP];
    float decay_high[DECAY_STEP];
    phase_counts counts[PHASES];
    early_options early;
    predictor guesses;
    std::vector<uint32_t> waiting;  // per entry: 1 for one that was fetched early and not selected since

  private:
    struct followed {
        uint32_t step = 0;
        std::vector<int32_t> ids;
        uint32_t guessed = 0;         // the step that `scores` are of
        std::vector<int32_t> scores;  // what was guessed of the layer
    };
    std::vector<followed> selected;  // per layer: the single token of its last step
    const int32_t * guess(uint32_t layer, const selection * before);
    // The entry that leaves for one of `layer`; -1: none may. With `guessed` as fetch_early() needs it, after `current`.
    int64_t victim(uint32_t layer, uint32_t current, const int32_t * guessed) const;
    void take_slot(uint32_t layer, uint32_t entry, uint32_t leaving, int phase);
    bool is_single(uint32_t layer) const { return selected[layer].step == step; }
    void selected_before(uint32_t layer, selection * before) const;
    float weight(uint32_t age) const;
    bool valid(uint32_t layer, const int32_t * ids, uint32_t n) const;
};

}  // namespace spark
