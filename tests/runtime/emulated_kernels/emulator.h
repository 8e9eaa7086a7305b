// Kernels of CUDA C++ on the processor: a block is a thread of the operating system, its threads take turns in it.
//
// A block's threads run one after the other up to the next barrier, so what happens between two barriers happens in one
// order of many; blocks, and kernels on different streams, run truly at once. Enough for kernels whose threads of a block
// meet at barriers and whose blocks meet in memory, as ours do.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <sched.h>
#include <thread>
#include <ucontext.h>
#include <vector>

#define __CUDA_ARCH__ 700  // naps, but no launch that depends on another
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static thread_local

struct uint4 {
    uint32_t x, y, z, w;
};
struct emulated_index {
    uint32_t x, y;
};
inline thread_local emulated_index threadIdx, blockIdx, gridDim;
inline thread_local uint32_t * dynamic_shared;

namespace emulator {

enum class at { READY, WARP, BLOCK, END };

struct fiber {
    ucontext_t context;
    at state = at::READY;
};

constexpr uint32_t WARP_SIZE = 32;
constexpr size_t STACK_BYTES = 1 << 16;

struct block {
    const std::function<void()> * kernel;
    ucontext_t scheduler;
    std::vector<fiber> fibers;
    uint32_t running = 0;
    uint64_t barriers = 0;
    uint32_t sums[2] = {0, 0};  // of what threads said at a barrier, by turns
    std::vector<uint64_t> exchanged[2];
    std::vector<uint64_t> exchanges;  // of each warp
};
inline thread_local block * current;

inline void enter() {
    (*current->kernel)();
    current->fibers[current->running].state = at::END;
    swapcontext(&current->fibers[current->running].context, &current->scheduler);
}

inline void leave(at state) {
    block & b = *current;
    const emulated_index mine = threadIdx;
    fiber & self = b.fibers[b.running];
    self.state = state;
    swapcontext(&self.context, &b.scheduler);
    threadIdx = mine;
}

inline void resume(block & b, uint32_t i) {
    b.running = i;
    threadIdx = {i, 0};
    swapcontext(&b.scheduler, &b.fibers[i].context);
}

inline void run_block(const std::function<void()> & kernel, uint32_t threads, size_t shared_bytes) {
    std::vector<char> stacks(threads * STACK_BYTES);
    std::vector<uint32_t> shared(shared_bytes / sizeof(uint32_t));
    block b;
    b.kernel = &kernel;
    b.fibers.resize(threads);
    b.exchanges.assign(threads / WARP_SIZE, 0);
    for (auto & values : b.exchanged) {
        values.assign(threads, 0);
    }
    current = &b;
    dynamic_shared = shared.data();
    for (uint32_t i = 0; i < threads; i++) {
        getcontext(&b.fibers[i].context);
        b.fibers[i].context.uc_stack.ss_sp = &stacks[i * STACK_BYTES];
        b.fibers[i].context.uc_stack.ss_size = STACK_BYTES;
        b.fibers[i].context.uc_link = nullptr;
        makecontext(&b.fibers[i].context, enter, 0);
    }
    for (bool going = true; going;) {
        for (uint32_t warp = 0; warp < threads; warp += WARP_SIZE) {
            for (bool first = true, again = true; again; first = false) {
                again = false;
                for (uint32_t i = warp; i < warp + WARP_SIZE; i++) {
                    if (b.fibers[i].state == at::WARP || (first && b.fibers[i].state == at::READY)) {
                        resume(b, i);
                    }
                    again |= b.fibers[i].state == at::WARP;
                }
                b.exchanges[warp / WARP_SIZE]++;
            }
        }
        b.barriers++;
        b.sums[b.barriers % 2] = 0;
        going = false;
        for (fiber & each : b.fibers) {
            if (each.state == at::BLOCK) {
                each.state = at::READY;
                going = true;
            }
        }
    }
}

// One launch; it has ended when its threads are joined.
inline std::vector<std::thread> launch(std::function<void()> kernel, uint32_t blocks, uint32_t threads, size_t shared_bytes = 0) {
    std::vector<std::thread> running;
    for (uint32_t i = 0; i < blocks; i++) {
        running.emplace_back([=] {
            blockIdx = {i, 0};
            gridDim = {blocks, 1};
            run_block(kernel, threads, shared_bytes);
        });
    }
    return running;
}

inline void join(std::vector<std::thread> & running) {
    for (std::thread & each : running) {
        each.join();
    }
    running.clear();
}

inline uint32_t sum(uint32_t value) {
    const uint64_t barrier = current->barriers % 2;
    current->sums[barrier] += value;
    leave(at::BLOCK);
    return current->sums[barrier];
}

}  // namespace emulator

inline void __syncthreads() { emulator::leave(emulator::at::BLOCK); }
inline int __syncthreads_or(int value) { return emulator::sum(value != 0) != 0; }
inline int __syncthreads_count(int value) { return int(emulator::sum(value != 0)); }

template <typename type> type __shfl_down_sync(unsigned, type value, int offset) {
    static_assert(sizeof(type) <= sizeof(uint64_t));
    emulator::block & b = *emulator::current;
    const uint32_t warp = threadIdx.x / emulator::WARP_SIZE;
    std::vector<uint64_t> & values = b.exchanged[b.exchanges[warp] % 2];
    std::memcpy(&values[threadIdx.x], &value, sizeof value);
    emulator::leave(emulator::at::WARP);
    const uint32_t from = threadIdx.x + uint32_t(offset);
    if (from / emulator::WARP_SIZE == warp) {
        std::memcpy(&value, &values[from], sizeof value);
    }
    return value;
}

template <typename type> type atomicAdd(type * at, type value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
template <typename type> type atomicSub(type * at, type value) { return __atomic_fetch_sub(at, value, __ATOMIC_RELAXED); }
template <typename type> type atomicExch(type * at, type value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { sched_yield(); }
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
using std::isinf;
template <typename type> type min(type a, type b) { return b < a ? b : a; }
template <typename type> type max(type a, type b) { return a < b ? b : a; }
