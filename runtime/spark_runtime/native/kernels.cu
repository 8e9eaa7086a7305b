// The slot tables of slots.h in device memory, and the copies of experts: what a token needs is decided, fetched and
// counted on the GPU, so that the host waits for nothing and a whole token is one CUDA graph.
//
// Compiled by NVRTC on the user's machine (native/nvrtc.py), without headers and without fused multiply-add, so that
// scores have the bits of the host's. Structures agree with device_tables.h, which cuda_tables.cpp fills.

#include "kernel_early.h"

using namespace spark;

extern "C" {

// Makes the experts that `call.ids` names resident and writes the slots they are in: slot_pool::ensure.
//
// Every block decides for itself, from the same tables and alike. Without a miss, block 0 writes the result and all are
// done. With one, the others copy while block 0 writes the tables, once every block has read them. Of what was fetched
// early, only what is selected is waited for.
__global__ void __launch_bounds__(THREADS) spark_ensure(const device_class c, const device_call call) {
    __shared__ int32_t map[SPARK_MAX_EXPERTS];
    __shared__ int32_t selected[SPARK_MAX_SELECTED];
    __shared__ uint8_t needed[SPARK_MAX_SELECTED];
    __shared__ layer_state layers[SPARK_MAX_LAYERS];
    __shared__ float decay[2 * SPARK_DECAY_STEP];
    __shared__ device_move moves[SPARK_MAX_SELECTED];
    __shared__ candidate of_warps[WARPS];
    const uint32_t tid = threadIdx.x;
    const uint32_t n = call.n_used * call.n_tokens;

    wait_for_predecessor();
    let_successor_start();
    const uint32_t step = c.control->step;
    const uint32_t n_flying = flying(c, call);
    const int32_t id = tid < n ? call.ids[(tid / call.n_used) * call.row + tid % call.n_used] : 0;
    for (uint32_t i = tid; i < call.n_experts; i += THREADS) map[i] = c.slot_of[call.first + i];
    const bool bad = uint32_t(id) >= call.n_experts;
    const int32_t expert = bad ? 0 : id;  // something harmless: the host stops after this step
    __syncthreads();
    const bool miss = tid < n && map[expert] < 0;
    const bool any = __syncthreads_or(miss);
    if (bad && blockIdx.x == 0) report_bad_id(c, call, id);
    if (!any) {
        if (blockIdx.x == 0) {
            if (tid < n) {
                call.slots[tid] = map[expert];
                call.seen[tid] = expert;
                c.meta[call.first + expert].touched = step;
            }
            if (tid == 0) c.heads[call.layer] = device_head{call.n_tokens, call.n_used, {0, 0}};
        }
        land(c, call, n_flying, tid < n, expert);
        return;
    }

    if (tid < n) selected[tid] = expert;
    for (uint32_t i = tid; i < 2 * SPARK_DECAY_STEP; i += THREADS) decay[i] = c.decay[i];
    for (uint32_t i = tid; i < c.n_layers; i += THREADS) layers[i] = c.layers[i];
    __syncthreads();
    bool first = miss;
    for (uint32_t j = 0; first && j < tid; j++) first = selected[j] != expert;
    if (tid < n) needed[tid] = first;
    __syncthreads();
    uint32_t n_moves = 0;
    uint32_t rank = 0;
    for (uint32_t j = 0; j < n; j++) {
        rank += j < tid && needed[j];
        n_moves += needed[j];
    }
    if (first) moves[rank].expert = uint32_t(expert);
    for (uint32_t q = 0; q < n_moves; q++) {
        const candidate best = leaving(c, call, layers, decay, moves, q, call.layer, of_warps, [&](uint32_t entry, bool own, bool touched) {
            bool stays = own && touched;
            for (uint32_t k = 0; own && k < n; k++) stays |= selected[k] == int32_t(entry - call.first);
            return stays;
        });
        if (tid == 0) {
            moves[q].victim = best.entry;
            moves[q].slot = uint32_t(best.slot);
            layers[c.layer_of[best.entry]].n_resident--;
            layers[call.layer].n_resident++;
        }
        __syncthreads();
    }
    if (all_have_decided(c)) {
        for (uint32_t q = 0; tid == 0 && q < n_flying; q++) {
            for (uint32_t taken = 0; taken < n_moves; taken++) {
                if (moves[taken].victim == call.first + c.flight->moves[q].expert) end_flight(*c.flight, q, chunks_of(call));
            }
        }
        __syncthreads();
        copy_moves(c, call, moves, n_moves);
        land(c, call, n_flying, tid < n, expert);
        return;
    }
    if (tid == 0) {
        write_moves(c, call, moves, n_moves);
        for (uint32_t q = 0; q < n_moves; q++) map[moves[q].expert] = int32_t(moves[q].slot);
    }
    __syncthreads();
    for (uint32_t i = tid; i < c.n_layers; i += THREADS) c.layers[i].n_resident = layers[i].n_resident;
    const uint32_t cold = uint32_t(__syncthreads_count(miss));
    if (tid < n) {
        call.slots[tid] = map[expert];
        call.seen[tid] = expert;
        c.meta[call.first + expert].touched = step;
    }
    if (tid == 0) {
        c.heads[call.layer] = device_head{call.n_tokens, call.n_used, {0, 0}};
        uint64_t * bank = bank_of(c);
        add(bank + c.cold + call.layer, cold);
        add(bank + c.loads + call.layer, n_moves);
    }
}

// The ids of a call that goes around the slots: a valid copy for the multiplication, what it touches, and what of that
// is in no slot: slot_pool::pass.
__global__ void __launch_bounds__(THREADS) spark_mark(const device_class c, const device_call call) {
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    const uint32_t n = call.n_used * call.n_tokens;
    wait_for_predecessor();
    let_successor_start();
    bool cold = false, load = false;
    if (i < n) {
        const int32_t id = call.ids[uint64_t(i / call.n_used) * call.row + i % call.n_used];
        const bool bad = uint32_t(id) >= call.n_experts;
        if (bad) report_bad_id(c, call, id);
        const int32_t expert = bad ? 0 : id;
        call.seen[i] = expert;
        if (call.mask) {
            cold = c.slot_of[call.first + expert] < 0;
            load = atomicExch(&call.mask[expert], 1u) == 0 && cold;
        }
    }
    if (i == 0) c.heads[call.layer] = device_head{call.n_tokens, call.n_used, {0, 0}};
    const uint32_t n_cold = uint32_t(__syncthreads_count(cold));
    const uint32_t n_loads = uint32_t(__syncthreads_count(load));
    if (threadIdx.x == 0 && n_cold) {
        uint64_t * bank = bank_of(c);
        add(bank + c.cold + call.layer, n_cold);
        add(bank + c.loads + call.layer, n_loads);
    }
}

// Brings a layer's experts together in their order: block x is an expert, from its slot or from host memory. With a mask
// only what it names, and the mask is cleared; without one only what is in slots, because the rest comes by other means.
__global__ void __launch_bounds__(THREADS) spark_gather(const device_class c, const device_call call) {
    const uint32_t expert = blockIdx.x;
    const int32_t slot = c.slot_of[call.first + expert];
    if (call.mask ? !call.mask[expert] : slot < 0) return;
    for (uint32_t k = 0; k < call.n_kinds; k++) {
        const device_kind & kind = call.kinds[k];
        const char * from = slot >= 0 ? kind.slots + uint64_t(slot) * kind.bytes : kind.all + expert * kind.bytes;
        copy(kind.scratch + expert * kind.bytes, from, kind.bytes, blockIdx.y * THREADS + threadIdx.x, gridDim.y * THREADS);
    }
}

// What one step selected, block x a layer: slot_pool::observe.
__global__ void __launch_bounds__(THREADS) spark_tally(const device_class c) {
    extern __shared__ uint32_t stamps[];
    wait_for_predecessor();
    const layer_state state = c.layers[blockIdx.x];
    uint32_t * recency = stamps + state.n_experts;
    float * scores = reinterpret_cast<float *>(recency + state.n_experts);
    const device_head head = c.heads[blockIdx.x];
    const uint32_t tid = threadIdx.x;
    if (blockIdx.x == 0 && tid == 0) c.control->step++;
    if (head.n_tokens == 0) return;
    const int32_t * seen = c.seen[blockIdx.x];
    uint64_t * bank = bank_of(c);
    expert_meta * meta = c.meta + state.first;
    const bool decoding = c.control->phase == SPARK_DECODE;
    uint32_t clock = state.clock;
    uint32_t recency_clock = state.recency_clock;
    for (uint32_t i = tid; i < state.n_experts; i += THREADS) {
        stamps[i] = meta[i].stamp;
        recency[i] = c.recency[state.first + i];
        scores[i] = meta[i].score;
    }
    __syncthreads();
    for (uint32_t token = 0; token < head.n_tokens; token++, seen += head.n_used) {
        for (uint32_t i = tid / 32; i < head.n_used; i += WARPS) {
            const uint32_t expert = uint32_t(seen[i]);
            uint32_t newer = 0;
            if (decoding) {
                const uint32_t last = recency[expert];
                for (uint32_t other = tid % 32; other < state.n_experts; other += 32) newer += recency[other] > last;
                for (int offset = 16; offset > 0; offset /= 2) newer += __shfl_down_sync(~0u, newer, offset);
                if (!last) newer = state.n_experts;
            }
            if (tid % 32 == 0) {
                if (c.waiting[state.first + expert] && atomicExch(&c.waiting[state.first + expert], 0u)) add(bank + c.used + blockIdx.x, 1);
                if (decoding) add(bank + c.distances + state.first_distance + newer, 1);
                add(bank + state.first + expert, 1);
            }
        }
        __syncthreads();
        const uint32_t now = clock + head.n_used;
        for (uint32_t i = tid; i < head.n_used; i += THREADS) {
            const uint32_t expert = uint32_t(seen[i]);
            const uint32_t age = (now - stamps[expert]) / state.top_k;
            scores[expert] = scores[expert] * decayed(c.decay, age) + 1.0f;
            stamps[expert] = now - i;
            if (decoding) recency[expert] = recency_clock + head.n_used - i;
        }
        clock = now;
        recency_clock += decoding ? head.n_used : 0;
        __syncthreads();
    }
    for (uint32_t i = tid; i < state.n_experts; i += THREADS) {
        // Touched in this step: newer than the clock was at its start.
        if (stamps[i] > state.clock) {
            meta[i].stamp = stamps[i];
            meta[i].score = scores[i];
            c.recency[state.first + i] = recency[i];
        }
    }
    if (tid == 0) {
        c.layers[blockIdx.x].clock = clock;
        c.layers[blockIdx.x].recency_clock = recency_clock;
        c.heads[blockIdx.x].n_tokens = 0;
        add(bank + c.tokens + blockIdx.x, head.n_tokens);
    }
}

}  // extern "C"
