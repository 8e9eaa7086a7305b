// The CUDA driver's interface, loaded at run time: this library also runs where there is no GPU, and nobody needs a
// toolkit. Declared here are the functions and structures that the cuda_*.cpp files use, under the driver's names.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace spark {

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st * CUcontext;
typedef struct CUmod_st * CUmodule;
typedef struct CUfunc_st * CUfunction;
typedef struct CUstream_st * CUstream;
typedef struct CUevent_st * CUevent;
typedef struct CUgraph_st * CUgraph;
typedef struct CUgraphNode_st * CUgraphNode;
typedef struct CUgraphExec_st * CUgraphExec;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;
constexpr unsigned CU_MEMHOSTALLOC_DEVICEMAP = 2;
constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;
constexpr int CU_GRAPH_NODE_TYPE_KERNEL = 0;
constexpr unsigned char CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1;
constexpr unsigned char CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1;

struct CUgraphEdgeData {
    unsigned char from_port;
    unsigned char to_port;
    unsigned char type;
    unsigned char reserved[5];
};

struct CUgraphExecUpdateResultInfo {
    int result;
    CUgraphNode errorNode;
    CUgraphNode errorFromNode;
};

struct CUDA_KERNEL_NODE_PARAMS {
    CUfunction func;
    unsigned gridDimX, gridDimY, gridDimZ;
    unsigned blockDimX, blockDimY, blockDimZ;
    unsigned sharedMemBytes;
    void ** kernelParams;
    void ** extra;
    void * kern;
    CUcontext ctx;
};

// name, arguments, name in the library (a later version of a function keeps its old name for old programs)
#define SPARK_CUDA_FUNCTIONS(F)                                                                                        \
    F(cuInit, (unsigned flags), "cuInit")                                                                              \
    F(cuDriverGetVersion, (int * version), "cuDriverGetVersion")                                                       \
    F(cuGetErrorName, (CUresult, const char **), "cuGetErrorName")                                                     \
    F(cuDeviceGetByPCIBusId, (CUdevice *, const char *), "cuDeviceGetByPCIBusId")                                      \
    F(cuDeviceGetAttribute, (int *, int, CUdevice), "cuDeviceGetAttribute")                                            \
    F(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice), "cuDevicePrimaryCtxRetain")                                   \
    F(cuDevicePrimaryCtxRelease, (CUdevice), "cuDevicePrimaryCtxRelease_v2")                                           \
    F(cuCtxPushCurrent, (CUcontext), "cuCtxPushCurrent_v2")                                                            \
    F(cuCtxPopCurrent, (CUcontext *), "cuCtxPopCurrent_v2")                                                            \
    F(cuCtxSynchronize, (void), "cuCtxSynchronize")                                                                     \
    F(cuModuleLoadData, (CUmodule *, const void *), "cuModuleLoadData")                                                \
    F(cuModuleUnload, (CUmodule), "cuModuleUnload")                                                                    \
    F(cuModuleGetFunction, (CUfunction *, CUmodule, const char *), "cuModuleGetFunction")                              \
    F(cuMemAlloc, (CUdeviceptr *, size_t), "cuMemAlloc_v2")                                                            \
    F(cuMemFree, (CUdeviceptr), "cuMemFree_v2")                                                                        \
    F(cuMemcpyHtoD, (CUdeviceptr, const void *, size_t), "cuMemcpyHtoD_v2")                                            \
    F(cuMemcpyDtoH, (void *, CUdeviceptr, size_t), "cuMemcpyDtoH_v2")                                                  \
    F(cuMemcpyHtoDAsync, (CUdeviceptr, const void *, size_t, CUstream), "cuMemcpyHtoDAsync_v2")                        \
    F(cuMemcpyDtoHAsync, (void *, CUdeviceptr, size_t, CUstream), "cuMemcpyDtoHAsync_v2")                              \
    F(cuMemsetD8, (CUdeviceptr, unsigned char, size_t), "cuMemsetD8_v2")                                               \
    F(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream), "cuMemsetD8Async")                              \
    F(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream), "cuMemsetD32Async")                                 \
    F(cuMemHostAlloc, (void **, size_t, unsigned), "cuMemHostAlloc")                                                   \
    F(cuMemFreeHost, (void *), "cuMemFreeHost")                                                                        \
    F(cuMemHostRegister, (void *, size_t, unsigned), "cuMemHostRegister_v2")                                           \
    F(cuMemHostUnregister, (void *), "cuMemHostUnregister")                                                            \
    F(cuMemHostGetDevicePointer, (CUdeviceptr *, void *, unsigned), "cuMemHostGetDevicePointer_v2")                    \
    F(cuStreamCreate, (CUstream *, unsigned), "cuStreamCreate")                                                        \
    F(cuStreamDestroy, (CUstream), "cuStreamDestroy_v2")                                                               \
    F(cuStreamSynchronize, (CUstream), "cuStreamSynchronize")                                                          \
    F(cuStreamWaitEvent, (CUstream, CUevent, unsigned), "cuStreamWaitEvent")                                           \
    F(cuStreamBeginCapture, (CUstream, int), "cuStreamBeginCapture_v2")                                                \
    F(cuStreamEndCapture, (CUstream, CUgraph *), "cuStreamEndCapture")                                                 \
    F(cuEventCreate, (CUevent *, unsigned), "cuEventCreate")                                                           \
    F(cuEventDestroy, (CUevent), "cuEventDestroy_v2")                                                                  \
    F(cuEventRecord, (CUevent, CUstream), "cuEventRecord")                                                             \
    F(cuLaunchKernel,                                                                                                  \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **),  \
      "cuLaunchKernel")                                                                                                \
    F(cuGraphInstantiate, (CUgraphExec *, CUgraph, uint64_t), "cuGraphInstantiateWithFlags")                           \
    F(cuGraphDestroy, (CUgraph), "cuGraphDestroy")                                                                     \
    F(cuGraphExecDestroy, (CUgraphExec), "cuGraphExecDestroy")                                                         \
    F(cuGraphLaunch, (CUgraphExec, CUstream), "cuGraphLaunch")                                                         \
    F(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *), "cuGraphGetNodes")                                          \
    F(cuGraphNodeGetType, (CUgraphNode, int *), "cuGraphNodeGetType")

