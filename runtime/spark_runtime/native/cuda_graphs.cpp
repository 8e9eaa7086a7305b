#include "cuda_graphs.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <set>

namespace spark {

namespace {

constexpr size_t MAX_GRAPHS = 8;        // decode alternates between few shapes
constexpr int TURING = 75, AMPERE = 80;

template <typename type> void append(std::vector<char> & to, const type & value) {
    const char * bytes = reinterpret_cast<const char *>(&value);
    to.insert(to.end(), bytes, bytes + sizeof value);
}

void describe(std::vector<char> & content, const ggml_cgraph * graph) {
    content.clear();
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor node = *graph->nodes[i];
        std::memset(node.padding, 0, sizeof node.padding);  // changes all the time, see cuda_engine::run_part
        append(content, node);
        for (const ggml_tensor * source : node.src) {
            if (source != nullptr) {
                append(content, source->data);
                append(content, source->ne);
                append(content, source->nb);
            }
        }
    }
}

}  // namespace

cuda_graphs::~cuda_graphs() {
    for (const entry & entry : entries) {
        for (CUgraphExec exec : {entry.exec, entry.outdated}) {
            if (exec != nullptr) {
                gpu.cu.cuGraphExecDestroy(exec);
            }
        }
    }
}

CUgraphExec cuda_graphs::by_number(const ggml_cgraph * graph, uint64_t generation) {
    if (graph->uid == 0) {
        return nullptr;
    }
    for (const entry & entry : entries) {
        if (entry.number == graph->uid && entry.generation == generation) {
            return entry.exec;
        }
    }
    return nullptr;
}

cuda_graphs::entry & cuda_graphs::by_content(const ggml_cgraph * graph, uint64_t generation) {
    describe(content, graph);
    for (auto found = entries.begin(); found != entries.end(); ++found) {
        if (found->generation == generation && found->content == content) {
            found->number = graph->uid;
            entries.splice(entries.begin(), entries, found);
            return entries.front();
        }
    }
    if (entries.size() < MAX_GRAPHS) {
        entries.emplace_front();
    } else {
        entries.splice(entries.begin(), entries, std::prev(entries.end()));
        entry & oldest = entries.front();
        if (oldest.exec != nullptr) {
            std::swap(oldest.outdated, oldest.exec);
        }
        if (oldest.exec != nullptr) {
            gpu.cu.cuGraphExecDestroy(oldest.exec);  // outdated and never captured anew
            oldest.exec = nullptr;
        }
        oldest.computed = 0;
        oldest.refused = false;
    }
    entry & made = entries.front();
    made.number = graph->uid;
    made.generation = generation;
    made.content = content;
    made.operations.clear();
    for (int i = 0; i < graph->n_nodes; i++) {
        made.operations.push_back(graph->nodes[i]->op);
    }
    return made;
}

bool cuda_graphs::familiar(const entry & entry) const {
    return std::any_of(entries.begin(), entries.end(), [&](const cuda_graphs::entry & other) {
        return &other != &entry && other.exec != nullptr && other.operations == entry.operations;
    });
}

bool cuda_graphs::can_capture(const ggml_cgraph * graph, int capability) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (std::strcmp(ggml_op_name(node->op), "MUL_MAT_ID") != 0) {
            continue;
        }
        const ggml_tensor * weight = node->src[0];
        if (ggml_is_quantized(weight->type)) {
            // Older cards have no kernel for some types and more than four tokens.
            if (node->ne[2] > (capability >= TURING ? MAX_SLOT_TOKENS : 4)) {
                return false;
            }
        } else if (capability < AMPERE || weight->ne[0] % 64 || weight->ne[1] % 64 || node->ne[2] > MAX_SLOT_TOKENS) {
            return false;
        }
    }
    return true;
}

bool cuda_graphs::take(entry & entry, CUgraph captured) {
    const size_t overlaps = gpu.cu.edits_graphs ? make_chain(captured) : 0;
    const bool updated = update(entry, captured);
    const CUresult result = updated ? CUDA_SUCCESS : gpu.cu.cuGraphInstantiate(&entry.exec, captured, 0);
    gpu.cu.cuGraphDestroy(captured);
    if (result != CUDA_SUCCESS) {
        entry.exec = nullptr;
        ggml_log_internal(GGML_LOG_LEVEL_WARN, "spark: a token cannot become one CUDA graph: %s\n", gpu.error_name(result).c_str());
        return false;
    }
    ggml_log_internal(GGML_LOG_LEVEL_INFO, "spark: a graph of %zu nodes is one CUDA graph%s, with %zu overlaps\n", entry.operations.size(),
                      updated ? " in place of an older one" : "", overlaps);
    return true;
}

// Sizes and addresses of an older graph are changed in a twentieth of the time that a new one takes (1,158 kernels on
// an H200: 0.3 ms, and 7 ms with its first launch). The driver refuses where more has changed.
bool cuda_graphs::update(entry & entry, CUgraph captured) const {
    if (entry.outdated == nullptr) {
        return false;
    }
    CUgraphExecUpdateResultInfo info = {};
    if (gpu.cu.edits_graphs && gpu.cu.cuGraphExecUpdate(entry.outdated, captured, &info) == CUDA_SUCCESS) {
        entry.exec = entry.outdated;
    } else {
        gpu.cu.cuGraphExecDestroy(entry.outdated);
    }
    entry.outdated = nullptr;
    return entry.exec != nullptr;
}

