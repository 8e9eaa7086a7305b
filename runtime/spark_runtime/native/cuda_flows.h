// The streams beside the wrapped backend's own, and the events that tie them to it.

#pragma once

#include "cuda_early.h"

namespace spark {

struct flows {
    flows(const cuda & gpu, ggml_backend_dev_t dev)
        : decide(gpu), copies(gpu), gathers(gpu), early(gpu, dev), inner_done(gpu, dev), decided(gpu, dev), used{{gpu, dev}, {gpu, dev}},
          copied{{gpu, dev}, {gpu, dev}}, gathered{{gpu, dev}, {gpu, dev}} {}
    stream decide, copies, gathers;
    cuda_early early;
    event inner_done, decided;
    event used[2], copied[2], gathered[2];  // of the two scratch layers
};

}  // namespace spark
