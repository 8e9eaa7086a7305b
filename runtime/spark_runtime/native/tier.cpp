#include "tier.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>

namespace spark {

namespace {

constexpr int32_t NO_BLOCK = -1;

// Which dimension counts experts: the third of a weight, the second of a bias, the first of a scale.
int expert_dim(const std::string & kind) {
    const std::string suffix = kind.substr(kind.rfind('.'));
    return suffix == ".weight" ? 2 : suffix == ".bias" ? 1 : 0;
}

int64_t with_experts(const expert_tensor & tensor, int dim, int64_t n) { return expert_dim(tensor.kind) == dim ? n : tensor.all->ne[dim]; }

ggml_tensor * like(device_memory & memory, const expert_tensor & tensor, int64_t n_experts) {
    return memory.tensor(tensor.all->type, with_experts(tensor, 0, n_experts), with_experts(tensor, 1, n_experts), with_experts(tensor, 2, n_experts));
}

// Layers with equal keys can share slots.
std::string class_key(const tier_layer & layer) {
    std::string key;
    for (const expert_tensor & tensor : layer.tensors) {
        key += tensor.kind + '/' + std::to_string(tensor.all->type) + '/' + std::to_string(with_experts(tensor, 0, 0)) + '/' +
               std::to_string(with_experts(tensor, 1, 0)) + ';';
    }
    return key;
}

}  // namespace

bool is_expert_tensor(const char * name, int32_t * block, std::string * kind) {
    int end = 0;
    if (std::sscanf(name, "blk.%d.ffn_%n", block, &end) != 1 || end == 0) {
        return false;
    }
    const std::string rest(name + end);
    for (const char * stem : {"up", "gate", "down", "gate_up"}) {
        for (const char * suffix : {"weight", "bias", "scale"}) {
            if (rest == std::string(stem) + "_exps." + suffix) {
                if (kind != nullptr) {
                    *kind = std::string(stem) + "." + suffix;
                }
                return true;
            }
        }
    }
    return false;
}

expert_tensor * tier_layer::find(const ggml_tensor * tensor) {
    for (expert_tensor & mine : tensors) {
        if (mine.all == tensor) {
            return &mine;
        }
    }
    return nullptr;
}

bool tier_class::resident(uint32_t layer, uint32_t n_used, uint32_t n_tokens) const {
    const layer_state & state = pool.layers[layer];
    const uint32_t most = std::min(n_used * n_tokens, state.n_experts - state.n_pinned);  // pinned ones need no other slot
    return n_tokens <= MAX_SLOT_TOKENS && (whole || most <= pool.capacity(layer));
}

// ---- device memory

device_memory::device_memory(ggml_backend_buffer_type_t type, size_t n_tensors) : type(type) {
    context = ggml_init({ggml_tensor_overhead() * n_tensors, nullptr, true});
    if (context == nullptr) {
        throw tier_error{"no memory for the descriptions of " + std::to_string(n_tensors) + " tensors"};
    }
}

device_memory::~device_memory() {
    for (ggml_backend_buffer_t buffer : buffers) {
        ggml_backend_buffer_free(buffer);
    }
    ggml_free(context);
}

ggml_tensor * device_memory::tensor(int32_t type, int64_t ne0, int64_t ne1, int64_t ne2) {
    const int64_t ne[] = {ne0, ne1, ne2};
    return ggml_new_tensor(context, type, 3, ne);
}

void device_memory::allocate(ggml_tensor * tensor) {
    // Kernels for quantised matrices read past the last row: what get_alloc_size adds has to be there, and be zero.
    const size_t size = ggml_backend_buft_get_alloc_size(type, tensor);
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, size);
    if (buffer == nullptr) {
        throw tier_error{"no memory on the device for " + std::to_string(size) + " bytes of experts"};
    }
    buffers.push_back(buffer);
    bytes += size;
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(buffer, 0);
    if (ggml_backend_tensor_alloc(buffer, tensor, ggml_backend_buffer_get_base(buffer)) != GGML_STATUS_SUCCESS) {
        throw tier_error{"the device cannot hold a tensor of experts"};
    }
}

