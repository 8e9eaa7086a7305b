// Reads the routers' selections through llama.cpp's evaluation callback: spark_runtime/tap.py in C++, with the same
// cuts and the same reads, so that a node costs nanoseconds in place of a call into Python. What was selected gathers
// here and is taken by Python after each decode call.

#include "ggml_layout.h"

#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using tensor_get_fn = void (*)(const ggml_tensor *, void *, size_t, size_t);
using nbytes_fn = size_t (*)(const ggml_tensor *);

constexpr int OPS = 256;
constexpr int SHARED_NAME = -1;  // a name that several layers share marks no cut

enum fault : int32_t { FAULT_NONE = 0, FAULT_IDS = 1, FAULT_MEMORY = 2 };

struct weight {
    int32_t block;  // -1: not a layer's routed experts
    bool down;
};

struct tap {
    tensor_get_fn get;
    nbytes_fn nbytes;
    int32_t mul_mat_id;
    bool learning = false;
    const ggml_tensor * previous = nullptr;  // the node asked about last
    const ggml_tensor * computed = nullptr;  // the node just computed, until the next one is asked about
    const ggml_tensor * seen_ids = nullptr;  // the ids of the layer in progress
    std::unordered_map<const ggml_tensor *, weight> weights;  // weights keep their address for the model's life
    std::unordered_map<std::string, int32_t> cuts;            // node before a layer's experts -> block
    bool cut_ops[OPS] = {};
    std::vector<int32_t> selected;  // records: block, tokens, top-k, then the ids token by token
    int32_t fault = FAULT_NONE;
    int64_t fault_shape[2 * GGML_MAX_DIMS] = {};
};

weight parse_weight(const char * name) {
    int block = -1;
    int end = 0;
    if (std::sscanf(name, "blk.%d.ffn_%n", &block, &end) != 1 || end == 0) {
        return {-1, false};
    }
    const char * rest = name + end;
    for (const char * kind : {"up_exps.weight", "gate_exps.weight", "gate_up_exps.weight"}) {
        if (std::strcmp(rest, kind) == 0) {
            return {block, false};
        }
    }
    return std::strcmp(rest, "down_exps.weight") == 0 ? weight{block, true} : weight{-1, false};
}

weight weight_of(tap & self, const ggml_tensor * tensor) {
    const auto found = self.weights.find(tensor);
    return found != self.weights.end() ? found->second : self.weights.emplace(tensor, parse_weight(tensor->name)).first->second;
}

// Copies ids[token, k] out of a tensor that is usually a strided view of all experts in order of score.
void observe(tap & self, int32_t block, const ggml_tensor * ids) {
    const int64_t top_k = ids->ne[0];
    const int64_t n_tokens = ids->ne[1];
    const size_t row = ids->nb[1];
    const size_t span = n_tokens ? self.nbytes(ids) : 0;
    const size_t expected = n_tokens ? size_t(n_tokens - 1) * row + size_t(top_k) * sizeof(int32_t) : 0;
    if (ids->type != GGML_TYPE_I32 || span != expected || ids->ne[2] != 1 || ids->ne[3] != 1) {
        self.fault = FAULT_IDS;
        std::memcpy(self.fault_shape, ids->ne, sizeof ids->ne);
        for (int dim = 0; dim < GGML_MAX_DIMS; dim++) {
            self.fault_shape[GGML_MAX_DIMS + dim] = int64_t(ids->nb[dim]);
        }
        return;
    }
    std::vector<char> raw(span);
    if (span) {
        self.get(ids, raw.data(), 0, span);
    }
    const size_t start = self.selected.size();
    self.selected.resize(start + 3 + size_t(n_tokens * top_k));
    int32_t * out = self.selected.data() + start;
    out[0] = block;
    out[1] = int32_t(n_tokens);
    out[2] = int32_t(top_k);
    for (int64_t token = 0; token < n_tokens; token++) {
        std::memcpy(out + 3 + token * top_k, raw.data() + size_t(token) * row, size_t(top_k) * sizeof(int32_t));
    }
}

void learn(tap & self, int32_t block, const ggml_tensor * previous) {
    if (previous == nullptr || previous->op < 0 || previous->op >= OPS) {
        return;
    }
    const auto [entry, fresh] = self.cuts.emplace(previous->name, block);
    if (!fresh && entry->second != block) {
        entry->second = SHARED_NAME;
    }
    self.cut_ops[previous->op] = true;
}

