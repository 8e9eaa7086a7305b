// Which nodes of a graph multiply by experts, and how they are pointed at other tensors and ids for a while.

#include "tier.h"

#include <algorithm>
#include <cstring>

namespace spark {

namespace {

int32_t op_number(const char * name) {
    int32_t op = 0;
    while (std::strcmp(ggml_op_name(op), name) != 0) {
        op++;
    }
    return op;
}

}  // namespace

std::vector<expert_call> find_calls(tier & tier, ggml_cgraph * graph) {
    static const int32_t mul_mat_id = op_number("MUL_MAT_ID"), add_id = op_number("ADD_ID"), repeat = op_number("REPEAT");
    std::vector<expert_call> calls;
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * node = graph->nodes[i];
        // A scale is reshaped, repeated for each token, and then read by the router's ids.
        if (node->op == repeat && node->src[0]->src[0] != nullptr && !calls.empty()) {
            const auto scaled = tier.layer_of.find(node->src[0]->src[0]);
            if (scaled != tier.layer_of.end() && scaled->second == calls.back().layer) {
                calls.back().scales.push_back(i);
            }
        }
        if (!calls.empty() && !calls.back().scales.empty() && node->src[0] == graph->nodes[calls.back().scales.back()]) {
            calls.back().last = i;
        }
        if (node->op != mul_mat_id && node->op != add_id) {
            continue;
        }
        const auto found = tier.layer_of.find(node->src[node->op == mul_mat_id ? 0 : 1]);
        ggml_tensor * ids = node->src[2];
        if (found == tier.layer_of.end() || ids->ne[1] == 0) {
            continue;
        }
        if (found->second->of == nullptr) {
            // Blocks that only predict further tokens are loaded and not placed.
            throw tier_error{"block " + std::to_string(found->second->block) + " computes with experts that have no place"};
        }
        if (calls.empty() || calls.back().layer != found->second || calls.back().ids != ids) {
            if (std::any_of(calls.begin(), calls.end(), [&](const expert_call & call) { return call.layer == found->second; })) {
                throw tier_error{"block " + std::to_string(found->second->block) + " is computed twice in one graph"};
            }
            if (ids->type != GGML_TYPE_I32 || ids->nb[0] != sizeof(int32_t) || ids->nb[1] % sizeof(int32_t) || ids->ne[2] != 1 || ids->ne[3] != 1) {
                throw tier_error{"block " + std::to_string(found->second->block) + " selects experts by a tensor of another kind than rows of 32-bit ids"};
            }
            calls.push_back({found->second, ids, i, i, {}, {}});
        }
        calls.back().nodes.push_back(i);
        calls.back().last = i;
    }
    return calls;
}

ggml_tensor & patches::of(ggml_tensor * node) {
    all.push_back({node, *node});
    return *node;
}

void patches::undo() {
    while (!all.empty()) {
        *all.back().node = all.back().as_it_was;
        all.pop_back();
    }
}

namespace {

ggml_tensor * at(const expert_tensor & tensor, where place) {
    switch (place) {
        case where::slots: return tensor.slots;
        case where::whole: return tensor.whole;
        case where::scratch0: return tensor.scratch[0];
        case where::scratch1: return tensor.scratch[1];
    }
    return nullptr;
}

// The nodes reshape, repeat and get_rows of one scale; fused or not, they give the scales of the same experts.
void redirect_scale(patches & patches, ggml_cgraph * graph, const expert_call & call, int index, where place, ggml_tensor * ids) {
    ggml_tensor * repeat = graph->nodes[index];
    ggml_tensor & reshape = patches.of(repeat->src[0]);
    const expert_tensor & tensor = *call.layer->find(reshape.src[0]);
    ggml_tensor * value = at(tensor, place);
    reshape.src[0] = value;
    reshape.view_src = value;
    reshape.data = value->data;
    reshape.buffer = value->buffer;
    reshape.ne[1] = value->ne[0];
    reshape.nb[2] = reshape.nb[3] = reshape.nb[1] * size_t(reshape.ne[1]);
    if (place == where::slots) {
        ggml_tensor & wider = patches.of(repeat);
        wider.ne[1] = value->ne[0];
        wider.nb[2] = wider.nb[1] * size_t(wider.ne[1]);
        wider.nb[3] = wider.nb[2] * size_t(wider.ne[2]);
        wider.data = tensor.repeated->data;
        wider.buffer = tensor.repeated->buffer;
    }
    for (int i = index + 1; i < graph->n_nodes; i++) {
        if (graph->nodes[i]->src[0] == repeat) {
            patches.of(graph->nodes[i]).src[1] = ids;
            break;
        }
    }
}

}  // namespace

void redirect(patches & patches, ggml_cgraph * graph, const expert_call & call, where place, ggml_tensor * ids) {
    for (int index : call.nodes) {
        ggml_tensor & node = patches.of(graph->nodes[index]);
        const int source = call.layer->find(node.src[0]) != nullptr ? 0 : 1;
        node.src[source] = at(*call.layer->find(node.src[source]), place);
        node.src[2] = ids;
    }
    for (int index : call.scales) {
        redirect_scale(patches, graph, call, index, place, ids);
    }
}

}  // namespace spark
