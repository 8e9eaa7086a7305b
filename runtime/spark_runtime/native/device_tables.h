// What the host and the kernels both know: the tables of one class of layers, and one call's arguments.
// Read by NVRTC too, which has no standard headers.

#pragma once

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
namespace spark {
struct alignas(16) expert_meta {
    float score;
    uint32_t stamp;
    float prior;
    uint32_t touched;
};
struct layer_state {
    uint32_t first, n_experts, top_k, floor, n_resident, clock, n_pinned, first_distance, recency_clock, first_weight;
};
}  // namespace spark
#else
#include "slots.h"
#endif

#ifndef SPARK_BLOCK_THREADS  // smaller where tests run kernels on a processor
#define SPARK_BLOCK_THREADS 256
#define SPARK_CHUNK_BYTES 32768  // of an expert on its way: what one block copies between two looks at the others
#endif
#define SPARK_MAX_SELECTED 256  // selections of one call through the slots; one a thread
#define SPARK_MAX_EXPERTS 1024  // of a layer
#define SPARK_MAX_LAYERS 256    // of a class
#define SPARK_MAX_KINDS 12      // tensors of an expert
#define SPARK_DECAY_STEP 256
#define SPARK_SCORE_EXPONENT (1u << 23)
#define SPARK_DECODE 1          // the phase whose reuse distances are counted
#define SPARK_PREDICTED_ONE (1 << 14)
#define SPARK_PREDICTED_FROM 2
#define SPARK_LEARNING_SHIFT 6
#define SPARK_MAX_EARLY 16      // experts fetched early for one layer

namespace spark {

#ifndef __CUDACC_RTC__
static_assert(SPARK_DECAY_STEP == DECAY_STEP && SPARK_SCORE_EXPONENT == SCORE_EXPONENT && SPARK_DECODE == DECODE);
static_assert(SPARK_PREDICTED_ONE == PREDICTED_ONE && SPARK_PREDICTED_FROM == PREDICTED_FROM && SPARK_LEARNING_SHIFT == LEARNING_SHIFT &&
              SPARK_MAX_EARLY == MAX_EARLY);
#endif

enum device_fault : int32_t { FAULT_NONE = 0, FAULT_ID = 1 };

struct device_control {
    uint32_t step;
    uint32_t phase;
    uint32_t arrived;  // blocks that have read the tables; 0 between kernels
    uint32_t unused;
};

struct device_head {
    uint32_t n_tokens;  // 0: the layer was not computed in this step
    uint32_t n_used;
    uint32_t unused[2];
};

struct device_move {
    uint32_t expert;
    uint32_t slot;
    uint32_t victim;  // entry
};

// Experts on their way to their slots beside the computation (kernel_early.h).
struct device_flight {
    uint32_t n_moves;
    uint32_t layer;  // of the class; all moves are of it
    uint32_t unused[2];
    uint32_t claimed[SPARK_MAX_EARLY];  // chunks of each, in order; more than there are once all are
    uint32_t landed[SPARK_MAX_EARLY];   // chunks that are there, or will never be copied
    device_move moves[SPARK_MAX_EARLY];
};

struct device_class {
    int32_t * slot_of;         // [n_entries]
    expert_meta * meta;        // [n_entries]
    uint32_t * recency;        // [n_entries]
    const uint16_t * layer_of; // [n_entries]
    layer_state * layers;      // [n_layers]
    device_head * heads;       // [n_layers]
    int32_t ** seen;           // [n_layers] valid ids of this step, token by token
    const float * decay;       // low and high part
    uint64_t * counts;         // [PHASES][n_counts], parts as in phase_counts; selections first
    device_control * control;
    device_flight * flight;
    uint32_t * urgent;         // of the GPU: blocks that copy what routers have chosen
    uint32_t * waiting;        // [n_entries]
    int16_t * weights;         // of the predictor, from layer_state::first_weight on; null: nothing is fetched early
    int32_t * fault;           // in host memory: what, block, id, experts
    uint32_t n_layers;
    uint32_t n_entries;
    uint32_t n_counts;
    uint32_t distances;        // where each part of the counts starts
    uint32_t tokens;
    uint32_t cold;
    uint32_t loads;
    uint32_t early;
    uint32_t used;
    uint32_t wasted;
    uint32_t most;             // experts fetched early for one layer
    int32_t threshold;
};

struct device_kind {
    const char * all;  // every expert, in host memory
    char * slots;
    char * scratch;    // one whole layer in expert order
    uint64_t bytes;    // of one expert
};

struct device_call {
    const int32_t * ids;  // [n_tokens][row], n_used of each row
    int32_t * slots;      // [n_tokens][n_used] out
    int32_t * seen;       // [n_tokens][n_used] out: valid ids
    uint32_t * mask;      // [n_experts] or null
    uint32_t n_used;
    uint32_t n_tokens;
    uint32_t row;
    uint32_t layer;       // in its class
    uint32_t first;
    uint32_t n_experts;
    int32_t block;
    uint32_t n_kinds;
    device_kind kinds[SPARK_MAX_KINDS];
};

}  // namespace spark