// ---- tier

bool tier::add(ggml_tensor * tensor) {
    int32_t block = NO_BLOCK;
    std::string kind;
    if (tensor->view_src != nullptr) {
        return true;
    }
    if (!is_expert_tensor(tensor->name, &block, &kind)) {
        return false;
    }
    std::unique_ptr<tier_layer> & layer = layers[block];
    if (!layer) {
        layer = std::make_unique<tier_layer>();
        layer->block = block;
    }
    const int dim = expert_dim(kind);
    layer->n_experts = uint32_t(tensor->ne[dim]);
    expert_tensor added;
    added.kind = kind;
    added.all = tensor;
    added.bytes = tensor->nb[dim];
    layer->tensors.push_back(added);
    std::sort(layer->tensors.begin(), layer->tensors.end(), [](const auto & a, const auto & b) { return a.kind < b.kind; });
    layer_of[tensor] = layer.get();
    return true;
}

void tier::sort_into_classes(const std::vector<start_layer> & start, std::vector<std::unique_ptr<tier_class>> & made) {
    std::map<std::string, tier_class *> by_key;
    for (const start_layer & wanted : start) {
        const auto found = layers.find(wanted.block);
        if (found == layers.end()) {
            throw tier_error{"block " + std::to_string(wanted.block) + " has no experts on this device"};
        }
        tier_layer & layer = *found->second;
        for (const expert_tensor & tensor : layer.tensors) {
            if (uint32_t(tensor.all->ne[expert_dim(tensor.kind)]) != layer.n_experts) {
                throw tier_error{"block " + std::to_string(wanted.block) + ": its tensors hold different numbers of experts"};
            }
        }
        tier_class *& of = by_key[class_key(layer)];
        if (of == nullptr) {
            made.push_back(std::make_unique<tier_class>());
            of = made.back().get();
        }
        if (std::find(of->layers.begin(), of->layers.end(), &layer) != of->layers.end()) {
            throw tier_error{"block " + std::to_string(wanted.block) + " is placed twice"};
        }
        of->layers.push_back(&layer);
    }
    for (const auto & of : made) {
        // As a call computes them: the policy takes those after a layer for those to come.
        std::sort(of->layers.begin(), of->layers.end(), [](const auto * a, const auto * b) { return a->block < b->block; });
    }
}

