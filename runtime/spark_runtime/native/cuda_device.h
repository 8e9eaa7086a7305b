// Whether a device is a GPU that can decide and fetch by itself, and what it needs for that.

#pragma once

#include "cuda_driver.h"
#include "tier.h"

namespace spark {

// All of them say why not in `reason`.
bool find_device(ggml_backend_dev_t inner, const cuda_driver *& driver, CUdevice & device, cuda_version & found, std::string & reason);
std::string read_kernels(const tier & tier, std::string & reason);  // empty without
std::string beyond_limits(const tier & tier);                        // empty within

}  // namespace spark
