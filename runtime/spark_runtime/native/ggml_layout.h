// The parts of ggml 0.25.3 that Spark's native code uses, declared here because llama-cpp-python installs no header of
// its internal interface. A test compares every member with the headers of the pinned source archive; Python compares
// ggml_tensor with its own declaration, and the backend refuses another interface version.

#pragma once

#include <cstddef>
#include <cstdint>

#define SPARK_EXPORT __attribute__((visibility("default")))

constexpr int GGML_BACKEND_API_VERSION = 2;
constexpr int GGML_MAX_DIMS = 4;
constexpr int GGML_MAX_SRC = 10;
constexpr int GGML_MAX_NAME = 64;
constexpr int GGML_OP_PARAMS = 16;
constexpr int32_t GGML_TYPE_I32 = 26;

extern "C" {

struct ggml_backend;
struct ggml_backend_buffer;
struct ggml_backend_buffer_type;
struct ggml_backend_device;
struct ggml_backend_event;
struct ggml_backend_reg;
struct ggml_context;

typedef ggml_backend * ggml_backend_t;
typedef ggml_backend_buffer * ggml_backend_buffer_t;
typedef ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef ggml_backend_device * ggml_backend_dev_t;
typedef ggml_backend_event * ggml_backend_event_t;
typedef ggml_backend_reg * ggml_backend_reg_t;
typedef void * ggml_backend_graph_plan_t;
typedef uint8_t ggml_guid[16];
typedef ggml_guid * ggml_guid_t;

enum ggml_status : int {
    GGML_STATUS_ALLOC_FAILED = -2,
    GGML_STATUS_FAILED = -1,
    GGML_STATUS_SUCCESS = 0,
    GGML_STATUS_ABORTED = 1,
};

enum ggml_log_level : int { GGML_LOG_LEVEL_INFO = 2, GGML_LOG_LEVEL_WARN = 3, GGML_LOG_LEVEL_ERROR = 4 };

enum ggml_backend_buffer_usage : int {
    GGML_BACKEND_BUFFER_USAGE_ANY = 0,
    GGML_BACKEND_BUFFER_USAGE_WEIGHTS = 1,
    GGML_BACKEND_BUFFER_USAGE_COMPUTE = 2,
};

enum ggml_backend_dev_type : int {
    GGML_BACKEND_DEVICE_TYPE_CPU = 0,
    GGML_BACKEND_DEVICE_TYPE_GPU = 1,
    GGML_BACKEND_DEVICE_TYPE_IGPU = 2,
    GGML_BACKEND_DEVICE_TYPE_ACCEL = 3,
};

struct ggml_tensor {
    int32_t type;
    ggml_backend_buffer * buffer;
    int64_t ne[GGML_MAX_DIMS];
    size_t nb[GGML_MAX_DIMS];
    int32_t op;
    int32_t op_params[GGML_OP_PARAMS];
    int32_t flags;
    ggml_tensor * src[GGML_MAX_SRC];
    ggml_tensor * view_src;
    size_t view_offs;
    void * data;
    char name[GGML_MAX_NAME];
    void * extra;
    char padding[8];
};

struct ggml_hash_set {
    size_t size;
    uint32_t * used;
    ggml_tensor ** keys;
};

struct ggml_cgraph {
    int size;
    int n_nodes;
    int n_leafs;
    ggml_tensor ** nodes;
    ggml_tensor ** grads;
    ggml_tensor ** grad_accs;
    ggml_tensor ** leafs;
    int32_t * use_counts;
    ggml_hash_set visited_hash_set;
    int order;
    uint64_t uid;
};

struct ggml_init_params {
    size_t mem_size;
    void * mem_buffer;
    bool no_alloc;
};

struct ggml_backend_dev_caps {
    bool async;
    bool host_buffer;
    bool buffer_from_host_ptr;
    bool events;
    bool mmap_support;
};

struct ggml_backend_dev_props {
    const char * name;
    const char * description;
    size_t memory_free;
    size_t memory_total;
    ggml_backend_dev_type type;
    const char * device_id;
    ggml_backend_dev_caps caps;
};

struct ggml_backend_buffer_type_i {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type_t);
};

struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t device;
    void * context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t);
    void * (*get_base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t);
    void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *);
    void (*clear)(ggml_backend_buffer_t, uint8_t);
    void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
    ggml_backend_buffer_i iface;
    ggml_backend_buffer_type_t buft;
    void * context;
    size_t size;
    ggml_backend_buffer_usage usage;
};

struct ggml_backend_graph_optimize_params {
    void (*add_alloc_dep)(void * user_data, ggml_tensor * tensor, ggml_tensor * until);
    void * user_data;
};

