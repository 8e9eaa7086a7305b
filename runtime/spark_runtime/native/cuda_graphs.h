// Whole-token CUDA graphs: which ggml graph each one was captured from.

#pragma once

#include "cuda_context.h"

#include <list>

namespace spark {

class cuda_graphs {
  public:
    struct entry {
        uint64_t number = 0;
        uint64_t generation = 0;
        std::vector<char> content;     // all that the captured kernels depend on
        std::vector<int32_t> operations;
        CUgraphExec exec = nullptr;
        CUgraphExec outdated = nullptr;  // of the entry that had to go for this one
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
    // Whether one of the same operations, of other sizes or places, has been captured.
    bool familiar(const entry & entry) const;
    // Makes a captured graph ready to run, and frees it; false if the driver cannot.
    bool take(entry & entry, CUgraph captured);
    // Whether the CUDA backend would compute it without waiting for the GPU.
    static bool can_capture(const ggml_cgraph * graph, int capability);

  private:
    const cuda & gpu;
    std::vector<CUfunction> ours;
    std::list<entry> entries;  // used last, first
    std::vector<char> content;  // of the graph that is looked for; kept for its memory
    bool update(entry & entry, CUgraph captured) const;
    size_t make_chain(CUgraph graph) const;
};

}  // namespace spark
