#include "slots.h"

#include "guess_loops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace spark {

namespace {

std::string in_layer(size_t layer, const std::string & text) { return "layer " + std::to_string(layer) + ": " + text; }

// What candidates are compared by, the lowest first: whether this step selected it, its score, its stamp. Scores are never
// negative, so their bits are ordered as they are. One more in the exponent doubles a score; one without an exponent
// (0 and below the normal numbers) is doubled by adding its bits to themselves. Above the largest float the bits go on.
uint64_t eviction_key(bool touched, float score, uint32_t stamp, bool to_come) {
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof(bits));
    if (to_come) {
        bits += std::min(bits, SCORE_EXPONENT);
    }
    return uint64_t(touched) << 63 | uint64_t(bits) << 32 | stamp;
}

std::string check(size_t layer, const layer_start & start) {
    const std::string experts = std::to_string(start.n_experts) + " experts";
    if (start.top_k < 1 || start.top_k > start.n_experts) {
        return in_layer(layer, "top_k " + std::to_string(start.top_k) + ", expected 1 to its " + experts);
    }
    if (start.slots > start.n_experts) {
        return in_layer(layer, std::to_string(start.slots) + " slots, expected at most its " + experts);
    }
    const uint32_t floor = std::min(2 * start.top_k, start.n_experts);
    if (start.slots < floor) {
        return in_layer(layer, std::to_string(start.slots) + " slots, expected at least 2 * top_k = " + std::to_string(floor));
    }
    if (start.pinned > start.slots) {
        return in_layer(layer, std::to_string(start.pinned) + " pinned, expected at most its " + std::to_string(start.slots) + " slots");
    }
    std::vector<char> seen(start.n_experts, 0);
    for (uint32_t i = 0; i < start.n_experts; i++) {
        const int32_t expert = start.order[i];
        if (expert < 0 || uint32_t(expert) >= start.n_experts) {
            return in_layer(layer, "expert " + std::to_string(expert) + ", expected 0 to " + std::to_string(start.n_experts - 1));
        }
        if (seen[expert]++) {
            return in_layer(layer, "expert " + std::to_string(expert) + " twice, expected every expert once");
        }
        if (!std::isfinite(start.prior[i]) || start.prior[i] < 0) {
            return in_layer(layer, "the prior of expert " + std::to_string(i) + " is not a finite number from 0 on");
        }
    }
    return "";
}

}  // namespace

