// Runs a tiered graph on any backend through ggml's public functions: the host reads each layer's selection, fetches
// what is missing and goes on. It waits for the device at every layer, so it is for the CPU, for tests, and for GPUs
// that cannot read host memory themselves. What is fetched early is copied by a thread of its own while the layer before
// computes; only what the router then chooses is waited for.

#include "early_copies.h"
#include "tier.h"

#include <cstring>

namespace spark {

namespace {

class host_engine : public engine {
  public:
    explicit host_engine(tier & tier) : owner(tier) {
        ggml_backend_dev_props props;
        ggml_backend_dev_get_props(tier.inner, &props);
        on_cpu = props.type == GGML_BACKEND_DEVICE_TYPE_CPU;
    }

    void placed() override {
        if (owner.early.most == 0) {
            early.reset();
        } else if (!early) {
            early = std::make_unique<early_copies>();
        }
        holds.resize(owner.classes.size());
        for (size_t c = 0; c < owner.classes.size(); c++) {
            const slot_pool & pool = owner.classes[c]->pool;
            holds[c].resize(pool.n_slots, -1);
            for (tier_layer * layer : owner.classes[c]->layers) {
                const layer_state & state = pool.layers[layer->index];
                for (uint32_t expert = 0; expert < state.n_experts; expert++) {
                    const int32_t slot = pool.slot_of[state.first + expert];
                    if (slot >= 0 && holds[c][size_t(slot)] != int64_t(state.first + expert)) {
                        load(*layer, expert, uint32_t(slot));
                        holds[c][size_t(slot)] = state.first + expert;
                    }
                }
            }
        }
    }

    ggml_status compute(ggml_backend_t inner, ggml_cgraph * graph) override {
        struct observed {
            tier_layer * layer;
            std::vector<int32_t> ids;
            uint32_t n_used, n_tokens;
        };
        const step_end end{owner, early.get()};
        std::vector<observed> step;
        patches patches;
        int done = 0;
        for (const expert_call & call : find_calls(owner, graph)) {
            const ggml_status status = run(inner, graph, done, call.first);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            done = call.first;
            ggml_backend_synchronize(inner);
            step.push_back({call.layer, read_ids(call), call.n_used(), call.n_tokens()});
            make_ready(patches, graph, call, step.back().ids);
        }
        const ggml_status status = run(inner, graph, done, graph->n_nodes);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        ggml_backend_synchronize(inner);  // before the nodes get their sources back
        for (const observed & seen : step) {
            seen.layer->of->pool.observe(seen.layer->index, seen.ids.data(), seen.n_used, seen.n_tokens, phase);
        }
        for (const auto & c : owner.classes) {
            c->pool.learn();
        }
        return GGML_STATUS_SUCCESS;
    }

    void read() override {}
    void reset_counts() override {
        for (const auto & c : owner.classes) {
            c->pool.reset_counts();
        }
    }
    void set_phase(int value) override { phase = value; }
    const char * name() const override { return "host"; }

  private:
    // Ends a step that failed, too: what it selected would otherwise never leave again.
    struct step_end {
        tier & owner;
        early_copies * early;
        ~step_end() {
            if (early != nullptr) {
                early->land();
            }
            for (const auto & c : owner.classes) {
                c->pool.end_step();
            }
        }
    };

    tier & owner;
    bool on_cpu;
    int phase = 0;
    std::vector<move> moves;
    std::unique_ptr<early_copies> early;  // while experts are fetched early
    const tier_layer * flight_of = nullptr;  // whose experts were submitted last
    const tier_layer * filled_by = nullptr;  // whose experts are in the scratch layer
    std::vector<std::vector<int64_t>> holds;  // which entry each slot of each class holds

    static ggml_status run(ggml_backend_t inner, ggml_cgraph * graph, int from, int to) {
        if (from == to) {
            return GGML_STATUS_SUCCESS;
        }
        if (from == 0 && to == graph->n_nodes) {
            return ggml_backend_graph_compute_async(inner, graph);
        }
        ggml_cgraph part = ggml_graph_view(graph, from, to);
        return ggml_backend_graph_compute_async(inner, &part);
    }

    static std::vector<int32_t> read_ids(const expert_call & call) {
        // A view of all experts in order of score: its rows are longer than what was chosen.
        std::vector<int32_t> ids(size_t(call.n_used()) * call.n_tokens());
        for (uint32_t token = 0; token < call.n_tokens(); token++) {
            ggml_backend_tensor_get(call.ids, &ids[size_t(token) * call.n_used()], token * call.ids->nb[1], call.n_used() * sizeof(int32_t));
        }
        return ids;
    }

