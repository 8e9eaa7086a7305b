// One model's experts on one device: all of them in host memory, some of them in slots.
//
// A tier is made with the buffer that llama.cpp loads the experts into, and lives as long as it. An engine runs graphs
// through it: host_engine on any backend through ggml's public functions, cuda_engine on the GPU itself.

#pragma once

#include "ggml_layout.h"
#include "slots.h"

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace spark {

constexpr uint32_t MAX_SLOT_TOKENS = 8;  // more tokens at once go around the slots: they touch nearly every expert

struct tier;
struct tier_class;
struct tier_layer;

// A failed step: what to tell the person. Caught where ggml's C interface begins.
struct tier_error {
    std::string text;
};

// A tensor with one matrix, one row of biases, or one scale for each expert of a layer.
struct expert_tensor {
    std::string kind;              // "up.weight"
    ggml_tensor * all = nullptr;   // in the tier buffer
    size_t bytes = 0;              // of one expert
    ggml_tensor * slots = nullptr;        // its class's pool
    ggml_tensor * whole = nullptr;        // the layer's own part of the pool, while all its experts are in it in order
    ggml_tensor * scratch[2] = {};        // the whole layer in expert order, for calls around the slots
    size_t scratch_span = 0;              // its bytes there with what kernels read past its end
    ggml_tensor * repeated = nullptr;     // of a scale: room for one of each slot and token
};

struct tier_layer {
    int32_t block = -1;
    uint32_t n_experts = 0;
    std::vector<expert_tensor> tensors;  // by kind
    tier_class * of = nullptr;
    uint32_t index = 0;                  // in its class
    ggml_tensor * slot_ids = nullptr;    // what replaces the router's ids, [n_used, n_tokens]
    expert_tensor * find(const ggml_tensor * tensor);
    bool lies_like(const tier_layer & other) const { return of == other.of && n_experts == other.n_experts; }  // in scratch
};

struct tier_class {
    std::vector<tier_layer *> layers;
    slot_pool pool;
    bool whole = false;  // every expert of every layer is in a slot, in order
    bool resident(uint32_t layer, uint32_t n_used, uint32_t n_tokens) const;  // whether a call goes through the slots
};

// Nodes of a graph that multiply one layer's experts by one router's selection.
struct expert_call {
    tier_layer * layer;
    ggml_tensor * ids;
    int first;                // index of the first node that reads its experts
    int last;                 // and of the last one
    std::vector<int> nodes;   // products and biases
    std::vector<int> scales;  // nodes that repeat the experts' scales for each token, and read them by the same ids
    uint32_t n_used() const { return uint32_t(ids->ne[0]); }
    uint32_t n_tokens() const { return uint32_t(ids->ne[1]); }
};

struct start_layer {
    int32_t block;
    int32_t top_k;
    int32_t slots;
    int32_t pinned;
    const int32_t * order;
    const float * prior;
};

struct tier_memory {
    uint64_t slots;    // device
    uint64_t scratch;  // device
    uint64_t tables;   // device
    uint64_t host;
    uint64_t host_pinned;  // of it, what the GPU reads by itself
};

// Tensors of the device that belong to a tier; freed together.
class device_memory {
  public:
    device_memory(ggml_backend_buffer_type_t type, size_t n_tensors);
    ~device_memory();
    device_memory(const device_memory &) = delete;
    device_memory & operator=(const device_memory &) = delete;
    ggml_tensor * tensor(int32_t type, int64_t ne0, int64_t ne1, int64_t ne2);  // without memory
    void allocate(ggml_tensor * tensor);                                        // zeroed; throws tier_error
    uint64_t bytes = 0;
    ggml_backend_buffer_type_t const type;

  private:
    ggml_context * context;
    std::vector<ggml_backend_buffer_t> buffers;
};

class engine {
  public:
    virtual ~engine() = default;
    // After every placement: fills the slots and takes over the tables. Throws tier_error.
    virtual void placed() = 0;
    // Runs a graph whose experts are in the tier. Throws tier_error.
    virtual ggml_status compute(ggml_backend_t inner, ggml_cgraph * graph) = 0;
    // Brings counts, scores and residency of all pools up to date on the host.
    virtual void read() = 0;
    virtual void reset_counts() = 0;
    // After read(): takes over what the host's pools have as recency.
    virtual void write_recency() {}
    // Brings the weights of guesses up to date on the host, or takes over what the host has.
    virtual void sync_guesses(bool write) { (void) write; }
    virtual void set_phase(int phase) = 0;
    virtual uint64_t table_bytes() const { return 0; }
    // What a kernel found wrong in a step that the host had already taken for done; once.
    virtual std::string take_fault() { return ""; }
    virtual const char * name() const = 0;
};

struct tier {
    std::mutex mutex;
    ggml_backend_dev_t inner = nullptr;
    std::string kernels;  // file with the GPU's kernels; empty: nobody named one
    char * host = nullptr;
    size_t host_bytes = 0;
    bool pinned = false;
    bool scratch_wanted = true;
    std::unordered_map<int32_t, std::unique_ptr<tier_layer>> layers;  // by block
    std::unordered_map<const ggml_tensor *, tier_layer *> layer_of;
    std::vector<std::unique_ptr<tier_class>> classes;
    std::unique_ptr<device_memory> slots;
    std::unique_ptr<device_memory> scratch;
    std::unique_ptr<engine> runs;  // after the first placement
    ggml_backend_t user = nullptr;  // the one backend that computes with it
    std::string fault;              // why the last step failed
    uint64_t generation = 0;        // changes when tensors move
    int phase = 0;                  // of the steps to come
    bool planned = false;           // somebody has placed its experts
    early_options early;            // of all its classes

    bool add(ggml_tensor * tensor);                 // a tensor of the buffer; whether it may be in it
    void place(const std::vector<start_layer> & start, float decay);  // throws tier_error; what was there stays if it can
    void set_early(const early_options & options);  // throws tier_error
    void place_share(float residency);              // without a plan: the first experts of every layer
    tier_memory memory() const;
    ~tier();

  private:
    void sort_into_classes(const std::vector<start_layer> & start, std::vector<std::unique_ptr<tier_class>> & made);
    void allocate(const std::vector<std::unique_ptr<tier_class>> & made);
    void start_engine();
};

bool is_expert_tensor(const char * name, int32_t * block, std::string * kind);
std::vector<expert_call> find_calls(tier & tier, ggml_cgraph * graph);

// Nodes that are others for the duration of a call into the wrapped backend.
class patches {
  public:
    ~patches() { undo(); }
    ggml_tensor & of(ggml_tensor * node);  // the node, remembered as it was
    void undo();

  private:
    struct saved {
        ggml_tensor * node;
        ggml_tensor as_it_was;
    };
    std::vector<saved> all;
};

// Points a call's nodes at other tensors of its experts and at other ids.
enum class where { slots, whole, scratch0, scratch1 };
void redirect(patches & patches, ggml_cgraph * graph, const expert_call & call, where place, ggml_tensor * ids);

std::unique_ptr<engine> make_host_engine(tier & tier);
std::unique_ptr<engine> make_cuda_engine(tier & tier, std::string & reason);  // null, with the reason, where there is none

struct cuda_version {
    int capability;  // 90 is 9.0
    int driver;      // 12040 is CUDA 12.4
};
bool find_cuda(ggml_backend_dev_t inner, cuda_version & found, std::string & reason);

}  // namespace spark