struct ggml_backend_i {
    const char * (*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    void (*set_tensor_async)(ggml_backend_t, ggml_tensor *, const void *, size_t, size_t);
    void (*get_tensor_async)(ggml_backend_t, const ggml_tensor *, void *, size_t, size_t);
    void (*set_tensor_2d_async)(ggml_backend_t, ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d_async)(ggml_backend_t, const ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor_async)(ggml_backend_t, ggml_backend_t, const ggml_tensor *, ggml_tensor *);
    void (*synchronize)(ggml_backend_t);
    ggml_backend_graph_plan_t (*graph_plan_create)(ggml_backend_t, const ggml_cgraph *);
    void (*graph_plan_free)(ggml_backend_t, ggml_backend_graph_plan_t);
    void (*graph_plan_update)(ggml_backend_t, ggml_backend_graph_plan_t, const ggml_cgraph *);
    ggml_status (*graph_plan_compute)(ggml_backend_t, ggml_backend_graph_plan_t);
    ggml_status (*graph_compute)(ggml_backend_t, ggml_cgraph *);
    void (*event_record)(ggml_backend_t, ggml_backend_event_t);
    void (*event_wait)(ggml_backend_t, ggml_backend_event_t);
    void (*graph_optimize)(ggml_backend_t, ggml_cgraph *, ggml_backend_graph_optimize_params *);
};

struct ggml_backend {
    ggml_guid_t guid;
    ggml_backend_i iface;
    ggml_backend_dev_t device;
    void * context;
};

struct ggml_backend_event {
    ggml_backend_dev_t device;
    void * context;
};

struct ggml_backend_device_i {
    const char * (*get_name)(ggml_backend_dev_t);
    const char * (*get_description)(ggml_backend_dev_t);
    void (*get_memory)(ggml_backend_dev_t, size_t *, size_t *);
    ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
    void (*get_props)(ggml_backend_dev_t, ggml_backend_dev_props *);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char *);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_t (*buffer_from_host_ptr)(ggml_backend_dev_t, void *, size_t, size_t);
    bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor *);
    bool (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    bool (*offload_op)(ggml_backend_dev_t, const ggml_tensor *);
    ggml_backend_event_t (*event_new)(ggml_backend_dev_t);
    void (*event_free)(ggml_backend_dev_t, ggml_backend_event_t);
    void (*event_synchronize)(ggml_backend_dev_t, ggml_backend_event_t);
};

struct ggml_backend_device {
    ggml_backend_device_i iface;
    ggml_backend_reg_t reg;
    void * context;
};

struct ggml_backend_reg_i {
    const char * (*get_name)(ggml_backend_reg_t);
    size_t (*get_device_count)(ggml_backend_reg_t);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t);
    void * (*get_proc_address)(ggml_backend_reg_t, const char *);
};

struct ggml_backend_reg {
    int api_version;
    ggml_backend_reg_i iface;
    void * context;
};

// libggml-base, which Python (or llama-server) has loaded before this library
ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t, ggml_backend_buffer_i, void *, size_t);
ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t, size_t);
size_t ggml_backend_buft_get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *);
size_t ggml_backend_buft_get_alignment(ggml_backend_buffer_type_t);
void ggml_backend_buffer_free(ggml_backend_buffer_t);
void * ggml_backend_buffer_get_base(ggml_backend_buffer_t);
void ggml_backend_buffer_set_usage(ggml_backend_buffer_t, ggml_backend_buffer_usage);
void ggml_backend_buffer_clear(ggml_backend_buffer_t, uint8_t);
ggml_status ggml_backend_tensor_alloc(ggml_backend_buffer_t, ggml_tensor *, void *);
void ggml_backend_tensor_set(ggml_tensor *, const void *, size_t, size_t);
void ggml_backend_tensor_get(const ggml_tensor *, void *, size_t, size_t);
void ggml_backend_tensor_set_async(ggml_backend_t, ggml_tensor *, const void *, size_t, size_t);
void ggml_backend_tensor_get_async(ggml_backend_t, const ggml_tensor *, void *, size_t, size_t);
void ggml_backend_tensor_set_2d_async(ggml_backend_t, ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
void ggml_backend_tensor_get_2d_async(ggml_backend_t, const ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
void ggml_backend_free(ggml_backend_t);
void ggml_backend_synchronize(ggml_backend_t);
ggml_status ggml_backend_graph_compute_async(ggml_backend_t, ggml_cgraph *);
ggml_backend_event_t ggml_backend_event_new(ggml_backend_dev_t);
void ggml_backend_event_free(ggml_backend_event_t);
void ggml_backend_event_record(ggml_backend_event_t, ggml_backend_t);
void ggml_backend_event_synchronize(ggml_backend_event_t);
void ggml_backend_event_wait(ggml_backend_t, ggml_backend_event_t);
const char * ggml_backend_dev_name(ggml_backend_dev_t);
void ggml_backend_dev_memory(ggml_backend_dev_t, size_t *, size_t *);
void ggml_backend_dev_get_props(ggml_backend_dev_t, ggml_backend_dev_props *);
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t);
ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t, const char *);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t);
ggml_backend_buffer_type_t ggml_backend_dev_host_buffer_type(ggml_backend_dev_t);
bool ggml_backend_dev_supports_op(ggml_backend_dev_t, const ggml_tensor *);
bool ggml_backend_dev_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t);
bool ggml_backend_dev_offload_op(ggml_backend_dev_t, const ggml_tensor *);
const char * ggml_backend_reg_name(ggml_backend_reg_t);
void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t, const char *);
ggml_context * ggml_init(ggml_init_params);
void ggml_free(ggml_context *);
ggml_tensor * ggml_new_tensor(ggml_context *, int32_t type, int n_dims, const int64_t * ne);
size_t ggml_tensor_overhead(void);
ggml_cgraph ggml_graph_view(ggml_cgraph *, int, int);
const char * ggml_op_name(int32_t op);
bool ggml_is_quantized(int32_t type);
void ggml_log_internal(ggml_log_level, const char * format, ...);

}  // extern "C"
