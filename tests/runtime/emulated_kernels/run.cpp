// Our kernels on the processor beside slot_pool: the same selections, and after every call the same slots, with the bytes
// in them that belong there, while copies that were begun early come as late or as soon as it happens.
//
// run SEED STEPS: says what differed and ends with 1, or prints how much was tried.

#include "emulator.h"
#include "kernels_emulated.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

using namespace spark;

namespace {

constexpr uint32_t ENSURING_BLOCKS = 3, COPYING_BLOCKS = 2;

struct kind {
    uint64_t bytes;
    std::vector<std::vector<char>> all;  // by layer
    std::vector<char> slots, scratch;
};

[[noreturn]] void fail(const char * what, uint64_t step, uint32_t layer) {
    std::printf("%s differ in step %llu, layer %u\n", what, (unsigned long long) step, layer);
    std::exit(1);
}

class trial {
  public:
    trial(uint64_t seed, uint32_t n_steps) : random(seed) {
        const uint32_t n_layers = number(2, 6), top_k = number(1, 5);
        std::vector<std::vector<int32_t>> orders;
        std::vector<std::vector<float>> priors;
        std::vector<layer_start> starts;
        for (uint32_t l = 0; l < n_layers; l++) {
            const uint32_t n = number(2 * top_k, 40);
            orders.emplace_back(n);
            priors.emplace_back(n);
            for (uint32_t i = 0; i < n; i++) {
                orders[l][i] = int32_t(i);
                priors[l][i] = float(number(0, 3)) / 4;
            }
            std::shuffle(orders[l].begin(), orders[l].end(), random);
            starts.push_back({n, top_k, number(2 * top_k, n), 0, nullptr, nullptr});
        }
        for (uint32_t l = 0; l < n_layers; l++) {
            starts[l].order = orders[l].data();
            starts[l].prior = priors[l].data();
        }
        const std::string fault = pool.place(starts, number(0, 3) == 0 ? 0.0f : 0.97f);
        if (!fault.empty()) {
            std::printf("%s\n", fault.c_str());
            std::exit(1);
        }
        pool.set_early({number(0, 4), number(0, 2) == 0 ? INT32_MIN : int32_t(number(0, PREDICTED_ONE / 2)), number(0, 3) > 0});
        make_memory(top_k);
        for (step = 0; step < n_steps; step++) {
            take_step(top_k);
        }
    }

    uint64_t chosen = 0, missed = 0, early = 0, in_time = 0, too_late = 0;

  private:
    std::mt19937_64 random;
    slot_pool pool;
    uint64_t step = 0;
    std::vector<kind> kinds;
    device_class tables = {};
    device_control control = {};
    device_flight flight = {};
    uint32_t urgent = 0;
    int32_t fault[4] = {};
    std::vector<int32_t> slot_of, ids, slots;
    std::vector<expert_meta> meta;
    std::vector<uint32_t> recency, waiting, mask;
    std::vector<uint16_t> layer_of;
    std::vector<layer_state> layers;
    std::vector<device_head> heads;
    std::vector<std::vector<int32_t>> seen;
    std::vector<int32_t *> seen_of;
    std::vector<float> decay;
    std::vector<uint64_t> counts;
    decltype(predictor::weights) weights;
    std::vector<std::thread> in_flight;
    // Now and then a copy does not begin before spark_ensure has returned, which must not wait for that.
    std::shared_ptr<std::atomic<bool>> started = std::make_shared<std::atomic<bool>>(true);
    std::vector<move> moves;

    uint32_t number(uint32_t from, uint32_t to) { return std::uniform_int_distribution<uint32_t>(from, to)(random); }

    template <typename type> void table(type *& at, std::vector<type> & mine, const std::vector<type> & from) {
        mine = from;
        at = mine.data();
    }

