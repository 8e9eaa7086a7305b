// The slot state machine by itself, for Python: to replay traces without a model, and to look into the one of a tier.
//
// Pools made here and those of tiers are the same objects, so what a replay shows is what a tier would do.

#include "tier.h"

#include <algorithm>
#include <cstring>
#include <new>

using namespace spark;

namespace {

// As in spark_tier_take_fault: the whole length, and as much of the text as there is room for.
size_t give(const std::string & from, char * text, size_t room) {
    if (room > 0) {
        const size_t length = std::min(room - 1, from.size());
        std::memcpy(text, from.data(), length);
        text[length] = '\0';
    }
    return from.size();
}

}  // namespace

extern "C" {

SPARK_EXPORT tier_class * spark_slots_new(void) { return new (std::nothrow) tier_class; }

SPARK_EXPORT void spark_slots_free(tier_class * self) { delete self; }

// The pool of a tier's block and the block's place in it, or null. It is the tier's, and goes with its next placement;
// only to be read, after spark_tier_read.
SPARK_EXPORT tier_class * spark_slots_of_tier(tier * self, int32_t block, uint32_t * layer) {
    const std::lock_guard<std::mutex> lock(self->mutex);
    const auto found = self->layers.find(block);
    if (found == self->layers.end() || found->second->of == nullptr) {
        return nullptr;
    }
    *layer = found->second->index;
    return found->second->of;
}

// 0, or the length of what is wrong; nothing has changed then.
SPARK_EXPORT size_t spark_slots_place(tier_class * self, const layer_start * layers, size_t n_layers, float decay, char * text, size_t room) {
    try {
        const std::vector<layer_start> starts(layers, layers + n_layers);
        const size_t length = give(self->pool.place(starts, decay), text, room);
        if (length == 0) {
            self->whole = self->pool.n_slots == self->pool.slot_of.size();
        }
        return length;
    } catch (const std::bad_alloc &) {
        return give("no memory", text, room);
    }
}

SPARK_EXPORT uint32_t spark_slots_capacity(const tier_class * self, uint32_t layer) { return self->pool.capacity(layer); }

// Whether a call of so many tokens goes through the slots; the others go around them.
SPARK_EXPORT bool spark_slots_resident(const tier_class * self, uint32_t layer, uint32_t n_used, uint32_t n_tokens) {
    return self->resident(layer, n_used, n_tokens);
}

// How many experts to copy, with room for n of them in `moves`; -1 for ids that are no experts or too many of them.
SPARK_EXPORT int64_t spark_slots_ensure(tier_class * self, uint32_t layer, const int32_t * ids, uint32_t n, int phase, int32_t * slots, move * moves) {
    try {
        std::vector<move> made;
        if (!self->pool.ensure(layer, ids, n, phase, slots, made)) {
            return -1;
        }
        std::copy(made.begin(), made.end(), moves);
        return int64_t(made.size());
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

SPARK_EXPORT int spark_slots_pass(tier_class * self, uint32_t layer, const int32_t * ids, uint32_t n, int phase) {
    try {
        return self->pool.pass(layer, ids, n, phase) ? 0 : 1;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// The ids must have been through one of the two above, which check them.
SPARK_EXPORT void spark_slots_observe(tier_class * self, uint32_t layer, const int32_t * ids, uint32_t n_used, uint32_t n_tokens, int phase) {
    self->pool.observe(layer, ids, n_used, n_tokens, phase);
}

SPARK_EXPORT void spark_slots_end_step(tier_class * self) { self->pool.end_step(); }

SPARK_EXPORT void spark_slots_reset_counts(tier_class * self) { self->pool.reset_counts(); }

SPARK_EXPORT void spark_slots_layer(const tier_class * self, uint32_t layer, layer_state * out) { *out = self->pool.layers[layer]; }

// Per expert of a layer: its slot, its score with what goes into it, and its recency in the counted session.
SPARK_EXPORT void spark_slots_experts(const tier_class * self, uint32_t layer, int32_t * slots, expert_meta * meta, uint32_t * recency) {
    const slot_pool & pool = self->pool;
    const layer_state & state = pool.layers[layer];
    std::copy_n(pool.slot_of.begin() + state.first, state.n_experts, slots);
    std::copy_n(pool.meta.begin() + state.first, state.n_experts, meta);
    std::copy_n(pool.recency.begin() + state.first, state.n_experts, recency);
}

SPARK_EXPORT void spark_slots_set_early(tier_class * self, uint32_t most, int32_t threshold, bool learning) {
    self->pool.set_early({most, threshold, learning});
}

// What spark_tier_guesses gives, of a pool: how many rows; the weights out of it and into it, unless null.
SPARK_EXPORT uint32_t spark_slots_guesses(tier_class * self, uint32_t layer, int16_t * out, const int16_t * in) {
    return self->pool.exchange_weights(layer, out, in);
}

SPARK_EXPORT void spark_slots_follow(tier_class * self, uint32_t layer, const int32_t * ids, uint32_t n_used, uint32_t n_tokens) {
    self->pool.follow(layer, ids, n_used, n_tokens);
}

// How many experts of the next layer to copy; room for `most` of them in `moves`.
SPARK_EXPORT uint32_t spark_slots_fetch_early(tier_class * self, uint32_t layer, int phase, move * moves) {
    std::vector<move> made;
    self->pool.fetch_early(layer, phase, made);
    std::copy(made.begin(), made.end(), moves);
    return uint32_t(made.size());
}

SPARK_EXPORT void spark_slots_learn(tier_class * self) { self->pool.learn(); }

// Decodes tokens one at a time, ids[token][layer][k]: every layer's experts into slots, the next layer's fetched early,
// then all of it counted. As a tier does, many tokens a call; the ids must be experts of their layers.
SPARK_EXPORT void spark_slots_decode(tier_class * self, const int32_t * ids, size_t n_tokens, uint32_t top_k) {
    slot_pool & pool = self->pool;
    const uint32_t n_layers = uint32_t(pool.layers.size());
    std::vector<move> moves;
    std::vector<int32_t> slots(top_k);
    for (size_t token = 0; token < n_tokens; token++, ids += size_t(n_layers) * top_k) {
        for (uint32_t layer = 0; layer < n_layers; layer++) {
            pool.ensure(layer, ids + size_t(layer) * top_k, top_k, DECODE, slots.data(), moves);
            pool.follow(layer, ids + size_t(layer) * top_k, top_k, 1);
            pool.fetch_early(layer, DECODE, moves);
        }
        for (uint32_t layer = 0; layer < n_layers; layer++) {
            pool.observe(layer, ids + size_t(layer) * top_k, top_k, 1, DECODE);
        }
        pool.learn();
        pool.end_step();
    }
}

// As spark_tier_counts: selections[n_experts], distances[n_experts + 1], then tokens, cold hits, loads, those fetched
// early, and of these the used and the wasted ones.
SPARK_EXPORT void spark_slots_counts(const tier_class * self, uint32_t layer, int phase, uint64_t * out) {
    const phase_counts & bank = self->pool.counts[phase];
    const layer_state & state = self->pool.layers[layer];
    out = std::copy_n(bank.selections.begin() + state.first, state.n_experts, out);
    out = std::copy_n(bank.distances.begin() + state.first_distance, state.n_experts + 1, out);
    for (const auto * part : {&bank.tokens, &bank.cold, &bank.loads, &bank.early, &bank.used, &bank.wasted}) {
        *out++ = (*part)[layer];
    }
}

}  // extern "C"
