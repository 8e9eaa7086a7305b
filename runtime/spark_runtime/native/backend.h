// The proxy devices.

#pragma once

#include "tier.h"

#include <deque>

namespace spark {

struct device {
    ggml_backend_device dev;
    ggml_backend_buffer_type tier_buft;
    ggml_backend_buffer_type cpu_buft = {};  // over the CPU: its buffer type under a name of this device's own
    ggml_backend_buffer_type_t bufts[2];  // the tier's, and the end of the list
    ggml_backend_dev_t inner = nullptr;
    bool on_cpu = false;
    bool tiering = true;             // whether models that are loaded now get tiers
    float default_residency = 0.5f;  // share of experts in slots for models that nobody places
    std::string kernels;  // file with the GPU's kernels
    std::string name, tier_name, cpu_name, description;
    std::vector<tier *> tiers;
    tier * newest = nullptr;
};

std::deque<device> & devices();
void add_device(ggml_backend_dev_t inner);
ggml_backend_reg_t registry();

}  // namespace spark