// Functions of drivers from CUDA 12.3 on; null before.
#define SPARK_CUDA_NEWER_FUNCTIONS(F)                                                                                  \
    F(cuGraphKernelNodeGetParams, (CUgraphNode, CUDA_KERNEL_NODE_PARAMS *), "cuGraphKernelNodeGetParams_v2")           \
    F(cuGraphNodeGetDependencies, (CUgraphNode, CUgraphNode *, CUgraphEdgeData *, size_t *),                           \
      "cuGraphNodeGetDependencies_v2")                                                                                 \
    F(cuGraphAddDependencies,                                                                                          \
      (CUgraph, const CUgraphNode *, const CUgraphNode *, const CUgraphEdgeData *, size_t),                            \
      "cuGraphAddDependencies_v2")                                                                                     \
    F(cuGraphRemoveDependencies,                                                                                       \
      (CUgraph, const CUgraphNode *, const CUgraphNode *, const CUgraphEdgeData *, size_t),                            \
      "cuGraphRemoveDependencies_v2")                                                                                  \
    F(cuGraphExecUpdate, (CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo *), "cuGraphExecUpdate_v2")

struct cuda_driver {
#define SPARK_DECLARE(name, arguments, symbol) CUresult(*name) arguments = nullptr;
    SPARK_CUDA_FUNCTIONS(SPARK_DECLARE)
    SPARK_CUDA_NEWER_FUNCTIONS(SPARK_DECLARE)
#undef SPARK_DECLARE
    int version = 0;           // 12040 is CUDA 12.4
    bool edits_graphs = false; // whether the newer functions are there
};

// The loaded driver, or null with the reason.
const cuda_driver * load_cuda_driver(std::string & reason);

}  // namespace spark
