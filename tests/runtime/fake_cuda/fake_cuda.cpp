// A card that is the processor, for the host's side of the CUDA engine on machines without a GPU: the driver's
// functions over plain memory, our kernels as plain loops, and a ggml device called CUDA over the CPU's.
//
// Everything happens at once and in order, but what is fetched early: that comes as late as the engine allows, when an
// event after it is waited for. Nothing is learnt about races otherwise (test_kernels.py), and nothing can be captured.

#include "device_tables.h"
#include "ggml_layout.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

using namespace spark;

namespace {

constexpr int FAILED = 1;  // any number but 0
constexpr uint64_t ENSURE = 1, MARK = 2, GATHER = 3, TALLY = 4, CHOOSE_EARLY = 5, COPY_EARLY = 6, LEARN = 7;
uint64_t launches[8];

uint64_t * bank(const device_class & c) { return c.counts + uint64_t(c.control->phase) * c.n_counts; }

int32_t checked(const device_class & c, const device_call & call, uint32_t i) {
    const int32_t id = call.ids[uint64_t(i / call.n_used) * call.row + i % call.n_used];
    if (id >= 0 && uint32_t(id) < call.n_experts) {
        return id;
    }
    c.fault[1] = call.block;
    c.fault[2] = id;
    c.fault[3] = int32_t(call.n_experts);
    c.fault[0] = FAULT_ID;
    return 0;
}

float weight(const float * decay, uint32_t age) {
    const uint32_t high = age / SPARK_DECAY_STEP;
    return decay[age % SPARK_DECAY_STEP] * decay[SPARK_DECAY_STEP + (high < SPARK_DECAY_STEP ? high : SPARK_DECAY_STEP - 1)];
}

// `guessed` names what must stay in the call's layer, which has not selected yet then.
uint32_t victim(const device_class & c, const device_call & call, const std::vector<bool> * guessed = nullptr) {
    const uint32_t current = guessed != nullptr ? call.layer - 1 : call.layer;
    uint32_t best = ~0u;
    bool best_touched = false;
    double best_score = 0;
    for (uint32_t entry = 0; entry < c.n_entries; entry++) {
        const uint32_t owner = c.layer_of[entry];
        const layer_state & state = c.layers[owner];
        const expert_meta & meta = c.meta[entry];
        const bool own = owner == call.layer, touched = meta.touched == c.control->step;
        if (c.slot_of[entry] < 0 || std::isinf(meta.prior) || (own ? touched : state.n_resident <= state.floor)) {
            continue;
        }
        if (guessed != nullptr && (touched || (own && (*guessed)[entry - call.first]))) {
            continue;
        }
        const float known = meta.prior + meta.score * weight(c.decay, (state.clock + state.top_k - meta.stamp) / state.top_k);
        const double score = owner > current ? 2 * double(known) : double(known);
        if (best == ~0u || touched < best_touched ||
            (touched == best_touched && (score < best_score || (score == best_score && meta.stamp < c.meta[best].stamp)))) {
            best = entry;
            best_touched = touched;
            best_score = score;
        }
    }
    return best;
}

void copy_expert(const device_call & call, uint32_t expert, uint32_t slot) {
    for (uint32_t k = 0; k < call.n_kinds; k++) {
        const device_kind & kind = call.kinds[k];
        std::memcpy(kind.slots + uint64_t(slot) * kind.bytes, kind.all + uint64_t(expert) * kind.bytes, kind.bytes);
    }
}

uint32_t hand_over(const device_class & c, const device_call & call, uint32_t expert, uint32_t leaving) {
    const int32_t slot = c.slot_of[call.first + expert] = c.slot_of[leaving];
    c.slot_of[leaving] = -1;
    c.layers[c.layer_of[leaving]].n_resident--;
    c.layers[call.layer].n_resident++;
    bank(c)[c.wasted + c.layer_of[leaving]] += c.waiting[leaving];
    c.waiting[leaving] = 0;
    return uint32_t(slot);
}

// What was fetched early is there when this has been called: `landed` is 1 then, or if it will never be.
void land(const device_class & c, const device_call & call, uint32_t q) {
    if (c.flight->landed[q] == 0) {
        copy_expert(call, c.flight->moves[q].expert, c.flight->moves[q].slot);
        c.flight->landed[q] = 1;
    }
}

void ensure(const device_class & c, const device_call & call) {
    const uint32_t n = call.n_used * call.n_tokens;
    const uint32_t flying = c.weights != nullptr && c.flight->layer == call.layer ? c.flight->n_moves : 0;
    for (uint32_t i = 0; i < n; i++) {
        call.seen[i] = checked(c, call, i);
        c.meta[call.first + uint32_t(call.seen[i])].touched = c.control->step;
        bank(c)[c.cold + call.layer] += c.slot_of[call.first + uint32_t(call.seen[i])] < 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (c.slot_of[call.first + uint32_t(call.seen[i])] < 0) {
            const uint32_t expert = uint32_t(call.seen[i]), leaving = victim(c, call);
            for (uint32_t q = 0; q < flying; q++) {
                c.flight->landed[q] |= leaving == call.first + c.flight->moves[q].expert;  // its slot is needed
            }
            copy_expert(call, expert, hand_over(c, call, expert, leaving));
            bank(c)[c.loads + call.layer]++;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        call.slots[i] = c.slot_of[call.first + uint32_t(call.seen[i])];
        for (uint32_t q = 0; q < flying; q++) {
            if (uint32_t(call.seen[i]) == c.flight->moves[q].expert) {
                land(c, call, q);
            }
        }
    }
    c.heads[call.layer] = {call.n_tokens, call.n_used, {0, 0}};
}

// Weights that add up to a layer's guesses, by expert that was selected before; the last ones always.
std::vector<int16_t *> rows_of(const device_class & c, uint32_t layer) {
    std::vector<int16_t *> rows;
    int16_t * start = c.weights + c.layers[layer].first_weight;
    for (uint32_t before = layer; before-- > 0 && before + SPARK_PREDICTED_FROM >= layer;) {
        for (uint32_t i = 0; c.heads[before].n_tokens == 1 && i < c.heads[before].n_used; i++) {
            rows.push_back(start + uint64_t(c.seen[before][i]) * c.layers[layer].n_experts);
        }
        start += uint64_t(c.layers[before].n_experts) * c.layers[layer].n_experts;
    }
    rows.push_back(start);
    return rows;
}

int64_t guess(const device_class & c, uint32_t layer, uint32_t expert) {
    int64_t sum = 0;
    for (const int16_t * row : rows_of(c, layer)) {
        sum += row[expert];
    }
    return sum;
}

void choose_early(const device_class & c, const device_call & call) {
    c.flight->n_moves = 0;
    c.flight->layer = call.layer;
    std::vector<std::pair<int64_t, uint32_t>> wanted;  // best guess first, then the lower expert
    std::vector<bool> guessed(call.n_experts);
    for (uint32_t expert = 0; expert < call.n_experts; expert++) {
        const int64_t score = guess(c, call.layer, expert);
        guessed[expert] = score >= c.threshold;
        if (guessed[expert] && c.slot_of[call.first + expert] < 0) {
            wanted.push_back({-score, expert});
        }
    }
    std::sort(wanted.begin(), wanted.end());
    for (uint32_t i = 0; i < wanted.size() && i < c.most; i++) {
        const uint32_t leaving = victim(c, call, &guessed);
        if (leaving == ~0u) {
            return;
        }
        c.flight->landed[i] = 0;
        c.flight->moves[i] = {wanted[i].second, hand_over(c, call, wanted[i].second, leaving), leaving};
        c.flight->n_moves++;
        c.waiting[call.first + wanted[i].second] = 1;
        bank(c)[c.early + call.layer]++;
    }
}

void learn(const device_class & c) {
    for (uint32_t layer = 1; layer < c.n_layers; layer++) {
        if (c.heads[layer].n_tokens != 1 || c.heads[layer - 1].n_tokens != 1) {
            continue;
        }
        const int32_t * seen = c.seen[layer];
        const std::vector<int16_t *> rows = rows_of(c, layer);
        double share = 1 << SPARK_LEARNING_SHIFT;
        while (share < 2 * (2 * c.layers[layer].top_k + 1)) {
            share *= 2;
        }
        for (uint32_t expert = 0; expert < c.layers[layer].n_experts; expert++) {
            const bool chosen = std::find(seen, seen + c.heads[layer].n_used, int32_t(expert)) != seen + c.heads[layer].n_used;
            const double score = double(guess(c, layer, expert));
            const double error = chosen ? std::max(SPARK_PREDICTED_ONE - score, 0.0) : std::min(-score, 0.0);
            for (int16_t * row : rows) {
                row[expert] = int16_t(std::clamp(row[expert] + std::floor((error + share / 2) / share), -32768.0, 32767.0));
            }
        }
    }
}

void mark(const device_class & c, const device_call & call) {
    for (uint32_t i = 0; i < call.n_used * call.n_tokens; i++) {
        const int32_t id = call.seen[i] = checked(c, call, i);
        if (call.mask != nullptr && c.slot_of[call.first + uint32_t(id)] < 0) {
            bank(c)[c.cold + call.layer]++;
            bank(c)[c.loads + call.layer] += call.mask[id] == 0;
        }
        if (call.mask != nullptr) {
            call.mask[id] = 1;
        }
    }
    c.heads[call.layer] = {call.n_tokens, call.n_used, {0, 0}};
}

void gather(const device_class & c, const device_call & call) {
    for (uint32_t expert = 0; expert < call.n_experts; expert++) {
        const int32_t slot = c.slot_of[call.first + expert];
        if (call.mask != nullptr ? call.mask[expert] == 0 : slot < 0) {
            continue;
        }
        for (uint32_t k = 0; k < call.n_kinds; k++) {
            const device_kind & kind = call.kinds[k];
            const char * from = slot >= 0 ? kind.slots + uint64_t(slot) * kind.bytes : kind.all + uint64_t(expert) * kind.bytes;
            std::memcpy(kind.scratch + uint64_t(expert) * kind.bytes, from, kind.bytes);
        }
    }
}

void tally(const device_class & c) {
    c.control->step++;
    for (uint32_t l = 0; l < c.n_layers; l++) {
        layer_state & layer = c.layers[l];
        const int32_t * seen = c.seen[l];
        bank(c)[c.tokens + l] += c.heads[l].n_tokens;
        for (uint32_t token = 0; token < c.heads[l].n_tokens; token++, seen += c.heads[l].n_used) {
            const uint32_t n_used = c.heads[l].n_used, now = layer.clock + n_used;
            for (uint32_t i = 0; i < n_used; i++) {
                const uint32_t entry = layer.first + uint32_t(seen[i]);
                bank(c)[entry]++;
                bank(c)[c.used + l] += c.waiting[entry];
                c.waiting[entry] = 0;
                uint32_t newer = layer.n_experts;
                if (c.recency[entry]) {
                    newer = 0;
                    for (uint32_t other = 0; other < layer.n_experts; other++) {
                        newer += c.recency[layer.first + other] > c.recency[entry];
                    }
                }
                bank(c)[c.distances + layer.first_distance + newer] += c.control->phase == SPARK_DECODE;
            }
            for (uint32_t i = 0; i < n_used; i++) {
                expert_meta & meta = c.meta[layer.first + uint32_t(seen[i])];
                meta.score = meta.score * weight(c.decay, (now - meta.stamp) / layer.top_k) + 1.0f;
                meta.stamp = now - i;
                if (c.control->phase == SPARK_DECODE) {
                    c.recency[layer.first + uint32_t(seen[i])] = layer.recency_clock + n_used - i;
                }
            }
            layer.clock = now;
            layer.recency_clock += c.control->phase == SPARK_DECODE ? n_used : 0;
        }
        c.heads[l].n_tokens = 0;
    }
}

// ---- streams of which only those that copy early are ever behind

struct copies {
    device_class c;
    device_call call;
};
using late = std::shared_ptr<std::vector<copies>>;  // of a stream; an event shares it with the stream it was recorded in

void catch_up(const late & behind) {
    for (const copies & copy : *behind) {
        for (uint32_t q = 0; q < copy.c.flight->n_moves; q++) {
            land(copy.c, copy.call, q);
        }
    }
    behind->clear();
}

// ---- a ggml device

ggml_backend_device device;
ggml_backend_reg registry;
ggml_backend_dev_t cpu;

void event_record(ggml_backend_t, ggml_backend_event_t) {}
void event_wait(ggml_backend_t, ggml_backend_event_t) {}
void get_props(ggml_backend_dev_t, ggml_backend_dev_props * props) {
    cpu->iface.get_props(cpu, props);
    props->name = "CUDA0";
    props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->device_id = "0000:00:00.0";
}
ggml_backend_dev_type get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
ggml_backend_t init_backend(ggml_backend_dev_t, const char * params) {
    ggml_backend_t made = cpu->iface.init_backend(cpu, params);
    made->iface.event_record = event_record;
    made->iface.event_wait = event_wait;
    return made;
}
const char * reg_name(ggml_backend_reg_t) { return "CUDA"; }
void * reg_proc(ggml_backend_reg_t, const char * name) { return cpu->reg->iface.get_proc_address(cpu->reg, name); }

}  // namespace

extern "C" {

SPARK_EXPORT ggml_backend_dev_t fake_device(ggml_backend_dev_t over) {
    cpu = over;
    device = *over;
    device.iface.get_props = get_props;
    device.iface.get_type = get_type;
    device.iface.init_backend = init_backend;
    registry = *over->reg;
    registry.iface.get_name = reg_name;
    registry.iface.get_proc_address = reg_proc;
    device.reg = &registry;
    return &device;
}

SPARK_EXPORT uint64_t fake_launches(int kernel) { return launches[kernel]; }

#define FAKE(name, ...) SPARK_EXPORT int name(__VA_ARGS__)
FAKE(cuInit, unsigned) { return 0; }
FAKE(cuDriverGetVersion, int * version) { return *version = 13000, 0; }
FAKE(cuGetErrorName, int, const char ** name) { return *name = "FAKE_ERROR", 0; }
FAKE(cuDeviceGetByPCIBusId, int * dev, const char *) { return *dev = 0, 0; }
FAKE(cuDeviceGetAttribute, int * value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, 0; }
FAKE(cuDevicePrimaryCtxRetain, void ** context, int) { return *context = &device, 0; }
FAKE(cuDevicePrimaryCtxRelease_v2, int) { return 0; }
FAKE(cuCtxPushCurrent_v2, void *) { return 0; }
FAKE(cuCtxPopCurrent_v2, void **) { return 0; }
FAKE(cuCtxSynchronize, void) { return 0; }
FAKE(cuModuleLoadData, void ** module, const void *) { return *module = &device, 0; }
FAKE(cuModuleUnload, void *) { return 0; }
FAKE(cuModuleGetFunction, uint64_t * function, void *, const char * name) {
    const char * names[] = {"", "spark_ensure", "spark_mark", "spark_gather", "spark_tally", "spark_choose_early", "spark_copy_early", "spark_learn"};
    for (uint64_t i = ENSURE; i <= LEARN; i++) {
        if (std::strcmp(name, names[i]) == 0) {
            return *function = i, 0;
        }
    }
    return FAILED;
}
FAKE(cuMemAlloc_v2, void ** memory, size_t bytes) { return *memory = std::malloc(bytes), 0; }
FAKE(cuMemFree_v2, void * memory) { return std::free(memory), 0; }
FAKE(cuMemcpyHtoD_v2, void * to, const void * from, size_t bytes) { return std::memcpy(to, from, bytes), 0; }
FAKE(cuMemcpyDtoH_v2, void * to, const void * from, size_t bytes) { return std::memcpy(to, from, bytes), 0; }
FAKE(cuMemcpyHtoDAsync_v2, void * to, const void * from, size_t bytes, void *) { return std::memcpy(to, from, bytes), 0; }
FAKE(cuMemcpyDtoHAsync_v2, void * to, const void * from, size_t bytes, void *) { return std::memcpy(to, from, bytes), 0; }
FAKE(cuMemsetD8_v2, void * to, unsigned char value, size_t bytes) { return std::memset(to, value, bytes), 0; }
FAKE(cuMemsetD8Async, void * to, unsigned char value, size_t bytes, void *) { return std::memset(to, value, bytes), 0; }
FAKE(cuMemsetD32Async, uint32_t * to, unsigned value, size_t n, void *) {
    for (size_t i = 0; i < n; i++) {
        to[i] = value;
    }
    return 0;
}
FAKE(cuMemHostAlloc, void ** memory, size_t bytes, unsigned) { return *memory = std::malloc(bytes), 0; }
FAKE(cuMemFreeHost, void * memory) { return std::free(memory), 0; }
FAKE(cuMemHostRegister_v2, void *, size_t, unsigned) { return std::getenv("FAKE_CUDA_CANNOT_LOCK") != nullptr ? FAILED : 0; }
FAKE(cuMemHostUnregister, void *) { return 0; }
FAKE(cuMemHostGetDevicePointer_v2, void ** address, void * memory, unsigned) { return *address = memory, 0; }
FAKE(cuStreamCreate, late ** stream, unsigned) { return *stream = new late(std::make_shared<std::vector<copies>>()), 0; }
FAKE(cuStreamDestroy_v2, late * stream) { return delete stream, 0; }
FAKE(cuStreamSynchronize, late * stream) { return catch_up(*stream), 0; }
FAKE(cuStreamWaitEvent, late *, late * event, unsigned) { return *event ? catch_up(*event) : void(), 0; }
FAKE(cuStreamBeginCapture_v2, void *, int) { return FAILED; }
FAKE(cuStreamEndCapture, void *, void **) { return FAILED; }
FAKE(cuEventCreate, late ** event, unsigned) { return *event = new late, 0; }
FAKE(cuEventDestroy_v2, late * event) { return delete event, 0; }
FAKE(cuEventRecord, late * event, late * stream) { return *event = *stream, 0; }
FAKE(cuGraphInstantiateWithFlags, void **, void *, uint64_t) { return FAILED; }
FAKE(cuGraphDestroy, void *) { return 0; }
FAKE(cuGraphExecDestroy, void *) { return 0; }
FAKE(cuGraphLaunch, void *, void *) { return FAILED; }
FAKE(cuGraphGetNodes, void *, void **, size_t *) { return FAILED; }
FAKE(cuGraphNodeGetType, void *, int *) { return FAILED; }
FAKE(cuLaunchKernel, uint64_t function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, late * stream, void ** arguments, void **) {
    const device_class & c = *static_cast<const device_class *>(arguments[0]);
    launches[function]++;
    switch (function) {
        case ENSURE: ensure(c, *static_cast<const device_call *>(arguments[1])); break;
        case MARK: mark(c, *static_cast<const device_call *>(arguments[1])); break;
        case GATHER: gather(c, *static_cast<const device_call *>(arguments[1])); break;
        case TALLY: tally(c); break;
        case CHOOSE_EARLY: choose_early(c, *static_cast<const device_call *>(arguments[1])); break;
        case COPY_EARLY: (*stream)->push_back({c, *static_cast<const device_call *>(arguments[1])}); break;
        case LEARN: learn(c); break;
    }
    return 0;
}

}  // extern "C"
