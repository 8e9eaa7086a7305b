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

#pragma once

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
    uint32_t unused;
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

  private:
    int64_t victim(uint32_t layer) const;
    float weight(uint32_t age) const;
    bool valid(uint32_t layer, const int32_t * ids, uint32_t n) const;
};

}  // namespace spark
