// The tables of one class of layers in device memory, as kernels.cu reads and writes them.

#pragma once

#include "cuda_context.h"
#include "device_tables.h"

#include <deque>

namespace spark {

class cuda_tables {
  public:
    // `fault` is host memory that the GPU writes to, `urgent` the GPU's count of blocks that copy what was chosen.
    cuda_tables(const cuda & gpu, const tier_class & of, CUdeviceptr fault, uint32_t * urgent);
    cuda_tables(const cuda_tables &) = delete;
    cuda_tables & operator=(const cuda_tables &) = delete;

    // Copies into slots what the pool says and is not there yet, on `stream`.
    void load_slots(CUstream stream);
    void upload(int phase);
    void download(slot_pool & pool);
    void upload_recency();
    void upload_guesses();
    void download_guesses(slot_pool & pool);
    // Room for the valid ids of one step in every layer; nothing may be computing. Captured graphs know where they were.
    void make_room(size_t n_ids);
    // What the kernels are told of a layer.
    device_call arguments(const tier_layer & layer, int scratch, const char * host_as_seen, const char * host) const;
    uint64_t bytes() const { return memory.size + seen.size + masks.size + weights.size; }

    const tier_class & of;
    device_class tables = {};
    size_t room = 0;
    std::deque<ggml_tensor> seen_tensors;  // parts of `seen` as ids for the products, by layer
    uint32_t tally_bytes = 0;              // shared memory that counting needs

  private:
    const cuda & gpu;
    device_array memory;
    device_array seen;           // valid ids of one step, `room` for each layer
    device_array weights;        // of the predictor
    device_array masks;          // what a call around the slots touches, a word for each entry
    std::vector<int32_t> loaded;  // slot_of as of the last upload or download: which slots hold what
    template <typename type, typename allocator> void send(const type * to, const std::vector<type, allocator> & from);
    template <typename type, typename allocator> void fetch(std::vector<type, allocator> & to, const type * from);
};

}  // namespace spark
