// ggml's interfaces of a proxy: a device that wraps a real one, its backend, and the buffer type that holds experts.
//
// The wrapped backend computes everything with its own kernels. The proxy only changes which tensors the products with
// experts read (tier.h), so results have the same bits as with every expert on the device.

#include "backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <system_error>
#include <thread>

namespace spark {

namespace {

constexpr size_t HUGE_PAGE = size_t(2) << 20;
constexpr size_t COPY_PART = size_t(16) << 20;  // bytes that one thread copies at a time while a model loads

device & of(ggml_backend_dev_t dev) { return *static_cast<device *>(dev->context); }
tier & of(ggml_backend_buffer_t buffer) { return *static_cast<tier *>(buffer->context); }

struct context {
    ggml_backend_t inner;
    uint64_t last_uid = 0;  // the graph computed last, and its tier
    tier * last_tier = nullptr;
};

// Of the devices' lists of tiers: models come and go in any thread. Taken before a tier's own.
std::mutex tiers_mutex;

ggml_backend_t inner_of(ggml_backend_t backend) { return static_cast<context *>(backend->context)->inner; }

void log_fault(const std::string & text) { ggml_log_internal(GGML_LOG_LEVEL_ERROR, "spark: %s\n", text.c_str()); }

// ---- buffer: every expert of a model, in host memory

void buffer_free(ggml_backend_buffer_t buffer) {
    tier * gone = &of(buffer);
    const std::lock_guard<std::mutex> lock(tiers_mutex);
    for (device & dev : devices()) {
        if (dev.newest == gone) {
            dev.newest = nullptr;
        }
        dev.tiers.erase(std::remove(dev.tiers.begin(), dev.tiers.end(), gone), dev.tiers.end());
    }
    char * host = gone->host;
    delete gone;
    std::free(host);
}

void * buffer_get_base(ggml_backend_buffer_t buffer) { return of(buffer).host; }

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    try {
        if (of(buffer).add(tensor)) {
            return GGML_STATUS_SUCCESS;
        }
        log_fault(std::string("tensor '") + tensor->name + "' is none of a layer's experts and cannot be in a tier: " +
                  "adapters of experts work only for experts outside tiers");
        return GGML_STATUS_FAILED;
    } catch (const std::bad_alloc &) {
        return GGML_STATUS_ALLOC_FAILED;
    }
}

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
}

// Loading is a copy from the page cache, faster on several cores; they also share the work of touching new pages.
void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    char * to = static_cast<char *>(tensor->data) + offset;
    const char * from = static_cast<const char *>(data);
    const size_t cores = std::max<size_t>(1, std::min<size_t>(8, std::thread::hardware_concurrency()));
    const size_t parts = std::min(cores, size / COPY_PART);
    if (parts < 2) {
        std::memcpy(to, from, size);
        return;
    }
    std::vector<std::thread> workers;
    const size_t step = (size / parts + 63) / 64 * 64;
    size_t at = 0;
    try {
        for (; workers.size() + 1 < parts; at += step) {
            workers.emplace_back([=] { std::memcpy(to + at, from + at, step); });
        }
    } catch (const std::system_error &) {
        // No more threads to be had: the rest is copied here.
    }
    std::memcpy(to + at, from + at, size - at);
    for (std::thread & worker : workers) {
        worker.join();
    }
}

void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) { std::memset(of(buffer).host, value, buffer->size); }

constexpr ggml_backend_buffer_i BUFFER = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

// ---- buffer type

const char * buft_get_name(ggml_backend_buffer_type_t buft) { return of(buft->device).tier_name.c_str(); }

ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    device & dev = of(buft->device);
    void * host = nullptr;
    // Huge pages make locking the memory for the GPU a matter of milliseconds; it is locked once it is filled.
    if (posix_memalign(&host, HUGE_PAGE, (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE) != 0) {
        log_fault("no host memory for " + std::to_string(size) + " bytes of experts");
        return nullptr;
    }
    madvise(host, size, MADV_HUGEPAGE);
    try {
        auto made = std::make_unique<tier>();
        made->inner = dev.inner;
        made->kernels = dev.kernels;
        made->host = static_cast<char *>(host);
        made->host_bytes = size;
        made->scratch_wanted = !dev.on_cpu;
        const std::lock_guard<std::mutex> lock(tiers_mutex);
        dev.tiers.push_back(made.get());
        dev.newest = made.get();
        return ggml_backend_buffer_init(buft, BUFFER, made.release(), size);
    } catch (const std::bad_alloc &) {
        std::free(host);
        return nullptr;
    }
}

size_t buft_get_alignment(ggml_backend_buffer_type_t) { return 128; }

bool buft_is_host(ggml_backend_buffer_type_t) { return false; }  // or the scheduler would give its tensors to the CPU

