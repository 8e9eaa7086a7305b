#include "cuda_early.h"

#include "cuda_scratch.h"

namespace spark {

namespace {

constexpr uint32_t COPYING_BLOCKS = 8;  // leaves processors to the layer; 4 and 16 were as fast

}  // namespace

void cuda_early::begin(size_t n_classes) {
    while (flights.size() < n_classes) {
        flights.emplace_back(gpu, dev);
    }
    for (flight & each : flights) {
        each.of = nullptr;
    }
    torn = false;
}

void cuda_early::fetch(CUfunction choose, CUfunction copy, size_t c, cuda_tables & state, const expert_call & call, const char * host_as_seen,
                       const char * host, const stream & decide) {
    const tier_layer & layer = *call.layer;
    if (state.tables.weights == nullptr || call.n_tokens() != 1 || way_of(call) != way::slots || layer.index + 1 >= layer.of->layers.size()) {
        return;
    }
    await(c, decide);
    const tier_layer & next = *layer.of->layers[layer.index + 1];
    device_call arguments = state.arguments(next, 0, host_as_seen, host);
    void * both[] = {&state.tables, &arguments};
    const auto launch = [&](CUfunction kernel, uint32_t blocks, CUstream stream) {
        gpu.check(gpu.cu.cuLaunchKernel(kernel, blocks, 1, 1, SPARK_BLOCK_THREADS, 1, 1, 0, stream, both, nullptr), "cuLaunchKernel");
    };
    launch(choose, 1, decide);
    torn = true;
    chosen.record(decide);
    flow.wait(chosen.raw());
    launch(copy, COPYING_BLOCKS, flow);
    torn = false;
    flights[c].landed.record(flow);
    flights[c].of = &next;
}

void cuda_early::await(size_t c, const stream & decide, const tier_layer * ensured) {
    if (flights[c].of != nullptr && flights[c].of != ensured) {
        decide.wait(flights[c].landed.raw());
        flights[c].of = nullptr;
    }
}

void cuda_early::await_all(const stream & decide) {
    for (size_t c = 0; c < flights.size(); c++) {
        await(c, decide);
    }
}

}  // namespace spark
