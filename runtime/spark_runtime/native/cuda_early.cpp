#include "cuda_early.h"

#include "cuda_scratch.h"

namespace spark {

namespace {

constexpr uint32_t DECIDING_BLOCKS = 1;
constexpr uint32_t EARLY_BLOCKS = 8;  // leaves processors to the layer; 4 and 16 were as fast

}  // namespace

void cuda_early::begin(size_t n_classes) {
    while (fetched.size() < n_classes) {
        fetched.emplace_back(gpu, dev);
    }
    unawaited.assign(n_classes, false);
}

void cuda_early::fetch(CUfunction kernel, size_t c, cuda_tables & state, const expert_call & call, const char * host_as_seen, const char * host,
                       const stream & decided) {
    const tier_layer & layer = *call.layer;
    if (state.tables.weights == nullptr || call.n_tokens() != 1 || way_of(call) != way::slots || layer.index + 1 >= layer.of->layers.size()) {
        return;
    }
    device_call arguments = state.arguments(*layer.of->layers[layer.index + 1], 0, host_as_seen, host);
    void * both[] = {&state.tables, &arguments};
    chosen.record(decided);
    flow.wait(chosen.raw());
    gpu.check(gpu.cu.cuLaunchKernel(kernel, DECIDING_BLOCKS + EARLY_BLOCKS, 1, 1, SPARK_BLOCK_THREADS, 1, 1, 0, flow, both, nullptr), "cuLaunchKernel");
    fetched[c].record(flow);
    unawaited[c] = true;
}

void cuda_early::await(size_t c, const stream & later) {
    if (unawaited[c]) {
        later.wait(fetched[c].raw());
        unawaited[c] = false;
    }
}

void cuda_early::await_all(const stream & later) {
    for (size_t c = 0; c < unawaited.size(); c++) {
        await(c, later);
    }
}

}  // namespace spark