std::string slot_pool::place(const std::vector<layer_start> & starts, float decay) {
    if (!(decay >= 0 && decay <= 1)) {
        return "decay " + std::to_string(decay) + ", expected 0 to 1";
    }
    uint32_t n_entries = 0, n_distances = 0, total = 0, needed = 0;
    for (size_t i = 0; i < starts.size(); i++) {
        const std::string fault = check(i, starts[i]);
        if (!fault.empty()) {
            return fault;
        }
        n_entries += starts[i].n_experts;
        total += starts[i].slots;
        needed += std::max(std::min(2 * starts[i].top_k, starts[i].n_experts), starts[i].pinned);
    }
    for (size_t i = 0; i < starts.size(); i++) {
        // Once every other layer has only what it cannot lose, a token of this layer must still find its slots.
        const uint32_t floor = std::min(2 * starts[i].top_k, starts[i].n_experts);
        const uint32_t others = needed - std::max(floor, starts[i].pinned);
        const uint32_t free = total - others - starts[i].pinned;
        if (starts[i].slots < starts[i].n_experts && (total < others + starts[i].pinned || free < starts[i].top_k)) {
            return in_layer(i, std::to_string(starts[i].pinned) + " pinned leave fewer than top_k = " + std::to_string(starts[i].top_k) +
                                   " slots for the rest");
        }
    }
    const bool same = std::equal(layers.begin(), layers.end(), starts.begin(), starts.end(),
                                 [](const layer_state & old, const layer_start & start) { return old.n_experts == start.n_experts; });
    if (!same) {
        layers.assign(starts.size(), layer_state{});
        meta.assign(n_entries, expert_meta{0, 0, 0, 0});
        recency.assign(n_entries, 0);
        selected.assign(starts.size(), followed{});
        waiting.assign(n_entries, 0);
    }
    const std::vector<int32_t> before = same && n_slots == total ? slot_of : std::vector<int32_t>(n_entries, -1);
    slot_of.assign(n_entries, -1);
    n_slots = total;
    std::vector<char> taken(n_slots, 0);
    std::vector<uint32_t> arriving;
    n_entries = 0;
    for (size_t i = 0; i < starts.size(); i++) {
        const layer_start & start = starts[i];
        layer_state & layer = layers[i];
        layer.first = n_entries;
        layer.n_experts = start.n_experts;
        layer.top_k = start.top_k;
        layer.floor = std::min(2 * start.top_k, start.n_experts);
        layer.n_resident = start.slots;
        layer.n_pinned = start.pinned;
        layer.first_distance = n_distances;
        for (uint32_t rank = 0; rank < start.n_experts; rank++) {
            const uint32_t expert = uint32_t(start.order[rank]);
            meta[n_entries + expert].prior = rank < start.pinned ? INFINITY : start.prior[expert];
        }
        // In the order of experts, so that a layer that is here as a whole can be used as it is.
        std::vector<int32_t> resident(start.order, start.order + start.slots);
        std::sort(resident.begin(), resident.end());
        for (int32_t expert : resident) {
            const uint32_t entry = n_entries + uint32_t(expert);
            if (before[entry] >= 0) {
                slot_of[entry] = before[entry];  // what stays, stays where it is
                taken[size_t(before[entry])] = 1;
            } else {
                arriving.push_back(entry);
            }
        }
        n_entries += start.n_experts;
        n_distances += start.n_experts + 1;
    }
    uint32_t free = 0;
    for (uint32_t entry : arriving) {
        while (taken[free]) {
            free++;
        }
        slot_of[entry] = int32_t(free++);
    }
    for (uint32_t i = 0; i < DECAY_STEP; i++) {
        decay_low[i] = float(std::pow(double(decay), double(i)));
        decay_high[i] = float(std::pow(double(decay), double(i) * DECAY_STEP));
    }
    if (!same) {
        for (phase_counts & bank : counts) {
            for (auto * part : bank.parts()) {
                part->assign(layers.size(), 0);
            }
            bank.selections.assign(n_entries, 0);
            bank.distances.assign(n_distances, 0);
        }
    }
    for (uint32_t entry = 0; entry < n_entries; entry++) {
        waiting[entry] = waiting[entry] && slot_of[entry] >= 0;
    }
    set_early(early);
    return "";
}

void slot_pool::reset_counts() {
    for (phase_counts & bank : counts) {
        for (auto * part : bank.parts()) {
            std::fill(part->begin(), part->end(), 0);
        }
    }
}

uint32_t slot_pool::capacity(uint32_t layer) const {
    uint32_t taken = layers[layer].n_pinned;
    for (uint32_t other = 0; other < layers.size(); other++) {
        if (other != layer) {
            taken += std::max(layers[other].floor, layers[other].n_pinned);
        }
    }
    return taken < n_slots ? n_slots - taken : 0;
}

bool slot_pool::valid(uint32_t layer, const int32_t * ids, uint32_t n) const {
    return std::all_of(ids, ids + n, [&](int32_t id) { return id >= 0 && uint32_t(id) < layers[layer].n_experts; });
}

float slot_pool::weight(uint32_t age) const {
    const uint32_t high = age / DECAY_STEP;
    return decay_low[age % DECAY_STEP] * decay_high[high < DECAY_STEP ? high : DECAY_STEP - 1];
}