constexpr ggml_backend_buffer_type_i BUFFER_TYPE = {
    /* .get_name       = */ buft_get_name,
    /* .alloc_buffer   = */ buft_alloc_buffer,
    /* .get_alignment  = */ buft_get_alignment,
    /* .get_max_size   = */ nullptr,
    /* .get_alloc_size = */ nullptr,
    /* .is_host        = */ buft_is_host,
};

bool in_tier(const ggml_tensor * tensor) {
    return tensor != nullptr && tensor->buffer != nullptr && tensor->buffer->buft->iface.alloc_buffer == buft_alloc_buffer;
}

// ---- backend

const char * backend_get_name(ggml_backend_t backend) { return of(backend->device).name.c_str(); }

void backend_free(ggml_backend_t backend) {
    std::unique_lock<std::mutex> all(tiers_mutex);
    for (tier * used : of(backend->device).tiers) {
        const std::lock_guard<std::mutex> lock(used->mutex);
        if (used->user == backend) {
            used->user = nullptr;
        }
    }
    all.unlock();
    ggml_backend_free(inner_of(backend));
    delete static_cast<context *>(backend->context);
    delete backend;
}

void backend_set_tensor_async(ggml_backend_t b, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    ggml_backend_tensor_set_async(inner_of(b), t, data, offset, size);
}

void backend_get_tensor_async(ggml_backend_t b, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    ggml_backend_tensor_get_async(inner_of(b), t, data, offset, size);
}

void backend_set_tensor_2d_async(ggml_backend_t b, ggml_tensor * t, const void * data, size_t offset, size_t size, size_t n, size_t st, size_t sd) {
    ggml_backend_tensor_set_2d_async(inner_of(b), t, data, offset, size, n, st, sd);
}

void backend_get_tensor_2d_async(ggml_backend_t b, const ggml_tensor * t, void * data, size_t offset, size_t size, size_t n, size_t st, size_t sd) {
    ggml_backend_tensor_get_2d_async(inner_of(b), t, data, offset, size, n, st, sd);
}

void backend_synchronize(ggml_backend_t backend) { ggml_backend_synchronize(inner_of(backend)); }

tier * tier_of(ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        for (int source : {0, 1}) {
            if (in_tier(graph->nodes[i]->src[source])) {
                return &of(graph->nodes[i]->src[source]->buffer);
            }
        }
    }
    return nullptr;
}

ggml_status compute_tiered(ggml_backend_t backend, tier & tier, ggml_cgraph * graph) {
    const std::lock_guard<std::mutex> lock(tier.mutex);
    try {
        if (tier.user != nullptr && tier.user != backend) {
            throw tier_error{"a second context computes with the same model: its slots belong to the first until that is freed"};
        }
        tier.fault.clear();  // of another context, which was refused
        if (tier.user == nullptr) {
            tier.user = backend;
            tier.generation++;  // what was captured belongs to the backend before
        }
        if (!tier.runs) {
            if (tier.planned) {
                throw tier_error{"the slots are gone since a placement failed: place the experts again"};
            }
            tier.place_share(of(backend->device).default_residency);
        }
        const ggml_status status = tier.runs->compute(inner_of(backend), graph);
        if (status != GGML_STATUS_SUCCESS) {
            tier.fault = "the wrapped device failed with status " + std::to_string(status);
        }
        return status;
    } catch (const tier_error & error) {
        tier.fault = error.text;
    } catch (const std::bad_alloc &) {
        tier.fault = "no memory";
    } catch (const std::exception & error) {
        tier.fault = error.what();  // no thread can be had, for instance
    }
    log_fault(tier.fault);
    return GGML_STATUS_FAILED;
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    context & mine = *static_cast<context *>(backend->context);
    // Finding the tier means looking through the graph, so a graph that comes back unchanged is known by its number.
    if (graph->uid == 0 || graph->uid != mine.last_uid) {
        mine.last_tier = tier_of(graph);
        mine.last_uid = graph->uid;
    }
    return mine.last_tier != nullptr ? compute_tiered(backend, *mine.last_tier, graph)
                                     : ggml_backend_graph_compute_async(inner_of(backend), graph);
}

void backend_event_record(ggml_backend_t backend, ggml_backend_event_t event) { ggml_backend_event_record(event, inner_of(backend)); }

void backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event) { ggml_backend_event_wait(inner_of(backend), event); }

// The wrapped backend asks for longer lives of tensors that its fused kernels read; without it, other kernels run.
void backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    ggml_backend_t inner = inner_of(backend);
    if (inner->iface.graph_optimize != nullptr) {
        inner->iface.graph_optimize(inner, graph, params);
    }
}

