// Whole layers in the two scratch layers, for calls that touch more experts than go through slots.

#pragma once

#include "cuda_context.h"
#include "tier.h"

namespace spark {

// How a call reaches its experts: slots, the pool where it holds all of them in order, or a scratch layer.
enum class way { slots, whole, around };
way way_of(const expert_call & call);

// Calls whose layers are fetched before their routers have chosen, in order; none where that does not pay.
std::vector<const expert_call *> fetched_ahead(const std::vector<expert_call> & calls);

class cuda_scratch {
  public:
    explicit cuda_scratch(const cuda & gpu) : gpu(gpu) {}

    // Before a layer's experts come to one of the two: all of them, or `some`.
    void clear(const tier_layer & layer, int scratch, CUstream stream, bool some);

    // Copies the experts that are in no slot, as far as the host knows.
    void copy_missing(const tier_layer & layer, int scratch, CUstream stream) const;

  private:
    const cuda & gpu;
    const tier_layer * filled_by[2] = {};  // whose experts are in each
};

}  // namespace spark
