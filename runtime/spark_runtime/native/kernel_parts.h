// What the kernels of kernels.cu and kernel_early.h share: copies of experts, which of them leaves, and who writes the
// tables when every block has read them.

#pragma once

#include "device_tables.h"

namespace spark {

namespace {

constexpr int THREADS = SPARK_BLOCK_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int SCANNED = 6;  // entries that a thread looks at together for the lowest score

// Programmatic dependent launch: the next kernel may be set up while this one runs, and this one was set up while its
// predecessor ran. No effect when a kernel is launched in the usual way.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// For a thread that waits and should not keep others from the memory it looks at.
__device__ __forceinline__ void nap() {
#if __CUDA_ARCH__ >= 700
    __nanosleep(200);
#endif
}

__device__ __forceinline__ uint64_t * bank_of(const device_class & c) {
    return c.counts + uint64_t(c.control->phase) * c.n_counts;
}

__device__ __forceinline__ void add(uint64_t * counter, uint64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long *>(counter), (unsigned long long) value);
}

__device__ void report_bad_id(const device_class & c, const device_call & call, int32_t id) {
    volatile int32_t * fault = c.fault;  // host memory
    fault[1] = call.block;
    fault[2] = id;
    fault[3] = int32_t(call.n_experts);
    __threadfence_system();
    fault[0] = FAULT_ID;
}

template <typename word> __device__ void copy_words(char * to, const char * from, uint64_t bytes, uint32_t lane, uint32_t lanes) {
    // Eight loads in flight a thread: reads of host memory take microseconds, and their number is what fills the link.
    constexpr int DEPTH = 8;
    const uint64_t n = bytes / sizeof(word);
    const word * source = reinterpret_cast<const word *>(from);
    word * target = reinterpret_cast<word *>(to);
    for (uint64_t i = lane; i < n; i += uint64_t(DEPTH) * lanes) {
        word held[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            if (i + uint64_t(k) * lanes < n) held[k] = source[i + uint64_t(k) * lanes];
        }
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            if (i + uint64_t(k) * lanes < n) target[i + uint64_t(k) * lanes] = held[k];
        }
    }
}

// All `lanes` threads copy together. Expert sizes of some types are no multiple of 16.
__device__ void copy(char * to, const char * from, uint64_t bytes, uint32_t lane, uint32_t lanes) {
    const uint64_t all = uint64_t(to) | uint64_t(from) | bytes;
    if ((all & 15) == 0) {
        copy_words<uint4>(to, from, bytes, lane, lanes);
    } else if ((all & 3) == 0) {
        copy_words<uint32_t>(to, from, bytes, lane, lanes);
    } else if ((all & 1) == 0) {
        copy_words<uint16_t>(to, from, bytes, lane, lanes);
    } else {
        copy_words<uint8_t>(to, from, bytes, lane, lanes);
    }
}

struct candidate {
    uint64_t key;  // selected in this step, score, stamp
    uint32_t entry;
    int32_t slot;
};

__device__ __forceinline__ float decayed(const float * table, uint32_t age) {
    const uint32_t high = age / SPARK_DECAY_STEP;
    return table[age % SPARK_DECAY_STEP] * table[SPARK_DECAY_STEP + (high < SPARK_DECAY_STEP ? high : SPARK_DECAY_STEP - 1)];
}

// slots.cpp: eviction_key. Its operands are in registers: what a layer to come costs is a minimum and a sum.
__device__ __forceinline__ uint64_t eviction_key(bool touched, float score, uint32_t stamp, bool to_come) {
    uint32_t bits = __float_as_uint(score);
    if (to_come) bits += min(bits, SPARK_SCORE_EXPONENT);
    return uint64_t(touched) << 63 | uint64_t(bits) << 32 | stamp;
}

__device__ __forceinline__ bool lower(const candidate & a, const candidate & b) {
    return a.key < b.key || (a.key == b.key && a.entry < b.entry);
}