bool backend_cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * source, ggml_tensor * target) {
    const auto unwrap = [](ggml_backend_t b) { return b->iface.graph_compute == backend_graph_compute ? inner_of(b) : b; };
    from = unwrap(from);
    to = unwrap(to);
    return to->iface.cpy_tensor_async != nullptr && to->iface.cpy_tensor_async(from, to, source, target);
}

ggml_guid GUID = {0x5b, 0x1d, 0x6e, 0x02, 0x94, 0x3a, 0x4c, 0x77, 0xa3, 0x0f, 0x61, 0xd8, 0x2e, 0xb5, 0x90, 0x4d};

// An asynchronous function exists where the wrapped backend has it: the scheduler treats others as synchronous.
ggml_backend_i backend_interface(const ggml_backend_i & inner) {
    ggml_backend_i iface = {};
    iface.get_name = backend_get_name;
    iface.free = backend_free;
    iface.set_tensor_async = inner.set_tensor_async ? backend_set_tensor_async : nullptr;
    iface.get_tensor_async = inner.get_tensor_async ? backend_get_tensor_async : nullptr;
    iface.set_tensor_2d_async = inner.set_tensor_2d_async ? backend_set_tensor_2d_async : nullptr;
    iface.get_tensor_2d_async = inner.get_tensor_2d_async ? backend_get_tensor_2d_async : nullptr;
    iface.cpy_tensor_async = inner.cpy_tensor_async ? backend_cpy_tensor_async : nullptr;
    iface.synchronize = inner.synchronize ? backend_synchronize : nullptr;
    iface.graph_plan_create = nullptr;
    iface.graph_plan_free = nullptr;
    iface.graph_plan_update = nullptr;
    iface.graph_plan_compute = nullptr;
    iface.graph_compute = backend_graph_compute;
    iface.event_record = inner.event_record ? backend_event_record : nullptr;
    iface.event_wait = inner.event_wait ? backend_event_wait : nullptr;
    iface.graph_optimize = backend_graph_optimize;
    return iface;
}

// ---- device

const char * device_get_name(ggml_backend_dev_t dev) { return of(dev).name.c_str(); }

const char * device_get_description(ggml_backend_dev_t dev) { return of(dev).description.c_str(); }

void device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) { ggml_backend_dev_memory(of(dev).inner, free, total); }

ggml_backend_dev_type device_get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    // The wrapped device's number stays: llama.cpp then takes the proxy for the same card and never uses both unasked.
    ggml_backend_dev_get_props(of(dev).inner, props);
    props->name = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type = device_get_type(dev);
    props->caps.buffer_from_host_ptr = false;  // experts have to be in memory that the tier owns
    // With several devices llama.cpp would keep several copies of a graph's inputs and rotate them.
    props->caps.events = props->caps.events && devices().size() == 1;
}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char * params) {
    ggml_backend_t inner = ggml_backend_dev_init(of(dev).inner, params);
    return inner != nullptr ? new ggml_backend{&GUID, backend_interface(inner->iface), dev, new context{inner, 0, nullptr}} : nullptr;
}

const char * cpu_buft_get_name(ggml_backend_buffer_type_t buft) { return of(buft->device).cpu_name.c_str(); }

// Several proxies over the CPU would share its buffer type, by which the scheduler tells where a tensor belongs; and
// llama.cpp keeps tensors apart by the name of their buffer type.
ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    return of(dev).on_cpu ? &of(dev).cpu_buft : ggml_backend_dev_buffer_type(of(dev).inner);
}

ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t dev) { return ggml_backend_dev_host_buffer_type(of(dev).inner); }

bool inner_supports(const device & dev, const ggml_tensor * op, int expert_source) {
    // Asked about the tensor as if it were the device's own, which in slots it is.
    ggml_tensor weight = *op->src[expert_source];
    weight.buffer = nullptr;
    ggml_tensor asked = *op;
    asked.src[expert_source] = &weight;
    return ggml_backend_dev_supports_op(dev.inner, &asked);
}

bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const device & proxy = of(dev);
    const bool by_id = std::strcmp(ggml_op_name(op->op), "MUL_MAT_ID") == 0;
    const bool add_id = std::strcmp(ggml_op_name(op->op), "ADD_ID") == 0;
    // A scale is reshaped and repeated before it is read.
    const bool of_scale = in_tier(op->src[0]) && (std::strcmp(ggml_op_name(op->op), "RESHAPE") == 0 || std::strcmp(ggml_op_name(op->op), "REPEAT") == 0);
    const int expert_source = by_id || of_scale ? 0 : add_id ? 1 : -1;
    for (int source = 0; source < GGML_MAX_SRC; source++) {
        if (in_tier(op->src[source]) && source != expert_source) {
            return false;
        }
    }
    if (expert_source >= 0) {
        const ggml_tensor * experts = op->src[expert_source];
        if (in_tier(experts)) {
            return inner_supports(proxy, op, expert_source);
        }
        int32_t block;
        // While a model loads, this sends its experts to the next buffer type of the device, which is the tier's.
        if (proxy.tiering && experts->buffer != nullptr && experts->buffer->size == 0 && is_expert_tensor(experts->name, &block, nullptr)) {
            return false;
        }
    }
    return ggml_backend_dev_supports_op(proxy.inner, op);
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    const device & proxy = of(dev);
    if (buft == &proxy.tier_buft || buft == &proxy.cpu_buft) {
        return true;
    }
    const bool of_another = std::any_of(devices().begin(), devices().end(), [&](const device & other) { return buft == &other.cpu_buft; });
    return !of_another && ggml_backend_dev_supports_buft(proxy.inner, buft);
}

bool device_offload_op(ggml_backend_dev_t dev, const ggml_tensor * op) { return ggml_backend_dev_offload_op(of(dev).inner, op); }

ggml_backend_event_t device_event_new(ggml_backend_dev_t dev) { return ggml_backend_event_new(of(dev).inner); }

void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) { ggml_backend_event_free(event); }

void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t event) { ggml_backend_event_synchronize(event); }

ggml_backend_device_i device_interface(const ggml_backend_device_i & inner) {
    return {
        /* .get_name             = */ device_get_name,
        /* .get_description      = */ device_get_description,
        /* .get_memory           = */ device_get_memory,
        /* .get_type             = */ device_get_type,
        /* .get_props            = */ device_get_props,
        /* .init_backend         = */ device_init_backend,
        /* .get_buffer_type      = */ device_get_buffer_type,
        /* .get_host_buffer_type = */ device_get_host_buffer_type,
        /* .buffer_from_host_ptr = */ nullptr,
        /* .supports_op          = */ device_supports_op,
        /* .supports_buft        = */ device_supports_buft,
        /* .offload_op           = */ device_offload_op,
        /* .event_new            = */ inner.event_new ? device_event_new : nullptr,
        /* .event_free           = */ inner.event_free ? device_event_free : nullptr,
        /* .event_synchronize    = */ inner.event_synchronize ? device_event_synchronize : nullptr,
    };
}

// ---- registry

const char * reg_get_name(ggml_backend_reg_t) { return "SPARK"; }

size_t reg_get_device_count(ggml_backend_reg_t) { return devices().size(); }

ggml_backend_dev_t reg_get_device(ggml_backend_reg_t, size_t index) { return &devices()[index].dev; }

ggml_backend_buffer_type_t * extra_bufts(ggml_backend_dev_t dev) {
    static ggml_backend_buffer_type_t none[] = {nullptr};
    return of(dev).tiering ? of(dev).bufts : none;
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(of(backend->device).inner);
    using set_fn = void (*)(ggml_backend_t, int);
    if (auto set = reinterpret_cast<set_fn>(ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))) {
        set(inner_of(backend), n_threads);
    }
}

void * reg_get_proc_address(ggml_backend_reg_t, const char * name) {
    if (std::strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0) {
        return reinterpret_cast<void *>(extra_bufts);
    }
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(set_n_threads);
    }
    return nullptr;
}

ggml_backend_reg REG = {
    GGML_BACKEND_API_VERSION,
    {
        /* .get_name         = */ reg_get_name,
        /* .get_device_count = */ reg_get_device_count,
        /* .get_device       = */ reg_get_device,
        /* .get_proc_address = */ reg_get_proc_address,
    },
    nullptr,
};

}  // namespace

std::deque<device> & devices() {
    static std::deque<device> all;
    return all;
}

ggml_backend_reg_t registry() { return &REG; }

void add_device(ggml_backend_dev_t inner) {
    device & made = devices().emplace_back();
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(inner, &props);
    made.inner = inner;
    made.on_cpu = props.type == GGML_BACKEND_DEVICE_TYPE_CPU;
    made.name = "SPARK" + std::to_string(devices().size() - 1);
    made.tier_name = made.name + "_Tier";
    made.cpu_name = made.name + "_CPU";
    made.description = std::string("tiers over ") + ggml_backend_dev_name(inner);
    made.dev = {device_interface(inner->iface), registry(), &made};
    made.tier_buft = {BUFFER_TYPE, &made.dev, nullptr};
    if (made.on_cpu) {
        made.cpu_buft = *ggml_backend_dev_buffer_type(inner);
        made.cpu_buft.iface.get_name = cpu_buft_get_name;
        made.cpu_buft.device = &made.dev;
    }
    made.bufts[0] = &made.tier_buft;
    made.bufts[1] = nullptr;
}

}  // namespace spark
