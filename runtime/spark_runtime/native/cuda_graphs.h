// Whole-token CUDA graphs: which ggml graph each one was captured from.

#pragma once

#include "cuda_context.h"

#include <list>

namespace spark {

class cuda_graphs {
  public:
    struct node {  // what a captured kernel depends on
        ggml_tensor self;
        const void * data[GGML_MAX_SRC];
        int64_t ne[GGML_MAX_SRC][GGML_MAX_DIMS];
        size_t nb[GGML_MAX_SRC][GGML_MAX_DIMS];
    };
    struct entry {
        uint64_t number = 0;
        uint64_t generation = 0;
        std::vector<node> nodes;
        CUgraphExec exec = nullptr;
        int computed = 0;
        bool refused = false;
    };

    // `ours` are the kernels that stand between those of the wrapped backend.
    cuda_graphs(const cuda & gpu, std::vector<CUfunction> ours) : gpu(gpu), ours(std::move(ours)) {}
    ~cuda_graphs();

    // The captured graph of one that ggml numbers like the last time, or null.
    CUgraphExec by_number(const ggml_cgraph * graph, uint64_t generation);
    // The entry of one with equal nodes; a new one if there is none.
    entry & by_content(const ggml_cgraph * graph, uint64_t generation);
    // Makes a captured graph ready to run, and frees it; false if the driver cannot.
    bool take(entry & entry, CUgraph captured);
    // Whether the CUDA backend would compute it without waiting for the GPU.
    static bool can_capture(const ggml_cgraph * graph, int capability);

  private:
    const cuda & gpu;
    std::vector<CUfunction> ours;
    std::list<entry> entries;  // used last, first
    size_t make_chain(CUgraph graph) const;
};

}  // namespace spark