void tier::place(const std::vector<start_layer> & start, float decay) {
    if (start.empty()) {
        throw tier_error{"no layer to place, expected at least one"};
    }
    const char * concurrent = std::getenv("GGML_CUDA_GRAPH_OPT");
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(inner, &props);
    if (concurrent != nullptr && std::atoi(concurrent) == 1 && props.type != GGML_BACKEND_DEVICE_TYPE_CPU) {
        throw tier_error{"GGML_CUDA_GRAPH_OPT=1 computes parts of a graph side by side, and tiers cut it: unset it"};
    }
    std::vector<std::unique_ptr<tier_class>> made;
    sort_into_classes(start, made);
    if (runs) {
        runs->read();
        runs->sync_guesses(false);
    }
    const bool same = runs && classes.size() == made.size();
    bool moved = !same;
    for (size_t c = 0; c < made.size(); c++) {
        std::vector<layer_start> starts;
        for (const tier_layer * layer : made[c]->layers) {
            const auto & wanted = *std::find_if(start.begin(), start.end(), [&](const start_layer & s) { return s.block == layer->block; });
            if (wanted.top_k < 1 || wanted.slots < 1 || wanted.pinned < 0 || uint32_t(wanted.top_k) > layer->n_experts) {
                throw tier_error{"block " + std::to_string(layer->block) + ": top_k " + std::to_string(wanted.top_k) + ", slots " +
                                 std::to_string(wanted.slots) + ", pinned " + std::to_string(wanted.pinned) + " of " +
                                 std::to_string(layer->n_experts) + " experts make no sense"};
            }
            starts.push_back({layer->n_experts, uint32_t(wanted.top_k), uint32_t(wanted.slots), uint32_t(wanted.pinned), wanted.order, wanted.prior});
        }
        if (same && classes[c]->layers == made[c]->layers) {
            made[c]->pool = classes[c]->pool;  // counts and scores go on
        }
        made[c]->pool.early = early;
        const std::string fault = made[c]->pool.place(starts, decay);
        if (!fault.empty()) {
            throw tier_error{fault};
        }
        uint32_t n_experts = 0;
        for (const tier_layer * layer : made[c]->layers) {
            n_experts += layer->n_experts;
        }
        made[c]->whole = made[c]->pool.n_slots == n_experts;
        moved = moved || classes[c]->layers != made[c]->layers || classes[c]->pool.n_slots != made[c]->pool.n_slots;
    }
    if (moved) {
        runs.reset();
        slots.reset();
        scratch.reset();
        generation++;
        try {
            allocate(made);
        } catch (const tier_error &) {
            if (!classes.empty()) {
                allocate(classes);  // what was there before, and fits therefore
                start_engine();
            }
            throw;
        }
        classes = std::move(made);
        for (const auto & [block, layer] : layers) {
            layer->of = nullptr;
        }
        for (const auto & c : classes) {
            for (uint32_t i = 0; i < c->layers.size(); i++) {
                c->layers[i]->of = c.get();
                c->layers[i]->index = i;
            }
        }
    } else {
        for (size_t c = 0; c < classes.size(); c++) {
            classes[c]->pool = std::move(made[c]->pool);  // an engine refers to the class
        }
    }
    start_engine();
}

void tier::set_early(const early_options & options) {
    if (runs) {
        runs->read();
        runs->sync_guesses(false);
    }
    early = options;
    for (const auto & c : classes) {
        c->pool.set_early(early);
    }
    generation++;  // captured graphs have the options in them
    if (runs) {
        start_engine();
    }
}

// Fills the slots, by an engine made now if there is none.
void tier::start_engine() {
    if (!runs) {
        std::string reason;
        runs = make_cuda_engine(*this, reason);
        if (!runs) {
            if (!reason.empty()) {
                ggml_log_internal(GGML_LOG_LEVEL_WARN, "spark: experts are fetched by the host, which is slow: %s\n", reason.c_str());
            }
            runs = make_host_engine(*this);
        }
    }
    try {
        runs->set_phase(phase);
        runs->placed();
    } catch (...) {
        runs.reset();  // its slots hold some of one placement and some of another
        throw;
    }
}