    void make_memory(uint32_t top_k) {
        for (uint32_t k = number(1, 3); k > 0; k--) {
            kind made;
            made.bytes = number(0, 1) ? 16 * number(1, 40) : number(3, 700);
            for (const layer_state & layer : pool.layers) {
                made.all.emplace_back(layer.n_experts * made.bytes);
                for (char & byte : made.all.back()) {
                    byte = char(random());
                }
            }
            made.slots.assign(pool.n_slots * made.bytes, 0);
            made.scratch.assign(64 * made.bytes, 0);
            kinds.push_back(std::move(made));
        }
        const uint32_t n_layers = uint32_t(pool.layers.size()), n_entries = uint32_t(pool.slot_of.size());
        for (uint32_t l = 0; l < n_layers; l++) {
            layer_of.insert(layer_of.end(), pool.layers[l].n_experts, uint16_t(l));
            seen.emplace_back(8 * top_k);
            for (uint32_t e = 0; e < pool.layers[l].n_experts; e++) {
                const int32_t slot = pool.slot_of[pool.layers[l].first + e];
                for (kind & k : kinds) {
                    if (slot >= 0) {
                        std::memcpy(&k.slots[uint64_t(slot) * k.bytes], &k.all[l][e * k.bytes], k.bytes);
                    }
                }
            }
        }
        for (auto & each : seen) {
            seen_of.push_back(each.data());
        }
        tables.layer_of = layer_of.data();
        tables.seen = seen_of.data();
        table(tables.slot_of, slot_of, pool.slot_of);
        table(tables.meta, meta, pool.meta);
        table(tables.recency, recency, pool.recency);
        table(tables.layers, layers, pool.layers);
        table(tables.waiting, waiting, pool.waiting);
        table(tables.heads, heads, std::vector<device_head>(n_layers));
        decay.assign(pool.decay_low, pool.decay_low + DECAY_STEP);
        decay.insert(decay.end(), pool.decay_high, pool.decay_high + DECAY_STEP);
        tables.decay = decay.data();
        for (phase_counts & bank : pool.counts) {
            size_t all = 0;
            for (const auto * part : bank.parts()) {
                all += part->size();
            }
            tables.n_counts = uint32_t(all);
        }
        table(tables.counts, counts, std::vector<uint64_t>(PHASES * tables.n_counts));
        weights = pool.guesses.weights;
        tables.weights = pool.early.most > 0 ? weights.data() : nullptr;
        mask.assign(n_entries, 0);
        control.step = pool.step;
        tables.control = &control;
        tables.flight = &flight;
        tables.urgent = &urgent;
        tables.fault = fault;
        tables.n_layers = n_layers;
        tables.n_entries = n_entries;
        uint32_t * const starts[] = {&tables.distances, &tables.tokens, &tables.cold, &tables.loads, &tables.early, &tables.used, &tables.wasted};
        const auto parts = pool.counts[0].parts();
        uint32_t at = 0;
        for (size_t i = 0; i + 1 < parts.size(); i++) {
            at += uint32_t(parts[i]->size());
            *starts[i] = at;
        }
        tables.most = pool.early.most;
        tables.threshold = pool.early.threshold;
    }

    device_call arguments(uint32_t layer) {
        device_call call = {};
        call.seen = seen[layer].data();
        call.mask = &mask[pool.layers[layer].first];
        call.layer = layer;
        call.first = pool.layers[layer].first;
        call.n_experts = pool.layers[layer].n_experts;
        call.n_kinds = uint32_t(kinds.size());
        for (size_t k = 0; k < kinds.size(); k++) {
            call.kinds[k] = {kinds[k].all[layer].data(), kinds[k].slots.data(), kinds[k].scratch.data(), kinds[k].bytes};
        }
        return call;
    }

    template <typename function> void run(function && kernel, uint32_t blocks, size_t shared_bytes = 0) {
        auto running = emulator::launch(kernel, blocks, SPARK_BLOCK_THREADS, shared_bytes);
        emulator::join(running);
    }

