#include "cuda_scratch.h"
#include "device_tables.h"

#include <algorithm>

namespace spark {

namespace {

constexpr uint32_t PREFETCH_FROM = 4;  // selections per expert from which nearly every expert is touched

}  // namespace

way way_of(const expert_call & call) {
    const tier_class & of = *call.layer->of;
    if (of.whole) {
        return way::whole;
    }
    const bool fits = call.n_used() * call.n_tokens() <= SPARK_MAX_SELECTED;
    return fits && of.resident(call.layer->index, call.n_used(), call.n_tokens()) ? way::slots : way::around;
}

// Where a call touches nearly all experts it pays to bring the whole layer before the router has chosen. Then all
// calls around the slots do so, because there are two scratch layers; and only while nothing moves in the slots,
// because the host decides what to copy.
std::vector<const expert_call *> fetched_ahead(const std::vector<expert_call> & calls) {
    std::vector<const expert_call *> ahead;
    bool pays = false, moved = false, few = false;
    for (const expert_call & call : calls) {
        const way way = way_of(call);
        if (way == way::around) {
            if (moved || few) {
                return {};
            }
            few = call.n_tokens() <= MAX_SLOT_TOKENS;
            ahead.push_back(&call);
            pays = pays || uint64_t(call.n_used()) * call.n_tokens() >= uint64_t(PREFETCH_FROM) * call.layer->n_experts;
        }
        moved = moved || way == way::slots;
    }
    return pays ? ahead : std::vector<const expert_call *>();
}

// Kernels read past the last row of quantised matrices, and what they find there must be no number that is none. Both
// scratch layers are shared by layers whose tensors lie differently, so what another kind of layer left goes: past
// each tensor, and where only some experts come, everything.
void cuda_scratch::clear(const tier_layer & layer, int scratch, CUstream stream, bool some) {
    const bool alike = filled_by[scratch] != nullptr && filled_by[scratch]->lies_like(layer);
    filled_by[scratch] = &layer;
    if (alike) {
        return;
    }
    for (const expert_tensor & tensor : layer.tensors) {
        const size_t kept = some ? 0 : layer.n_experts * tensor.bytes;
        const CUdeviceptr start = reinterpret_cast<CUdeviceptr>(tensor.scratch[scratch]->data) + kept;
        if (ggml_is_quantized(tensor.all->type) && tensor.scratch_span > kept) {
            gpu.check(gpu.cu.cuMemsetD8Async(start, 0, tensor.scratch_span - kept, stream), "cuMemsetD8Async");
        }
    }
}

void cuda_scratch::copy_missing(const tier_layer & layer, int scratch, CUstream stream) const {
    const slot_pool & pool = layer.of->pool;
    const layer_state & range = pool.layers[layer.index];
    for (uint32_t expert = 0; expert < range.n_experts;) {
        uint32_t run = 0;
        while (expert + run < range.n_experts && pool.slot_of[range.first + expert + run] < 0) {
            run++;
        }
        for (const expert_tensor & tensor : layer.tensors) {
            if (run == 0) {
                break;
            }
            const size_t offset = size_t(expert) * tensor.bytes;
            gpu.check(gpu.cu.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(tensor.scratch[scratch]->data) + offset,
                                               static_cast<const char *>(tensor.all->data) + offset, run * tensor.bytes, stream),
                      "cuMemcpyHtoDAsync");
        }
        expert += std::max(run, 1u);
    }
}

}  // namespace spark