__device__ candidate lowest(candidate mine, candidate * of_warps) {
    for (int offset = 16; offset > 0; offset /= 2) {
        candidate other;
        other.key = __shfl_down_sync(~0u, mine.key, offset);
        other.entry = __shfl_down_sync(~0u, mine.entry, offset);
        other.slot = __shfl_down_sync(~0u, mine.slot, offset);
        if (lower(other, mine)) mine = other;
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    candidate best = of_warps[0];
    for (int warp = 1; warp < WARPS; warp++) {
        if (lower(of_warps[warp], best)) best = of_warps[warp];
    }
    __syncthreads();
    return best;
}

// The lowest candidate to leave for an expert of the call's layer, but for what `stays` names and what `moves` took before.
template <typename predicate>
__device__ __forceinline__ candidate leaving(const device_class & c, const device_call & call, const layer_state * layers, const float * decay,
                                             const device_move * moves, uint32_t n_moves, uint32_t current, candidate * of_warps, predicate stays) {
    const uint32_t step = c.control->step;
    candidate best{~uint64_t(0), ~uint32_t(0), 0};
    for (uint32_t start = threadIdx.x; start < c.n_entries; start += SCANNED * THREADS) {
        // All loads of several entries first: one after the other they would take longer than the copy of an expert.
        int32_t slots[SCANNED];
        uint32_t owners[SCANNED];
        expert_meta metas[SCANNED];
#pragma unroll
        for (int i = 0; i < SCANNED; i++) {
            const uint32_t entry = start + uint32_t(i) * THREADS;
            const bool there = entry < c.n_entries;
            slots[i] = there ? c.slot_of[entry] : -1;
            owners[i] = there ? c.layer_of[entry] : 0;
            metas[i] = c.meta[there ? entry : 0];
        }
#pragma unroll
        for (int i = 0; i < SCANNED; i++) {
            const uint32_t entry = start + uint32_t(i) * THREADS;
            const expert_meta & meta = metas[i];
            const layer_state & state = layers[owners[i]];
            const bool own = owners[i] == call.layer;
            const bool touched = meta.touched == step;
            if (slots[i] < 0 || isinf(meta.prior) || (!own && state.n_resident <= state.floor)) continue;
            bool taken = stays(entry, own, touched);
            for (uint32_t k = 0; k < n_moves; k++) taken |= moves[k].victim == entry;
            if (taken) continue;
            const uint32_t age = (state.clock + state.top_k - meta.stamp) / state.top_k;
            const float score = meta.prior + meta.score * decayed(decay, age);
            const candidate mine{eviction_key(touched, score, meta.stamp, owners[i] > current), entry, slots[i]};
            if (lower(mine, best)) best = mine;
        }
    }
    return lowest(best, of_warps);
}

// Every block says so when it has read the tables. True for those that copy; the other may write the tables then.
__device__ bool all_have_decided(const device_class & c) {
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&c.control->arrived, 1u);
        if (blockIdx.x == 0) {
            while (*(volatile uint32_t *) &c.control->arrived < gridDim.x) {
            }
            c.control->arrived = 0;
            __threadfence();
        }
    }
    return blockIdx.x != 0;
}

// All blocks but the first copy what `moves` say, and nothing that was fetched early goes over the link meanwhile.
__device__ void copy_moves(const device_class & c, const device_call & call, const device_move * moves, uint32_t n_moves) {
    if (threadIdx.x == 0) atomicAdd(c.urgent, 1u);
    for (uint32_t q = 0; q < n_moves; q++) {
        for (uint32_t k = 0; k < call.n_kinds; k++) {
            const device_kind & kind = call.kinds[k];
            copy(kind.slots + moves[q].slot * kind.bytes, kind.all + moves[q].expert * kind.bytes, kind.bytes, (blockIdx.x - 1) * THREADS + threadIdx.x,
                 (gridDim.x - 1) * THREADS);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) atomicSub(c.urgent, 1u);
}

// By one thread: slots change hands.
__device__ void write_moves(const device_class & c, const device_call & call, const device_move * moves, uint32_t n_moves) {
    for (uint32_t q = 0; q < n_moves; q++) {
        c.slot_of[moves[q].victim] = -1;
        c.slot_of[call.first + moves[q].expert] = int32_t(moves[q].slot);
        if (c.waiting[moves[q].victim]) {
            c.waiting[moves[q].victim] = 0;
            add(bank_of(c) + c.wasted + c.layer_of[moves[q].victim], 1);
        }
    }
}

}  // namespace

}  // namespace spark
