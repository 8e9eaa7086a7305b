// What is fetched early beside the computation: a stream of its own, and who waits for it.

#pragma once

#include "cuda_tables.h"

namespace spark {

class cuda_early {
  public:
    cuda_early(const cuda & gpu, ggml_backend_dev_t dev) : gpu(gpu), dev(dev), flow(gpu), chosen(gpu, dev) {}
    // Before every graph.
    void begin(size_t n_classes);
    // Launches the kernel that guesses what the layer after `call`'s in its class, the `c`th, will select, and copies what
    // it lacks: beside the computation of `call`, and behind what `decided` has to do by now.
    void fetch(CUfunction kernel, size_t c, cuda_tables & state, const expert_call & call, const char * host_as_seen, const char * host,
               const stream & decided);
    // What comes to `later` from now on waits for what was fetched early for class `c`.
    void await(size_t c, const stream & later);
    void await_all(const stream & later);
    void synchronize() const { gpu.cu.cuStreamSynchronize(flow); }

  private:
    const cuda & gpu;
    ggml_backend_dev_t dev;
    stream flow;
    event chosen;               // what the next layer's guess is made from
    std::deque<event> fetched;  // of each class
    std::vector<bool> unawaited;
};

}  // namespace spark