void tier::allocate(const std::vector<std::unique_ptr<tier_class>> & made) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(inner);
    size_t n_tensors = 16;
    for (const auto & [block, layer] : layers) {
        n_tensors += 2 + 5 * layer->tensors.size();
    }
    slots = std::make_unique<device_memory>(type, n_tensors);
    scratch = std::make_unique<device_memory>(type, n_tensors);
    try {
        bool any_outside = false;
        uint64_t largest = 0;
        for (const auto & c : made) {
            const tier_layer & first = *c->layers.front();
            std::vector<ggml_tensor *> pools, repeated;
            for (const expert_tensor & tensor : first.tensors) {
                pools.push_back(like(*slots, tensor, c->pool.n_slots));
                slots->allocate(pools.back());
                repeated.push_back(nullptr);
                if (expert_dim(tensor.kind) == 0) {
                    repeated.back() = slots->tensor(tensor.all->type, 1, c->pool.n_slots, MAX_SLOT_TOKENS);
                    slots->allocate(repeated.back());
                }
            }
            uint32_t at = 0;
            uint32_t n_experts = 0;
            for (tier_layer * layer : c->layers) {
                for (size_t k = 0; k < layer->tensors.size(); k++) {
                    expert_tensor & tensor = layer->tensors[k];
                    tensor.slots = pools[k];
                    tensor.repeated = repeated[k];
                    tensor.whole = nullptr;
                    tensor.scratch[0] = tensor.scratch[1] = nullptr;
                    if (c->whole) {
                        tensor.whole = like(*slots, tensor, layer->n_experts);
                        tensor.whole->buffer = pools[k]->buffer;
                        tensor.whole->data = static_cast<char *>(pools[k]->data) + size_t(at) * tensor.bytes;
                    }
                }
                layer->slot_ids = slots->tensor(GGML_TYPE_I32, int64_t(layer->n_experts), MAX_SLOT_TOKENS, 1);
                slots->allocate(layer->slot_ids);
                at += layer->n_experts;
                n_experts = std::max(n_experts, layer->n_experts);
            }
            any_outside = any_outside || !c->whole;
            uint64_t bytes = 0;
            for (const expert_tensor & tensor : first.tensors) {
                bytes += ggml_backend_buft_get_alloc_size(type, like(*scratch, tensor, n_experts)) + ggml_backend_buft_get_alignment(type);
            }
            largest = std::max(largest, c->whole ? 0 : bytes);
        }
        if (!any_outside || !scratch_wanted) {
            return;
        }
        for (int copy = 0; copy < 2; copy++) {
            // One piece of memory for all classes: only one layer is in it at a time.
            ggml_tensor * piece = scratch->tensor(GGML_TYPE_I32, int64_t((largest + 3) / 4), 1, 1);
            scratch->allocate(piece);
            for (const auto & c : made) {
                for (tier_layer * layer : c->layers) {
                    size_t at = 0;
                    for (expert_tensor & tensor : layer->tensors) {
                        ggml_tensor * view = like(*scratch, tensor, layer->n_experts);
                        view->buffer = piece->buffer;
                        view->data = static_cast<char *>(piece->data) + at;
                        tensor.scratch[copy] = view;
                        const size_t alignment = ggml_backend_buft_get_alignment(type);
                        tensor.scratch_span = ggml_backend_buft_get_alloc_size(type, view);
                        at += (tensor.scratch_span + alignment - 1) / alignment * alignment;
                    }
                }
            }
        }
    } catch (...) {
        slots.reset();
        scratch.reset();
        throw;
    }
}

void tier::place_share(float residency) {
    std::vector<start_layer> start;
    std::vector<std::vector<int32_t>> orders;
    std::vector<std::vector<float>> priors;
    std::vector<int32_t> blocks;
    for (const auto & [block, layer] : layers) {
        blocks.push_back(block);
    }
    std::sort(blocks.begin(), blocks.end());
    for (int32_t block : blocks) {
        const tier_layer & layer = *layers[block];
        std::vector<int32_t> order(layer.n_experts);
        for (uint32_t i = 0; i < layer.n_experts; i++) {
            order[i] = int32_t(i);
        }
        orders.push_back(std::move(order));
        priors.emplace_back(layer.n_experts, 0.0f);
        // Without the model's metadata the largest top_k that this share allows keeps the floor.
        const int32_t slots = std::min<int32_t>(int32_t(layer.n_experts), std::max<int32_t>(2, int32_t(residency * float(layer.n_experts))));
        start.push_back({block, std::max(1, slots / 2), slots, 0, orders.back().data(), priors.back().data()});
    }
    place(start, 0.97f);
}

tier_memory tier::memory() const {
    return {slots ? slots->bytes : 0, scratch ? scratch->bytes : 0, runs ? runs->table_bytes() : 0, host_bytes, pinned ? host_bytes : 0};
}

tier::~tier() {
    runs.reset();  // it may unregister the host memory
}

}  // namespace spark