bool is_cut(tap & self, const ggml_tensor * node) {
    if (self.learning || node->op < 0 || node->op >= OPS || !self.cut_ops[node->op]) {
        return false;
    }
    const auto found = self.cuts.find(node->name);
    return found != self.cuts.end() && found->second != SHARED_NAME;
}

// Takes note of a multiplication; `ready`: all before it has been computed. Whether to cut after it.
bool announce(tap & self, const ggml_tensor * node, const ggml_tensor * previous, bool ready) {
    const weight known = weight_of(self, node->src[0]);
    if (known.block < 0) {
        return false;
    }
    const ggml_tensor * ids = node->src[2];
    if (known.down) {
        self.seen_ids = nullptr;  // the layer's last one; the next layer's ids may lie at the same address
        return false;
    }
    if (ids == self.seen_ids) {
        return false;
    }
    self.seen_ids = ids;
    if (ready && !self.learning) {
        observe(self, known.block, ids);
        return false;
    }
    learn(self, known.block, previous);
    return !self.learning;
}

bool ask(tap & self, const ggml_tensor * node) {
    const ggml_tensor * previous = self.previous;
    const ggml_tensor * computed = self.computed;
    self.previous = node;
    self.computed = nullptr;  // addresses come back in later graphs
    if (node->op == self.mul_mat_id) {
        return announce(self, node, previous, computed != nullptr && computed == previous);
    }
    return is_cut(self, node);
}

void computed(tap & self, const ggml_tensor * node) {
    self.computed = node;
    if (node->op == self.mul_mat_id) {
        const weight known = weight_of(self, node->src[0]);
        if (known.block >= 0) {
            observe(self, known.block, node->src[2]);
        }
    }
}

}  // namespace

#ifndef SPARK_STAMP
#define SPARK_STAMP "unstamped"
#endif

#pragma GCC visibility push(default)  // the library hides what it is not told to show
extern "C" {

const char * spark_native_stamp(void) { return SPARK_STAMP; }

// Offsets of the members that are read, then the size of the whole: compared with Python's declaration.
int spark_native_layout(size_t * out) {
    const size_t layout[] = {
        offsetof(ggml_tensor, type), offsetof(ggml_tensor, ne),  offsetof(ggml_tensor, nb),   offsetof(ggml_tensor, op),
        offsetof(ggml_tensor, src),  offsetof(ggml_tensor, data), offsetof(ggml_tensor, name), sizeof(ggml_tensor),
    };
    std::memcpy(out, layout, sizeof layout);
    return int(sizeof layout / sizeof layout[0]);
}

void * spark_tap_new(tensor_get_fn get, nbytes_fn nbytes, int32_t mul_mat_id) {
    tap * self = new (std::nothrow) tap;
    if (self != nullptr) {
        self->get = get;
        self->nbytes = nbytes;
        self->mul_mat_id = mul_mat_id;
    }
    return self;
}

void spark_tap_free(void * handle) { delete static_cast<tap *>(handle); }

void spark_tap_set_learning(void * handle, bool learning) { static_cast<tap *>(handle)->learning = learning; }

// ggml_backend_sched_eval_callback
bool spark_tap_call(ggml_tensor * node, bool asked, void * handle) {
    tap & self = *static_cast<tap *>(handle);
    try {
        if (asked) {
            return ask(self, node);
        }
        computed(self, node);
        return self.fault == FAULT_NONE;
    } catch (const std::bad_alloc &) {
        self.fault = FAULT_MEMORY;  // an exception cannot travel through C
        return false;
    }
}

// What was selected since the last reset, good until the next call into llama.cpp.
const int32_t * spark_tap_selected(void * handle, size_t * size) {
    const tap & self = *static_cast<tap *>(handle);
    *size = self.selected.size();
    return self.selected.data();
}

// The fault since the last reset, with extent and strides of the ids at fault.
int32_t spark_tap_fault(void * handle, int64_t * shape) {
    const tap & self = *static_cast<tap *>(handle);
    std::memcpy(shape, self.fault_shape, sizeof self.fault_shape);
    return self.fault;
}

void spark_tap_reset(void * handle) {
    tap & self = *static_cast<tap *>(handle);
    self.selected.clear();
    self.fault = FAULT_NONE;
}

}  // extern "C"
#pragma GCC visibility pop
