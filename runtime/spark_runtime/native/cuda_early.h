// What is fetched early beside the computation: a stream of its own, and who waits for it (kernel_early.h).

#pragma once

#include "cuda_tables.h"

namespace spark {

class cuda_early {
  public:
    cuda_early(const cuda & gpu, ggml_backend_dev_t dev) : gpu(gpu), dev(dev), flow(gpu), chosen(gpu, dev) {}
    // Before every graph.
    void begin(size_t n_classes);
    // Launches what decides on `decide`, behind `call`'s decisions, which experts the layer after it in its class, the
    // `c`th, is guessed to select, and what copies those it lacks beside the computation of `call`.
    void fetch(CUfunction choose, CUfunction copy, size_t c, cuda_tables & state, const expert_call & call, const char * host_as_seen, const char * host,
               const stream & decide);
    // What comes to `decide` from now on waits for what is on its way for class `c`. spark_ensure can do without for
    // experts of its own layer.
    void await(size_t c, const stream & decide, const tier_layer * ensured = nullptr);
    void await_all(const stream & decide);
    // Whether a launch failed since begin() that left a slot to an expert which nobody will copy.
    bool torn = false;
    void synchronize() const { gpu.cu.cuStreamSynchronize(flow); }

  private:
    const cuda & gpu;
    ggml_backend_dev_t dev;
    stream flow;
    event chosen;  // what is to be copied
    struct flight {
        flight(const cuda & gpu, ggml_backend_dev_t dev) : landed(gpu, dev) {}
        event landed;
        const tier_layer * of = nullptr;  // whose experts are on their way; null: nobody's, or they are waited for
    };
    std::deque<flight> flights;  // of each class
};

}  // namespace spark