    void check_bytes(uint32_t layer, uint32_t expert, const char * what) {
        const uint64_t slot = uint64_t(pool.slot_of[pool.layers[layer].first + expert]);
        for (const kind & k : kinds) {
            if (std::memcmp(&k.slots[slot * k.bytes], &k.all[layer][expert * k.bytes], k.bytes) != 0) {
                fail(what, step, layer);
            }
        }
    }

    void check_selected(uint32_t layer, const char * what) {
        for (int32_t id : ids) {
            check_bytes(layer, uint32_t(id), what);
        }
    }

    void select(uint32_t layer, uint32_t top_k, uint32_t n_tokens) {
        const uint32_t n = pool.layers[layer].n_experts;
        ids.clear();
        for (uint32_t token = 0; token < n_tokens; token++) {
            std::vector<int32_t> mine;
            while (mine.size() < top_k) {
                // What comes next to what the step before selected, or anything: guesses are right now and then.
                const int32_t id = int32_t((number(0, 3) ? (step % 7) * 3 + layer + number(0, top_k + 1) : number(0, n - 1)) % n);
                if (std::find(mine.begin(), mine.end(), id) == mine.end()) {
                    mine.push_back(id);
                } else {
                    mine.push_back(-1);
                    mine.pop_back();
                    if (number(0, 3) == 0) {
                        const int32_t any = int32_t(number(0, n - 1));
                        if (std::find(mine.begin(), mine.end(), any) == mine.end()) {
                            mine.push_back(any);
                        }
                    }
                }
            }
            ids.insert(ids.end(), mine.begin(), mine.end());
        }
    }

    bool flying() const {
        return std::any_of(&flight.landed[0], &flight.landed[flight.n_moves], [&](const uint32_t & landed) {
            return __atomic_load_n(&landed, __ATOMIC_RELAXED) < expert_chunks();
        });
    }
    uint32_t expert_chunks() const {
        uint32_t n = 0;
        for (const kind & k : kinds) {
            n += uint32_t((k.bytes + SPARK_CHUNK_BYTES - 1) / SPARK_CHUNK_BYTES);
        }
        return n;
    }

