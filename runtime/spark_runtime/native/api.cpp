// What Python and llama-server call.

#include "backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>

using namespace spark;

namespace {

thread_local std::string last_error;

// Runs what may fail; 0, or 1 with spark_last_error set. No exception travels through C.
template <typename action> int guarded(action && run) {
    try {
        run();
        return 0;
    } catch (const tier_error & error) {
        last_error = error.text;
    } catch (const std::bad_alloc &) {
        last_error = "no memory";
    } catch (const std::exception & error) {
        last_error = error.what();
    }
    return 1;
}

// The registry is in libggml, which is loaded beside this library but not among what it is linked with.
template <typename function> function * registry_function(const char * name) {
    return reinterpret_cast<function *>(dlsym(RTLD_DEFAULT, name));
}

// A proxy for each GPU, or `cpu_devices` over the CPU where there is none.
void make_devices(size_t cpu_devices) {
    static std::mutex once;
    const std::lock_guard<std::mutex> lock(once);
    if (!devices().empty()) {
        return;
    }
    auto * count = registry_function<size_t()>("ggml_backend_dev_count");
    auto * get = registry_function<ggml_backend_dev_t(size_t)>("ggml_backend_dev_get");
    if (count == nullptr || get == nullptr) {
        throw tier_error{"the library of ggml's devices is not loaded"};
    }
    ggml_backend_dev_t cpu = nullptr;
    std::vector<ggml_backend_dev_t> gpus;
    for (size_t i = 0; i < count(); i++) {
        ggml_backend_dev_t dev = get(i);
        ggml_backend_dev_props props;
        ggml_backend_dev_get_props(dev, &props);
        if (props.type == GGML_BACKEND_DEVICE_TYPE_GPU) {
            gpus.push_back(dev);
        } else if (props.type == GGML_BACKEND_DEVICE_TYPE_CPU) {
            cpu = dev;
        }
    }
    if (gpus.empty() && cpu == nullptr) {
        throw tier_error{"ggml has no device yet: load its backends before this library"};
    }
    const int version = (gpus.empty() ? cpu : gpus.front())->reg->api_version;
    if (version != GGML_BACKEND_API_VERSION) {
        throw tier_error{"ggml's backend interface is version " + std::to_string(version) + ", expected " +
                         std::to_string(GGML_BACKEND_API_VERSION)};
    }
    if (gpus.empty()) {
        gpus.assign(cpu_devices, cpu);
    }
    for (ggml_backend_dev_t gpu : gpus) {
        add_device(gpu);
    }
}

}  // namespace

extern "C" {

SPARK_EXPORT const char * spark_last_error(void) { return last_error.c_str(); }

// Makes the proxy devices once; how many there are, or -1.
SPARK_EXPORT int spark_devices(int cpu_devices) {
    return guarded([&] { make_devices(size_t(std::max(1, cpu_devices))); }) ? -1 : int(devices().size());
}

SPARK_EXPORT ggml_backend_dev_t spark_device(int index) { return &devices()[size_t(index)].dev; }

// Whether experts of models loaded from now on go to tiers.
SPARK_EXPORT void spark_device_set_tiering(int index, bool tiering) { devices()[size_t(index)].tiering = tiering; }

// What a device's GPU and driver are; 1, with spark_last_error saying why, if it is none that decides by itself.
SPARK_EXPORT int spark_device_cuda(int index, cuda_version * found) {
    return guarded([&] {
        std::string reason;
        if (!find_cuda(devices()[size_t(index)].inner, *found, reason)) {
            throw tier_error{reason};
        }
    });
}

// The file with the kernels for a device's GPU, for models loaded from now on.
SPARK_EXPORT void spark_device_set_kernels(int index, const char * path) { devices()[size_t(index)].kernels = path; }

// The tier of the model loaded last, or null if none of its experts came to this device. Asked for once a load.
SPARK_EXPORT tier * spark_device_take_tier(int index) {
    device & dev = devices()[size_t(index)];
    tier * newest = dev.newest;
    dev.newest = nullptr;
    return newest;
}

SPARK_EXPORT int spark_tier_place(tier * self, const start_layer * layers, size_t n_layers, float decay) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        self->place(std::vector<start_layer>(layers, layers + n_layers), decay);
        self->planned = true;
    });
}

// Blocks with experts on this device, in order; how many there are.
SPARK_EXPORT size_t spark_tier_blocks(tier * self, int32_t * blocks, size_t room) {
    std::vector<int32_t> found;
    for (const auto & [block, layer] : self->layers) {
        found.push_back(block);
    }
    std::sort(found.begin(), found.end());
    std::copy_n(found.begin(), std::min(room, found.size()), blocks);
    return found.size();
}

SPARK_EXPORT void spark_tier_memory(tier * self, tier_memory * memory) {
    const std::lock_guard<std::mutex> lock(self->mutex);
    *memory = self->memory();
}

SPARK_EXPORT const char * spark_tier_engine(tier * self) { return self->runs ? self->runs->name() : "none"; }

SPARK_EXPORT int spark_tier_set_phase(tier * self, int phase) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        self->phase = phase;
        if (self->runs) {
            self->runs->set_phase(phase);
        }
    });
}

// Brings what the following functions give up to date.
SPARK_EXPORT int spark_tier_read(tier * self) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        if (self->runs) {
            self->runs->read();
        }
    });
}

// How experts are fetched early from the next step on; `most` 0: not at all, and what was learned is forgotten.
SPARK_EXPORT int spark_tier_set_early(tier * self, uint32_t most, int32_t threshold, bool learning) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        self->set_early({most, threshold, learning});
    });
}