// The entry that leaves for an expert of `layer`: first one that this step did not select, then the lowest score, which
// counts double in layers to come, then the longest unused, then the lowest entry.
//
// For a guess nothing leaves that this step selected anywhere, nor what the layer is guessed to select itself: its router
// has not chosen yet, so it is one of those to come.
int64_t slot_pool::victim(uint32_t layer, uint32_t current, const int32_t * guessed) const {
    int64_t best = -1;
    uint64_t best_key = 0;
    for (uint32_t other = 0; other < layers.size(); other++) {
        const layer_state & state = layers[other];
        if (other != layer && state.n_resident <= state.floor) {
            continue;
        }
        for (uint32_t entry = state.first; entry < state.first + state.n_experts; entry++) {
            const expert_meta & expert = meta[entry];
            const bool touched = expert.touched == step;
            if (slot_of[entry] < 0 || std::isinf(expert.prior) || (touched && (guessed != nullptr || other == layer))) {
                continue;
            }
            if (guessed != nullptr && other == layer && guessed[entry - state.first] >= early.threshold) {
                continue;
            }
            const uint32_t age = (state.clock + state.top_k - expert.stamp) / state.top_k;
            const float decayed = expert.score * weight(age);
            const float score = expert.prior + decayed;
            const uint64_t key = eviction_key(touched, score, expert.stamp, other > current);
            if (best < 0 || key < best_key) {
                best = entry;
                best_key = key;
            }
        }
    }
    return best;
}

bool slot_pool::ensure(uint32_t layer, const int32_t * ids, uint32_t n, int phase, int32_t * slots, std::vector<move> & moves) {
    moves.clear();
    if (!valid(layer, ids, n)) {
        return false;
    }
    layer_state & state = layers[layer];
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t entry = state.first + uint32_t(ids[i]);
        meta[entry].touched = step;
        counts[phase].cold[layer] += slot_of[entry] < 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t entry = state.first + uint32_t(ids[i]);
        if (slot_of[entry] >= 0) {
            continue;
        }
        if (std::any_of(moves.begin(), moves.end(), [&](const move & m) { return m.expert == uint32_t(ids[i]); })) {
            continue;
        }
        const int64_t leaving = victim(layer, layer, nullptr);
        if (leaving < 0) {
            return false;  // more experts than capacity(): a fault of the caller
        }
        moves.push_back({uint32_t(ids[i]), uint32_t(slot_of[size_t(leaving)])});
        take_slot(layer, entry, uint32_t(leaving), phase);
    }
    counts[phase].loads[layer] += moves.size();
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = slot_of[state.first + uint32_t(ids[i])];
    }
    return true;
}

void slot_pool::take_slot(uint32_t layer, uint32_t entry, uint32_t leaving, int phase) {
    uint32_t owner = 0;
    while (owner + 1 < layers.size() && layers[owner + 1].first <= leaving) {
        owner++;
    }
    slot_of[entry] = slot_of[leaving];
    slot_of[leaving] = -1;
    layers[owner].n_resident--;
    layers[layer].n_resident++;
    if (waiting[leaving]) {
        waiting[leaving] = 0;
        counts[phase].wasted[owner]++;
    }
}

void slot_pool::set_early(const early_options & options) {
    early = options;
    early.most = std::min(early.most, MAX_EARLY);
    if (early.most == 0) {
        guesses.forget();
        return;
    }
    std::vector<uint32_t> sizes;
    for (const layer_state & layer : layers) {
        sizes.push_back(layer.n_experts);
    }
    guesses.prepare(sizes);
    for (uint32_t layer = 0; layer < layers.size(); layer++) {
        layers[layer].first_weight = guesses.first(layer);
    }
}

uint32_t slot_pool::exchange_weights(uint32_t layer, int16_t * out, const int16_t * in) {
    if (early.most == 0) {
        return 0;
    }
    const uint32_t n_rows = guesses.n_rows(layer);
    const size_t n = size_t(n_rows) * layers[layer].n_experts;
    int16_t * mine = guesses.weights.data() + guesses.first(layer);
    if (out != nullptr) {
        std::copy_n(mine, n, out);
    }
    if (in != nullptr) {
        std::copy_n(in, n, mine);
        selected[layer].guessed = 0;
    }
    return n_rows;
}

void slot_pool::follow(uint32_t layer, const int32_t * ids, uint32_t n_used, uint32_t n_tokens) {
    if (early.most != 0 && n_tokens == 1) {
        selected[layer].step = step;
        selected[layer].ids.assign(ids, ids + n_used);
    }
}

void slot_pool::selected_before(uint32_t layer, selection * before) const {
    for (uint32_t back = 1; back <= PREDICTED_FROM; back++) {
        before[back - 1] = {};
        if (back <= layer && is_single(layer - back)) {
            before[back - 1] = {selected[layer - back].ids.data(), uint32_t(selected[layer - back].ids.size())};
        }
    }
}

