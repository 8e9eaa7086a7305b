#include "cuda_tables.h"

#include <algorithm>
#include <cstddef>

namespace spark {

template <typename type, typename allocator> void cuda_tables::send(const type * to, const std::vector<type, allocator> & from) {
    gpu.check(gpu.cu.cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(to), from.data(), from.size() * sizeof(type)), "cuMemcpyHtoD");
}

template <typename type, typename allocator> void cuda_tables::fetch(std::vector<type, allocator> & to, const type * from) {
    gpu.check(gpu.cu.cuMemcpyDtoH(to.data(), reinterpret_cast<CUdeviceptr>(from), to.size() * sizeof(type)), "cuMemcpyDtoH");
}

cuda_tables::cuda_tables(const cuda & gpu, const tier_class & of, CUdeviceptr fault, uint32_t * urgent) : of(of), gpu(gpu) {
    const slot_pool & pool = of.pool;
    const size_t n_layers = pool.layers.size(), n_entries = pool.slot_of.size();
    const phase_counts & bank = pool.counts[0];
    size_t at = 0;
    const auto part = [&](size_t bytes) {
        const size_t start = at;
        at += (bytes + 15) / 16 * 16;
        return start;
    };
    const size_t n_counts = n_entries + bank.distances.size() + 6 * n_layers;
    const size_t control = part(sizeof(device_control));
    const size_t flight = part(sizeof(device_flight));
    const size_t slot_of = part(n_entries * sizeof(int32_t));
    const size_t meta = part(n_entries * sizeof(expert_meta));
    const size_t recency = part(n_entries * sizeof(uint32_t));
    const size_t waiting = part(n_entries * sizeof(uint32_t));
    const size_t layer_of = part(n_entries * sizeof(uint16_t));
    const size_t layers = part(n_layers * sizeof(layer_state));
    const size_t heads = part(n_layers * sizeof(device_head));
    const size_t seen = part(n_layers * sizeof(int32_t *));
    const size_t decay = part(2 * SPARK_DECAY_STEP * sizeof(float));
    const size_t counts = part(PHASES * n_counts * sizeof(uint64_t));
    memory.allocate(gpu, at);
    device_class & t = tables;
    t.control = memory.at<device_control>(control);
    t.flight = memory.at<device_flight>(flight);
    t.urgent = urgent;
    t.slot_of = memory.at<int32_t>(slot_of);
    t.meta = memory.at<expert_meta>(meta);
    t.recency = memory.at<uint32_t>(recency);
    t.waiting = memory.at<uint32_t>(waiting);
    t.layer_of = memory.at<uint16_t>(layer_of);
    t.layers = memory.at<layer_state>(layers);
    t.heads = memory.at<device_head>(heads);
    t.seen = memory.at<int32_t *>(seen);
    t.decay = memory.at<float>(decay);
    t.counts = memory.at<uint64_t>(counts);
    t.fault = reinterpret_cast<int32_t *>(fault);
    t.n_layers = uint32_t(n_layers);
    t.n_entries = uint32_t(n_entries);
    t.n_counts = uint32_t(n_counts);
    t.distances = uint32_t(n_entries);
    t.tokens = t.distances + uint32_t(bank.distances.size());
    t.cold = t.tokens + uint32_t(n_layers);
    t.loads = t.cold + uint32_t(n_layers);
    t.early = t.loads + uint32_t(n_layers);
    t.used = t.early + uint32_t(n_layers);
    t.wasted = t.used + uint32_t(n_layers);
    std::vector<uint16_t> owners;
    masks.allocate(gpu, n_entries * sizeof(uint32_t));
    for (size_t l = 0; l < n_layers; l++) {
        owners.insert(owners.end(), pool.layers[l].n_experts, uint16_t(l));
        seen_tensors.push_back(*of.layers[l]->slot_ids);
        tally_bytes = std::max(tally_bytes, uint32_t(pool.layers[l].n_experts * 3 * sizeof(uint32_t)));
    }
    send(t.layer_of, owners);
    make_room(SPARK_MAX_SELECTED);
}

void cuda_tables::make_room(size_t n_ids) {
    const size_t n_layers = seen_tensors.size();
    seen.allocate(gpu, n_layers * n_ids * sizeof(int32_t));
    room = n_ids;
    std::vector<int32_t *> addresses;
    for (size_t l = 0; l < n_layers; l++) {
        addresses.push_back(seen.at<int32_t>(l * n_ids * sizeof(int32_t)));
        seen_tensors[l].data = addresses.back();
    }
    send(static_cast<int32_t * const *>(tables.seen), addresses);
}

