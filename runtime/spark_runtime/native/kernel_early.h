// What is fetched early: guesses, who decides by them, and the copies beside the layers' computation.
//
// A copy goes in chunks, and whoever claims a chunk copies it, so that nobody ever waits for a kernel that may not have
// started: spark_copy_early claims one after the other, and holds still while what a router has chosen is copied;
// spark_ensure takes over what is left of an expert that was chosen, ends the copy of one whose slot it needs, and lets
// all others go on beside the computation.

#pragma once

#include "kernel_parts.h"

namespace spark {

namespace {

__device__ uint32_t chunks_of(uint64_t bytes) { return uint32_t((bytes + SPARK_CHUNK_BYTES - 1) / SPARK_CHUNK_BYTES); }

__device__ uint32_t chunks_of(const device_call & call) {
    uint32_t n = 0;
    for (uint32_t k = 0; k < call.n_kinds; k++) n += chunks_of(call.kinds[k].bytes);
    return n;
}

// By one block.
__device__ void copy_chunk(const device_call & call, const device_move & move, uint32_t chunk) {
    for (uint32_t k = 0; k < call.n_kinds; k++) {
        const device_kind & kind = call.kinds[k];
        const uint32_t n = chunks_of(kind.bytes);
        if (chunk < n) {
            const uint64_t start = uint64_t(chunk) * SPARK_CHUNK_BYTES;
            const uint64_t bytes = min(uint64_t(SPARK_CHUNK_BYTES), kind.bytes - start);
            copy(kind.slots + move.slot * kind.bytes + start, kind.all + move.expert * kind.bytes + start, bytes, threadIdx.x, THREADS);
            return;
        }
        chunk -= n;
    }
}

// Copies chunks of the flight's `q`th expert until all are claimed; gives way to what is urgent, unless it is that itself.
__device__ void carry(const device_class & c, const device_call & call, uint32_t q, bool gives_way) {
    __shared__ uint32_t claimed;
    device_flight & flight = *c.flight;
    const device_move move = flight.moves[q];
    const uint32_t n = chunks_of(call);
    for (;;) {
        if (threadIdx.x == 0) {
            while (gives_way && *(volatile uint32_t *) c.urgent > 0) {
                nap();
            }
            claimed = atomicAdd(&flight.claimed[q], 1u);
        }
        __syncthreads();
        const uint32_t chunk = claimed;
        if (chunk >= n) break;
        copy_chunk(call, move, chunk);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(&flight.landed[q], 1u);
    }
    __syncthreads();  // before `claimed` changes again
}

// By one thread, after all chunks were claimed. Those that are not there yet are being copied at this moment.
__device__ void await_landing(device_flight & flight, uint32_t q, uint32_t n_chunks) {
    while (*(volatile uint32_t *) &flight.landed[q] < n_chunks) {
    }
    __threadfence();
}

// By one thread: nothing is copied any more to the slot of the flight's `q`th expert.
__device__ void end_flight(device_flight & flight, uint32_t q, uint32_t n_chunks) {
    const uint32_t claimed = atomicAdd(&flight.claimed[q], n_chunks);
    if (claimed < n_chunks) atomicAdd(&flight.landed[q], n_chunks - claimed);
    await_landing(flight, q, n_chunks);
}

// How many experts of the call's layer may be on their way.
__device__ __forceinline__ uint32_t flying(const device_class & c, const device_call & call) {
    return c.weights != nullptr && c.flight->layer == call.layer ? c.flight->n_moves : 0;
}

// All blocks: what is on its way and in `selected` is there when they have done this.
__device__ void land(const device_class & c, const device_call & call, uint32_t n_flying, bool of_mine, int32_t expert) {
    for (uint32_t q = 0; q < n_flying; q++) {
        if (!__syncthreads_or(of_mine && uint32_t(expert) == c.flight->moves[q].expert)) continue;
        carry(c, call, q, false);
        if (threadIdx.x == 0) await_landing(*c.flight, q, chunks_of(call));
    }
}

// predictor::each_row, of one column.
template <typename action> __device__ __forceinline__ void each_row(const device_class & c, uint32_t layer, uint32_t column, action act) {
    const uint32_t width = c.layers[layer].n_experts;
    int16_t * row = c.weights + c.layers[layer].first_weight + column;
    for (uint32_t back = 1; back <= SPARK_PREDICTED_FROM && back <= layer; back++) {
        const device_head head = c.heads[layer - back];
        const int32_t * seen = c.seen[layer - back];
        const uint32_t n = head.n_tokens == 1 ? head.n_used : 0;
        for (uint32_t i = 0; i < n; i++) act(row + uint64_t(seen[i]) * width);
        row += uint64_t(c.layers[layer - back].n_experts) * width;
    }
    act(row);
}

__device__ int32_t guess(const device_class & c, uint32_t layer, uint32_t expert) {
    int32_t score = 0;
    each_row(c, layer, expert, [&](const int16_t * weight) { score += *weight; });
    return score;
}

}  // namespace

extern "C" {

// Decides what of the call's layer is fetched early, by what the layers before selected: slot_pool::fetch_early. One
// block, beside the computation of the layer before, when the flight before has landed.
__global__ void __launch_bounds__(THREADS) spark_choose_early(const device_class c, const device_call call) {
    __shared__ int32_t guesses[SPARK_MAX_EXPERTS];
    __shared__ int32_t map[SPARK_MAX_EXPERTS];
    __shared__ layer_state layers[SPARK_MAX_LAYERS];
    __shared__ float decay[2 * SPARK_DECAY_STEP];
    __shared__ device_move moves[SPARK_MAX_EARLY];
    __shared__ candidate of_warps[WARPS];
    const uint32_t tid = threadIdx.x;
    wait_for_predecessor();
    if (tid == 0) {
        c.flight->n_moves = 0;
        c.flight->layer = call.layer;
    }
    if (c.heads[call.layer - 1].n_tokens != 1) return;
    bool any = false;
    for (uint32_t i = tid; i < call.n_experts; i += THREADS) {
        guesses[i] = guess(c, call.layer, i);
        map[i] = c.slot_of[call.first + i];
        any |= map[i] < 0 && guesses[i] >= c.threshold;
    }
    if (!__syncthreads_or(any)) return;
    for (uint32_t i = tid; i < 2 * SPARK_DECAY_STEP; i += THREADS) decay[i] = c.decay[i];
    for (uint32_t i = tid; i < c.n_layers; i += THREADS) layers[i] = c.layers[i];
    __syncthreads();
    uint32_t n_moves = 0;
    while (n_moves < c.most) {
        candidate wanted{~uint64_t(0), ~uint32_t(0), 0};
        for (uint32_t i = tid; i < call.n_experts; i += THREADS) {
            // The highest guess has the lowest key.
            const candidate mine{uint64_t(~(uint32_t(guesses[i]) ^ 0x80000000u)), i, 0};
            if (map[i] < 0 && guesses[i] >= c.threshold && lower(mine, wanted)) wanted = mine;
        }
        wanted = lowest(wanted, of_warps);
        if (wanted.entry == ~0u) break;
        const candidate best = leaving(c, call, layers, decay, moves, n_moves, call.layer - 1, of_warps, [&](uint32_t entry, bool own, bool touched) {
            return touched || (own && guesses[entry - call.first] >= c.threshold);
        });
        if (best.entry == ~0u) break;
        if (tid == 0) {
            moves[n_moves] = {wanted.entry, uint32_t(best.slot), best.entry};
            map[wanted.entry] = best.slot;
            layers[c.layer_of[best.entry]].n_resident--;
            layers[call.layer].n_resident++;
        }
        n_moves++;
        __syncthreads();
    }
    if (n_moves == 0) return;
    for (uint32_t i = tid; i < c.n_layers; i += THREADS) c.layers[i].n_resident = layers[i].n_resident;
    if (tid < n_moves) {
        c.flight->moves[tid] = moves[tid];
        c.flight->claimed[tid] = c.flight->landed[tid] = 0;
    }
    if (tid == 0) {
        write_moves(c, call, moves, n_moves);
        for (uint32_t q = 0; q < n_moves; q++) c.waiting[call.first + moves[q].expert] = 1;
        add(bank_of(c) + c.early + call.layer, n_moves);
        c.flight->n_moves = n_moves;
    }
}

// Copies what spark_choose_early chose, best guess first.
__global__ void __launch_bounds__(THREADS) spark_copy_early(const device_class c, const device_call call) {
    wait_for_predecessor();
    const uint32_t n = c.flight->n_moves;
    for (uint32_t q = 0; q < n; q++) carry(c, call, q, true);
}

// What one step's single token teaches, block x a layer: slot_pool::learn. Before spark_tally.
__global__ void __launch_bounds__(THREADS) spark_learn(const device_class c) {
    const uint32_t layer = blockIdx.x;
    if (layer == 0 || c.heads[layer].n_tokens != 1 || c.heads[layer - 1].n_tokens != 1) return;
    const layer_state state = c.layers[layer];
    const int32_t * seen = c.seen[layer];
    const uint32_t n = c.heads[layer].n_used;
    uint32_t shift = SPARK_LEARNING_SHIFT;
    while ((1u << shift) < 2 * (SPARK_PREDICTED_FROM * state.top_k + 1)) shift++;
    for (uint32_t expert = threadIdx.x; expert < state.n_experts; expert += THREADS) {
        const int32_t score = guess(c, layer, expert);
        bool selected = false;
        for (uint32_t i = 0; i < n; i++) selected |= seen[i] == int32_t(expert);
        const int32_t error = selected ? max(SPARK_PREDICTED_ONE - score, 0) : min(-score, 0);
        const int32_t step = (error + (1 << (shift - 1))) >> shift;
        each_row(c, layer, expert, [&](int16_t * weight) { *weight = int16_t(min(max(*weight + step, -32768), 32767)); });
    }
}

}  // extern "C"

}  // namespace spark