// Of this step; made once, because nothing is learned before its end.
const int32_t * slot_pool::guess(uint32_t layer, const selection * before) {
    followed & token = selected[layer];
    if (token.guessed != step) {
        token.guessed = step;
        token.scores.resize(layers[layer].n_experts);
        guesses.predict(layer, before, token.scores.data());
    }
    return token.scores.data();
}

void slot_pool::fetch_early(uint32_t layer, int phase, std::vector<move> & moves) {
    moves.clear();
    const uint32_t next = layer + 1;
    if (early.most == 0 || next >= layers.size() || !is_single(layer)) {
        return;
    }
    const layer_state & state = layers[next];
    selection before[PREDICTED_FROM];
    selected_before(next, before);
    const int32_t * scores = guess(next, before);
    while (moves.size() < early.most) {
        const int64_t best = best_missing(scores, &slot_of[state.first], state.n_experts, early.threshold);
        const int64_t leaving = best < 0 ? -1 : victim(next, layer, scores);
        if (leaving < 0) {
            break;
        }
        const uint32_t entry = state.first + uint32_t(best);
        moves.push_back({uint32_t(best), uint32_t(slot_of[size_t(leaving)])});
        take_slot(next, entry, uint32_t(leaving), phase);
        waiting[entry] = 1;
    }
    counts[phase].early[next] += moves.size();
}

void slot_pool::learn() {
    for (uint32_t layer = 1; early.most != 0 && early.learning && layer < layers.size(); layer++) {
        if (!is_single(layer) || !is_single(layer - 1)) {
            continue;
        }
        selection before[PREDICTED_FROM];
        selected_before(layer, before);
        guess(layer, before);
        followed & token = selected[layer];
        guesses.learn(layer, before, {token.ids.data(), uint32_t(token.ids.size())}, layers[layer].top_k, token.scores.data());
    }
}

bool slot_pool::pass(uint32_t layer, const int32_t * ids, uint32_t n, int phase) {
    if (!valid(layer, ids, n)) {
        return false;
    }
    std::vector<char> missing(layers[layer].n_experts, 0);
    for (uint32_t i = 0; i < n; i++) {
        if (slot_of[layers[layer].first + uint32_t(ids[i])] < 0) {
            counts[phase].cold[layer]++;
            missing[ids[i]] = 1;
        }
    }
    counts[phase].loads[layer] += uint64_t(std::count(missing.begin(), missing.end(), 1));
    return true;
}

void slot_pool::observe(uint32_t layer, const int32_t * ids, uint32_t n_used, uint32_t n_tokens, int phase) {
    layer_state & state = layers[layer];
    phase_counts & bank = counts[phase];
    const uint32_t end = state.first + state.n_experts;
    bank.tokens[layer] += n_tokens;
    for (uint32_t token = 0; token < n_tokens; token++, ids += n_used) {
        // All selections of a token are measured before any of them moves to the front.
        for (uint32_t i = 0; i < n_used; i++) {
            const uint32_t entry = state.first + uint32_t(ids[i]);
            bank.selections[entry]++;
            bank.used[layer] += waiting[entry];
            waiting[entry] = 0;
            if (phase != DECODE) {
                continue;
            }
            uint32_t distance = state.n_experts;
            if (recency[entry]) {
                distance = 0;
                for (uint32_t other = state.first; other < end; other++) {
                    distance += recency[other] > recency[entry];
                }
            }
            bank.distances[state.first_distance + distance]++;
        }
        const uint32_t now = state.clock + n_used;
        for (uint32_t i = 0; i < n_used; i++) {
            const uint32_t entry = state.first + uint32_t(ids[i]);
            expert_meta & expert = meta[entry];
            const float decayed = expert.score * weight((now - expert.stamp) / state.top_k);
            expert.score = decayed + 1.0f;
            expert.stamp = now - i;  // the router's first choice is the most recent of its token
            if (phase == DECODE) {
                recency[entry] = state.recency_clock + n_used - i;
            }
        }
        state.clock = now;
        state.recency_clock += phase == DECODE ? n_used : 0;
    }
}

}  // namespace spark