    void make_ready(patches & patches, ggml_cgraph * graph, const expert_call & call, const std::vector<int32_t> & ids) {
        tier_layer & layer = *call.layer;
        slot_pool & pool = layer.of->pool;
        const uint32_t n = uint32_t(ids.size());
        if (layer.of->resident(layer.index, call.n_used(), call.n_tokens())) {
            std::vector<int32_t> slots(n);
            if (!pool.ensure(layer.index, ids.data(), n, phase, slots.data(), moves)) {
                throw bad_ids(layer, ids);
            }
            load_missing(layer, slots);
            shape_ids(*layer.slot_ids, call);
            ggml_backend_tensor_set(layer.slot_ids, slots.data(), 0, n * sizeof(int32_t));
            redirect(patches, graph, call, where::slots, layer.slot_ids);
            pool.follow(layer.index, ids.data(), call.n_used(), call.n_tokens());
            fetch_early(layer);
            return;
        }
        if (!pool.pass(layer.index, ids.data(), n, phase)) {
            throw bad_ids(layer, ids);
        }
        if (early) {
            early->land();
        }
        pool.follow(layer.index, ids.data(), call.n_used(), call.n_tokens());
        if (on_cpu) {
            return;  // the CPU multiplies by what is in host memory as it is
        }
        if (layer.of->whole) {
            redirect(patches, graph, call, where::whole, call.ids);
            return;
        }
        std::vector<char> touched(layer.n_experts, 0);
        for (int32_t id : ids) {
            touched[size_t(id)] = 1;
        }
        if (filled_by == nullptr || !filled_by->lies_like(layer)) {
            // Kernels read past the last row of quantised matrices, where another kind of layer may have left what is no number.
            ggml_backend_buffer_clear(layer.tensors[0].scratch[0]->buffer, 0);
        }
        filled_by = &layer;
        for (expert_tensor & tensor : layer.tensors) {
            for (uint32_t expert = 0; expert < layer.n_experts; expert++) {
                if (touched[expert]) {
                    ggml_backend_tensor_set(tensor.scratch[0], host(tensor, expert), expert * tensor.bytes, tensor.bytes);
                }
            }
        }
        redirect(patches, graph, call, where::scratch0, call.ids);
    }

    // What ensure() moved, and of what was fetched early what is selected.
    void load_missing(tier_layer & layer, const std::vector<int32_t> & slots) {
        if (early && flight_of != &layer) {
            early->land();  // slots are numbered by class
        }
        for (const move & move : moves) {
            if (early) {
                early->end(move.slot);
            }
            const early_copies::hold hold(early.get());
            load(layer, move.expert, move.slot);
            holds_of(layer)[move.slot] = layer.of->pool.layers[layer.index].first + move.expert;
        }
        for (size_t i = 0; early && i < slots.size(); i++) {
            early->land(uint32_t(slots[i]));
        }
    }

    void fetch_early(const tier_layer & layer) {
        if (!early || layer.of->whole) {
            return;
        }
        early->land();
        slot_pool & pool = layer.of->pool;
        pool.fetch_early(layer.index, phase, moves);
        for (const move & move : moves) {
            tier_layer & next = *layer.of->layers[layer.index + 1];
            holds_of(next)[move.slot] = pool.layers[next.index].first + move.expert;
            flight_of = &next;
            try {
                early->submit(move.slot, next.tensors.size(), [&next, move](size_t k) { load(next.tensors[k], move.expert, move.slot); });
            } catch (const std::bad_alloc &) {
                load(next, move.expert, move.slot);  // the slot is the expert's already
            }
        }
    }

    std::vector<int64_t> & holds_of(const tier_layer & layer) {
        size_t c = 0;
        while (owner.classes[c].get() != layer.of) {
            c++;
        }
        return holds[c];
    }

    static const char * host(const expert_tensor & tensor, uint32_t expert) {
        return static_cast<const char *>(tensor.all->data) + size_t(expert) * tensor.bytes;
    }

    static void load(tier_layer & layer, uint32_t expert, uint32_t slot) {
        for (expert_tensor & tensor : layer.tensors) {
            load(tensor, expert, slot);
        }
    }
    static void load(expert_tensor & tensor, uint32_t expert, uint32_t slot) {
        ggml_backend_tensor_set(tensor.slots, host(tensor, expert), size_t(slot) * tensor.bytes, tensor.bytes);
    }

    static void shape_ids(ggml_tensor & ids, const expert_call & call) {
        ids.ne[0] = call.n_used();
        ids.ne[1] = call.n_tokens();
        ids.nb[1] = size_t(ids.ne[0]) * sizeof(int32_t);
        ids.nb[2] = ids.nb[3] = ids.nb[1] * size_t(ids.ne[1]);
    }

    static tier_error bad_ids(const tier_layer & layer, const std::vector<int32_t> & ids) {
        for (int32_t id : ids) {
            if (id < 0 || uint32_t(id) >= layer.n_experts) {
                return {"block " + std::to_string(layer.block) + " selected expert " + std::to_string(id) + ", expected 0 to " +
                        std::to_string(layer.n_experts - 1)};
            }
        }
        return {"block " + std::to_string(layer.block) + " selected more experts than its slots can hold"};
    }
};

}  // namespace

std::unique_ptr<engine> make_host_engine(tier & tier) { return std::make_unique<host_engine>(tier); }

}  // namespace spark
