// The parts of ggml 0.25.3 that Spark's native code reads, declared here because no header of it is installed.
// Python's own declaration (spark_runtime/ggml.py) must agree member by member: the loader compares them and refuses.

#pragma once

#include <cstddef>
#include <cstdint>

constexpr int GGML_MAX_DIMS = 4;
constexpr int GGML_MAX_SRC = 10;
constexpr int GGML_MAX_NAME = 64;
constexpr int GGML_OP_PARAMS = 16;
constexpr int32_t GGML_TYPE_I32 = 26;

struct ggml_tensor {
    int32_t type;
    void * buffer;
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