// Brings the weights of guesses up to date, or lets the device go on with those that the next function has put in.
SPARK_EXPORT int spark_tier_sync_guesses(tier * self, bool write) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        if (self->runs) {
            self->runs->sync_guesses(write);
        }
    });
}

// A block's weights, as they are after spark_tier_sync_guesses: about[0] rows of about[1] numbers, of the blocks about[2]
// and about[3] (-1: none) and of none. They go out and come in unless null. Without guesses there are no rows.
SPARK_EXPORT int spark_tier_guesses(tier * self, int32_t block, int32_t * about, int16_t * out, const int16_t * in) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        const auto found = self->layers.find(block);
        if (found == self->layers.end() || found->second->of == nullptr) {
            throw tier_error{"block " + std::to_string(block) + " is not placed"};
        }
        const tier_layer & layer = *found->second;
        about[0] = int32_t(layer.of->pool.exchange_weights(layer.index, out, in));
        about[1] = int32_t(layer.n_experts);
        for (uint32_t back = 1; back <= PREDICTED_FROM; back++) {
            about[1 + back] = back <= layer.index ? layer.of->layers[layer.index - back]->block : -1;
        }
    });
}

// Counts of one block and phase: selections[n_experts], distances[n_experts + 1], then tokens, cold hits, loads, those
// fetched early, and of these the used and the wasted ones.
SPARK_EXPORT int spark_tier_counts(tier * self, int32_t block, int phase, uint64_t * out) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        const auto found = self->layers.find(block);
        if (found == self->layers.end() || found->second->of == nullptr) {
            throw tier_error{"block " + std::to_string(block) + " is not placed"};
        }
        const tier_layer & layer = *found->second;
        const phase_counts & bank = layer.of->pool.counts[phase];
        const layer_state & state = layer.of->pool.layers[layer.index];
        out = std::copy_n(bank.selections.begin() + state.first, state.n_experts, out);
        out = std::copy_n(bank.distances.begin() + state.first_distance, state.n_experts + 1, out);
        for (const auto * part : {&bank.tokens, &bank.cold, &bank.loads, &bank.early, &bank.used, &bank.wasted}) {
            *out++ = (*part)[layer.index];
        }
    });
}

// Slot of every expert of a block, -1 for those that have none.
SPARK_EXPORT int spark_tier_slots(tier * self, int32_t block, int32_t * slots) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        const auto found = self->layers.find(block);
        if (found == self->layers.end() || found->second->of == nullptr) {
            throw tier_error{"block " + std::to_string(block) + " is not placed"};
        }
        const slot_pool & pool = found->second->of->pool;
        const layer_state & state = pool.layers[found->second->index];
        std::copy_n(pool.slot_of.begin() + state.first, state.n_experts, slots);
    });
}

// The recency of the counted session, per expert of a block; only between spark_tier_read and spark_tier_write_recency.
SPARK_EXPORT int spark_tier_recency(tier * self, int32_t block, uint32_t * out, const uint32_t * in) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        const auto found = self->layers.find(block);
        if (found == self->layers.end() || found->second->of == nullptr) {
            throw tier_error{"block " + std::to_string(block) + " is not placed"};
        }
        slot_pool & pool = found->second->of->pool;
        layer_state & state = pool.layers[found->second->index];
        if (out != nullptr) {
            std::copy_n(pool.recency.begin() + state.first, state.n_experts, out);
        }
        if (in != nullptr) {
            std::copy_n(in, state.n_experts, pool.recency.begin() + state.first);
            state.recency_clock = *std::max_element(in, in + state.n_experts);
        }
    });
}

SPARK_EXPORT int spark_tier_write_recency(tier * self) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        if (self->runs) {
            self->runs->write_recency();
        }
    });
}

SPARK_EXPORT int spark_tier_reset_counts(tier * self) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(self->mutex);
        if (self->runs) {
            self->runs->reset_counts();
        }
    });
}

// Why the last step failed, once; the length of the text, 0 if it did not fail.
SPARK_EXPORT size_t spark_tier_take_fault(tier * self, char * text, size_t room) {
    const std::lock_guard<std::mutex> lock(self->mutex);
    std::string fault = std::move(self->fault);
    self->fault.clear();
    if (fault.empty() && self->runs) {
        fault = self->runs->take_fault();
    }
    if (room > 0) {
        const size_t length = std::min(room - 1, fault.size());
        std::memcpy(text, fault.data(), length);
        text[length] = '\0';
    }
    return fault.size();
}

// Entry of a library that GGML_BACKEND_PATH names: llama-server and every other program on ggml.
SPARK_EXPORT ggml_backend_reg_t ggml_backend_init(void) {
    const int made = guarded([] { make_devices(1); });
    if (made != 0) {
        ggml_log_internal(GGML_LOG_LEVEL_ERROR, "spark: %s\n", last_error.c_str());
        return nullptr;
    }
    if (const char * share = std::getenv("SPARKMOE_RESIDENCY")) {
        char * end = nullptr;
        const float value = std::strtof(share, &end);
        if (end == share || *end != '\0' || !(value > 0 && value <= 1)) {
            ggml_log_internal(GGML_LOG_LEVEL_ERROR, "spark: SPARKMOE_RESIDENCY is '%s', expected a share of 1 above 0\n", share);
            return nullptr;
        }
        for (device & dev : devices()) {
            dev.default_residency = value;
        }
    }
    return registry();
}

}  // extern "C"