void cuda_tables::upload(int phase) {
    const slot_pool & pool = of.pool;
    const device_class & t = tables;
    if (pool.guesses.weights.size() * sizeof(int16_t) != weights.size) {
        weights.release();
        if (!pool.guesses.weights.empty()) {
            weights.allocate(gpu, pool.guesses.weights.size() * sizeof(int16_t));
        }
    }
    tables.weights = weights.size > 0 ? weights.at<int16_t>() : nullptr;
    tables.most = pool.early.most;
    tables.threshold = pool.early.threshold;
    upload_guesses();
    send(t.waiting, pool.waiting);
    send(t.slot_of, pool.slot_of);
    send(static_cast<const expert_meta *>(t.meta), pool.meta);
    send(static_cast<const uint32_t *>(t.recency), pool.recency);
    send(static_cast<const layer_state *>(t.layers), pool.layers);
    std::vector<float> decay(pool.decay_low, pool.decay_low + SPARK_DECAY_STEP);
    decay.insert(decay.end(), pool.decay_high, pool.decay_high + SPARK_DECAY_STEP);
    send(t.decay, decay);
    std::vector<uint64_t> counts;
    for (phase_counts bank : pool.counts) {
        for (const auto * part : bank.parts()) {
            counts.insert(counts.end(), part->begin(), part->end());
        }
    }
    send(static_cast<const uint64_t *>(t.counts), counts);
    const std::vector<device_control> control = {{pool.step, uint32_t(phase), 0, 0}};
    send(static_cast<const device_control *>(t.control), control);
    send(static_cast<const device_flight *>(t.flight), std::vector<device_flight>(1));
    loaded = pool.slot_of;
}

void cuda_tables::download(slot_pool & pool) {
    const device_class & t = tables;
    fetch(pool.slot_of, t.slot_of);
    fetch(pool.meta, t.meta);
    fetch(pool.recency, t.recency);
    fetch(pool.layers, t.layers);
    std::vector<uint64_t> counts(PHASES * size_t(t.n_counts));
    fetch(counts, t.counts);
    auto from = counts.begin();
    fetch(pool.waiting, t.waiting);
    for (phase_counts & bank : pool.counts) {
        for (auto * part : bank.parts()) {
            std::copy_n(from, part->size(), part->begin());
            from += std::ptrdiff_t(part->size());
        }
    }
    std::vector<device_control> control(1);
    fetch(control, static_cast<const device_control *>(t.control));
    pool.step = control[0].step;
    loaded = pool.slot_of;
}

void cuda_tables::load_slots(CUstream stream) {
    for (const tier_layer * layer : of.layers) {
        const layer_state & range = of.pool.layers[layer->index];
        for (uint32_t expert = 0; expert < range.n_experts;) {
            const uint32_t entry = range.first + expert;
            uint32_t run = 1;  // experts side by side in slots side by side go in one copy
            const int32_t slot = of.pool.slot_of[entry];
            const auto missing = [&](uint32_t i) { return of.pool.slot_of[i] >= 0 && (loaded.empty() || loaded[i] != of.pool.slot_of[i]); };
            if (!missing(entry)) {
                expert++;
                continue;
            }
            while (expert + run < range.n_experts && missing(entry + run) && of.pool.slot_of[entry + run] == slot + int32_t(run)) {
                run++;
            }
            for (const expert_tensor & tensor : layer->tensors) {
                const CUdeviceptr to = reinterpret_cast<CUdeviceptr>(tensor.slots->data) + size_t(slot) * tensor.bytes;
                const char * from = static_cast<const char *>(tensor.all->data) + size_t(expert) * tensor.bytes;
                gpu.check(gpu.cu.cuMemcpyHtoDAsync(to, from, run * tensor.bytes, stream), "cuMemcpyHtoDAsync");
            }
            expert += run;
        }
    }
}

void cuda_tables::upload_guesses() {
    if (tables.weights != nullptr) {
        send(static_cast<const int16_t *>(tables.weights), of.pool.guesses.weights);
    }
}

void cuda_tables::download_guesses(slot_pool & pool) {
    if (tables.weights != nullptr) {
        fetch(pool.guesses.weights, tables.weights);
    }
}

void cuda_tables::upload_recency() {
    send(static_cast<const uint32_t *>(tables.recency), of.pool.recency);
    send(static_cast<const layer_state *>(tables.layers), of.pool.layers);
}

device_call cuda_tables::arguments(const tier_layer & layer, int scratch, const char * host_as_seen, const char * host) const {
    const layer_state & range = layer.of->pool.layers[layer.index];
    device_call call = {};
    call.slots = static_cast<int32_t *>(layer.slot_ids->data);
    call.seen = seen.at<int32_t>(layer.index * room * sizeof(int32_t));
    call.mask = masks.at<uint32_t>(range.first * sizeof(uint32_t));
    call.layer = layer.index;
    call.first = range.first;
    call.n_experts = range.n_experts;
    call.block = layer.block;
    call.n_kinds = uint32_t(layer.tensors.size());
    for (size_t k = 0; k < layer.tensors.size(); k++) {
        const expert_tensor & tensor = layer.tensors[k];
        call.kinds[k] = {host_as_seen + (static_cast<const char *>(tensor.all->data) - host), static_cast<char *>(tensor.slots->data),
                              tensor.scratch[scratch] != nullptr ? static_cast<char *>(tensor.scratch[scratch]->data) : nullptr, tensor.bytes};
    }
    return call;
}

}  // namespace spark