// Makes one chain of a captured graph. Ours come in between the wrapped backend's kernels through events, which leaves
// edges that say nothing new; the driver runs a graph that is no chain with more time between its kernels, all of them
// (0.3 us on an H200). And the backend's kernels may start while their predecessor ends (programmatic dependent launch),
// which the events took from those next to ours: ours wait by themselves, and so do kernels that are launched that way
// elsewhere in the graph.
size_t cuda_graphs::make_chain(CUgraph graph) const {
    const auto & cu = gpu.cu;
    size_t n = 0, overlaps = 0;
    if (cu.cuGraphGetNodes(graph, nullptr, &n) != CUDA_SUCCESS) {
        return 0;
    }
    std::vector<CUgraphNode> nodes(n);
    if (cu.cuGraphGetNodes(graph, nodes.data(), &n) != CUDA_SUCCESS) {
        return 0;
    }
    struct edges {
        std::vector<CUgraphNode> nodes;
        std::vector<CUgraphEdgeData> data;
    };
    const auto sources_of = [&](CUgraphNode node) {
        edges found;
        size_t count = 0;
        if (cu.cuGraphNodeGetDependencies(node, nullptr, nullptr, &count) == CUDA_SUCCESS && count > 0) {
            found.nodes.resize(count);
            found.data.assign(count, CUgraphEdgeData{});
            if (cu.cuGraphNodeGetDependencies(node, found.nodes.data(), found.data.data(), &count) != CUDA_SUCCESS) {
                found = edges{};
            }
        }
        return found;
    };
    std::map<CUgraphNode, const void *> kernels;  // their functions
    std::map<CUgraphNode, size_t> order;  // of capture
    std::set<CUgraphNode> mine;
    std::set<const void *> waiting(ours.begin(), ours.end());
    for (CUgraphNode node : nodes) {
        order[node] = order.size();
        int type = -1;
        CUDA_KERNEL_NODE_PARAMS params = {};
        if (cu.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS || type != CU_GRAPH_NODE_TYPE_KERNEL ||
            cu.cuGraphKernelNodeGetParams(node, &params) != CUDA_SUCCESS) {
            continue;
        }
        const void * function = params.func != nullptr ? static_cast<const void *>(params.func) : params.kern;
        if (function == nullptr) {
            continue;
        }
        kernels[node] = function;
        if (std::find(ours.begin(), ours.end(), params.func) != ours.end()) {
            mine.insert(node);
        }
        for (const CUgraphEdgeData & edge : sources_of(node).data) {
            if (edge.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC) {
                waiting.insert(function);
            }
        }
    }
    const auto drop = [&](CUgraphNode from, CUgraphNode to, const CUgraphEdgeData & edge) {
        return cu.cuGraphRemoveDependencies(graph, &from, &to, &edge, 1) == CUDA_SUCCESS;
    };
    const auto overlap = [&](CUgraphNode from, CUgraphNode to, const CUgraphEdgeData & old) {
        const auto kernel = kernels.find(to);
        if (old.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC || !kernels.count(from) || kernel == kernels.end() ||
            !waiting.count(kernel->second) || !drop(from, to, old)) {
            return;
        }
        CUgraphEdgeData edge = {};
        edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
        edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
        if (cu.cuGraphAddDependencies(graph, &from, &to, &edge, 1) == CUDA_SUCCESS) {
            overlaps++;
        } else {
            cu.cuGraphAddDependencies(graph, &from, &to, &old, 1);
        }
    };
    // Of two sources, one of them ours, whether `later` comes after `earlier` anyway: by a way through nodes captured
    // between the two.
    const auto implied = [&](CUgraphNode earlier, CUgraphNode later) {
        if (mine.count(earlier) == mine.count(later)) {
            return false;
        }
        std::set<CUgraphNode> seen{later};
        std::vector<CUgraphNode> ahead{later};
        while (!ahead.empty()) {
            const CUgraphNode at = ahead.back();
            ahead.pop_back();
            for (CUgraphNode source : sources_of(at).nodes) {
                if (source == earlier) {
                    return true;
                }
                if (order[source] > order[earlier] && seen.insert(source).second) {
                    ahead.push_back(source);
                }
            }
        }
        return false;
    };
    for (CUgraphNode node : nodes) {
        edges sources = sources_of(node);
        for (size_t i = 0; sources.nodes.size() > 1 && i < sources.nodes.size();) {
            const bool needless = std::any_of(sources.nodes.begin(), sources.nodes.end(),
                                              [&](CUgraphNode other) { return implied(sources.nodes[i], other); });
            if (needless && drop(sources.nodes[i], node, sources.data[i])) {
                sources.nodes.erase(sources.nodes.begin() + std::ptrdiff_t(i));
                sources.data.erase(sources.data.begin() + std::ptrdiff_t(i));
            } else {
                i++;
            }
        }
        if (sources.nodes.size() == 1 && (mine.count(node) || mine.count(sources.nodes[0]))) {
            overlap(sources.nodes[0], node, sources.data[0]);
        }
    }
    return overlaps;
}

}  // namespace spark
