// The slot tables of slots.h in device memory, and the copies of experts: what a token needs is decided, fetched and
// counted on the GPU, so that the host waits for nothing and a whole token is one CUDA graph.
//
// Compiled by NVRTC on the user's machine (native/nvrtc.py), without headers and without fused multiply-add, so that
// scores have the bits of the host's. Structures agree with device_tables.h, which cuda_tables.cpp fills.

#include "device_tables.h"

using namespace spark;

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
    } else {
        copy_words<uint16_t>(to, from, bytes & ~uint64_t(1), lane, lanes);
        if ((bytes & 1) && lane == 0) to[bytes - 1] = from[bytes - 1];
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

// All blocks but the first copy what `moves` say.
__device__ void copy_moves(const device_call & call, const device_move * moves, uint32_t n_moves) {
    for (uint32_t q = 0; q < n_moves; q++) {
        for (uint32_t k = 0; k < call.n_kinds; k++) {
            const device_kind & kind = call.kinds[k];
            copy(kind.slots + moves[q].slot * kind.bytes, kind.all + moves[q].expert * kind.bytes, kind.bytes, (blockIdx.x - 1) * THREADS + threadIdx.x,
                 (gridDim.x - 1) * THREADS);
        }
    }
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

// Makes the experts that `call.ids` names resident and writes the slots they are in: slot_pool::ensure.
//
// Every block decides for itself, from the same tables and alike. Without a miss, block 0 writes the result and all are
// done. With one, the others copy while block 0 writes the tables, once every block has read them.
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
        copy_moves(call, moves, n_moves);
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

// Fetches experts of the call's layer early, by what the layers before selected: slot_pool::fetch_early. Decided and
// copied as in spark_ensure.
__global__ void __launch_bounds__(THREADS) spark_fetch_early(const device_class c, const device_call call) {
    __shared__ int32_t guesses[SPARK_MAX_EXPERTS];
    __shared__ int32_t map[SPARK_MAX_EXPERTS];
    __shared__ layer_state layers[SPARK_MAX_LAYERS];
    __shared__ float decay[2 * SPARK_DECAY_STEP];
    __shared__ device_move moves[SPARK_MAX_EARLY];
    __shared__ candidate of_warps[WARPS];
    const uint32_t tid = threadIdx.x;
    wait_for_predecessor();
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
    if (all_have_decided(c)) {
        copy_moves(call, moves, n_moves);
        return;
    }
    if (tid == 0) {
        write_moves(c, call, moves, n_moves);
        for (uint32_t q = 0; q < n_moves; q++) c.waiting[call.first + moves[q].expert] = 1;
        add(bank_of(c) + c.early + call.layer, n_moves);
    }
    __syncthreads();  // the others have read the tables
    for (uint32_t i = tid; i < c.n_layers; i += THREADS) c.layers[i].n_resident = layers[i].n_resident;
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