    void take_step(uint32_t top_k) {
        const int phase = int(number(0, 1));
        const uint32_t n_tokens = number(0, 5) ? 1 : number(2, 4);
        const uint32_t n_layers = tables.n_layers - (number(0, 7) == 0);
        control.phase = uint32_t(phase);
        std::vector<std::vector<int32_t>> selected(tables.n_layers);
        int32_t flight_of = -1;
        const auto await = [&] {
            *started = true;
            emulator::join(in_flight);
            flight_of = -1;
        };
        for (uint32_t layer = 0; layer < n_layers; layer++) {
            select(layer, top_k, n_tokens);
            selected[layer] = ids;
            const uint32_t n = uint32_t(ids.size());
            device_call call = arguments(layer);
            call.ids = ids.data();
            call.n_used = call.row = top_k;
            call.n_tokens = n_tokens;
            const bool around = number(0, 9) == 0 || [&] {
                std::vector<int32_t> different = ids;
                std::sort(different.begin(), different.end());
                return uint32_t(std::unique(different.begin(), different.end()) - different.begin()) > pool.capacity(layer);
            }();
            if (around || flight_of != int32_t(layer)) {
                await();
            }
            if (around) {
                run([=] { spark_mark(tables, call); }, (n + SPARK_BLOCK_THREADS - 1) / SPARK_BLOCK_THREADS);
                std::fill_n(call.mask, call.n_experts, 0);
                pool.pass(layer, ids.data(), n, phase);
                pool.follow(layer, ids.data(), top_k, n_tokens);
                continue;
            }
            const bool late = flight_of == int32_t(layer) && flying();
            slots.assign(n, -1);
            call.slots = slots.data();
            run([=] { spark_ensure(tables, call); }, ENSURING_BLOCKS);
            std::vector<int32_t> expected(n);
            pool.ensure(layer, ids.data(), n, phase, expected.data(), moves);
            pool.follow(layer, ids.data(), top_k, n_tokens);
            if (slots != expected || slot_of != pool.slot_of) {
                fail("slots", step, layer);
            }
            check_selected(layer, "bytes that are selected");
            *started = true;
            chosen += n;
            missed += moves.size();
            (late ? too_late : in_time) += flight_of == int32_t(layer);
            if (n_tokens == 1 && pool.early.most > 0 && layer + 1 < tables.n_layers) {
                await();
                const device_call next = arguments(layer + 1);
                run([=] { spark_choose_early(tables, next); }, 1);
                pool.fetch_early(layer, phase, moves);
                early += moves.size();
                if (slot_of != pool.slot_of) {
                    fail("slots of what is fetched early", step, layer);
                }
                const uint32_t delay_us = number(0, 1) ? 0 : number(0, 300);
                started = std::make_shared<std::atomic<bool>>(number(0, 2) > 0);
                const auto mine = started;
                in_flight = emulator::launch(
                    [=] {
                        if (threadIdx.x == 0) {
                            std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
                            while (!*mine) {
                                sched_yield();
                            }
                        }
                        spark_copy_early(tables, next);
                    },
                    COPYING_BLOCKS, SPARK_BLOCK_THREADS);
                flight_of = int32_t(layer) + 1;
            }
            if (number(0, 1)) {
                std::this_thread::sleep_for(std::chrono::microseconds(number(0, 200)));  // the layer computes
            }
            check_selected(layer, "bytes while they are used");
        }
        await();
        if (pool.early.most > 0 && pool.early.learning) {
            run([this] { spark_learn(tables); }, tables.n_layers);
        }
        run([this] { spark_tally(tables); }, tables.n_layers, 3 * 64 * sizeof(uint32_t));
        for (uint32_t layer = 0; layer < n_layers; layer++) {
            pool.observe(layer, selected[layer].data(), top_k, n_tokens, phase);
        }
        pool.learn();
        pool.end_step();
        check_tables();
    }

    void check_tables() {
        const auto equal = [&](const auto & mine, const auto & theirs, const char * what) {
            if (mine.size() != theirs.size() || std::memcmp(mine.data(), theirs.data(), mine.size() * sizeof mine[0]) != 0) {
                fail(what, step, 0);
            }
        };
        equal(slot_of, pool.slot_of, "slots after the step");
        equal(meta, pool.meta, "scores");
        equal(recency, pool.recency, "recency");
        equal(waiting, pool.waiting, "those waiting");
        equal(layers, pool.layers, "layers");
        if (tables.weights != nullptr) {
            equal(weights, pool.guesses.weights, "weights");
        }
        std::vector<uint64_t> all;
        for (phase_counts & bank : pool.counts) {
            for (const auto * part : bank.parts()) {
                all.insert(all.end(), part->begin(), part->end());
            }
        }
        equal(counts, all, "counts");
        if (urgent != 0 || control.arrived != 0 || control.step != pool.step) {
            fail("what is 0 between kernels", step, 0);
        }
        for (uint32_t layer = 0; layer < tables.n_layers; layer++) {
            for (uint32_t expert = 0; expert < layers[layer].n_experts; expert++) {
                if (slot_of[layers[layer].first + expert] >= 0) {
                    check_bytes(layer, expert, "bytes after the step");
                }
            }
        }
    }
};

}  // namespace

int main(int, char ** arguments) {
    const trial done(std::strtoull(arguments[1], nullptr, 10), uint32_t(std::strtoul(arguments[2], nullptr, 10)));
    std::printf("{\"selected\": %llu, \"missed\": %llu, \"early\": %llu, \"landed\": %llu, \"on_the_way\": %llu}\n",
                (unsigned long long) done.chosen, (unsigned long long) done.missed, (unsigned long long) done.early, (unsigned long long) done.in_time,
                (unsigned long long) done.too_late);
}
