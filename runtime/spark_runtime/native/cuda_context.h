// What everything on one GPU needs: its context, memory and events.

#pragma once

#include "cuda_driver.h"
#include "tier.h"

#include <new>

namespace spark {

// One device's primary context, the one that the CUDA backend uses too.
class cuda {
  public:
    cuda(const cuda_driver & driver, CUdevice device, int capability) : cu(driver), capability(capability), device(device) {
        check(cu.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    }
    ~cuda() { cu.cuDevicePrimaryCtxRelease(device); }
    cuda(const cuda &) = delete;
    cuda & operator=(const cuda &) = delete;
    void check(CUresult result, const char * what) const {
        if (result != CUDA_SUCCESS) {
            throw tier_error{std::string(what) + " failed: " + error_name(result)};
        }
    }
    std::string error_name(CUresult result) const {
        const char * name = nullptr;
        return cu.cuGetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr ? name : "error " + std::to_string(result);
    }
    // Makes the context this thread's own for a while.
    class scope {
      public:
        explicit scope(const cuda & gpu) : scope(gpu, std::nothrow) { gpu.check(pushed, "cuCtxPushCurrent"); }
        scope(const cuda & gpu, std::nothrow_t) : gpu(gpu), pushed(gpu.cu.cuCtxPushCurrent(gpu.context)) {}  // to tidy up
        ~scope() {
            CUcontext popped;
            if (pushed == CUDA_SUCCESS) {
                gpu.cu.cuCtxPopCurrent(&popped);
            }
        }
        scope(const scope &) = delete;
        scope & operator=(const scope &) = delete;

      private:
        const cuda & gpu;
        const CUresult pushed;
    };
    const cuda_driver & cu;
    const int capability;  // 90 is 9.0

  private:
    CUdevice device;
    CUcontext context = nullptr;
};

class device_array {
  public:
    ~device_array() { release(); }
    // Keeps what it has if there is no memory for more.
    void allocate(const cuda & gpu, size_t bytes) {
        CUdeviceptr made = 0;
        gpu.check(gpu.cu.cuMemAlloc(&made, bytes), "cuMemAlloc");
        release();
        owner = &gpu;
        address = made;
        size = bytes;
        gpu.check(gpu.cu.cuMemsetD8(address, 0, bytes), "cuMemsetD8");
    }
    void release() {
        if (address != 0) {
            owner->cu.cuMemFree(address);
            address = 0;
            size = 0;
        }
    }
    template <typename type> type * at(size_t offset = 0) const { return reinterpret_cast<type *>(address + offset); }
    size_t size = 0;

  private:
    const cuda * owner = nullptr;
    CUdeviceptr address = 0;
};

// Host memory that the GPU reads by itself.
class host_lock {
  public:
    host_lock(const cuda & gpu, void * memory, size_t bytes) : gpu(gpu), memory(memory) {
        constexpr unsigned PORTABLE_AND_MAPPED = 3;
        const CUresult result = gpu.cu.cuMemHostRegister(memory, bytes, PORTABLE_AND_MAPPED);
        if (result != CUDA_SUCCESS) {
            throw tier_error{std::to_string(bytes) + " bytes of host memory cannot be locked for the GPU (" + gpu.error_name(result) + ")"};
        }
        CUdeviceptr address = 0;
        if (gpu.cu.cuMemHostGetDevicePointer(&address, memory, 0) != CUDA_SUCCESS) {
            gpu.cu.cuMemHostUnregister(memory);
            throw tier_error{"the GPU cannot see locked host memory"};
        }
        as_seen = reinterpret_cast<char *>(address);
    }
    ~host_lock() { gpu.cu.cuMemHostUnregister(memory); }
    host_lock(const host_lock &) = delete;
    host_lock & operator=(const host_lock &) = delete;
    char * as_seen = nullptr;  // where the GPU sees it

  private:
    const cuda & gpu;
    void * memory;
};

class stream {
  public:
    explicit stream(const cuda & gpu) : gpu(gpu) { gpu.check(gpu.cu.cuStreamCreate(&raw, CU_STREAM_NON_BLOCKING), "cuStreamCreate"); }
    ~stream() {
        gpu.cu.cuStreamSynchronize(raw);
        gpu.cu.cuStreamDestroy(raw);
    }
    stream(const stream &) = delete;
    stream & operator=(const stream &) = delete;
    void wait(CUevent event) const { gpu.check(gpu.cu.cuStreamWaitEvent(raw, event, 0), "cuStreamWaitEvent"); }
    void synchronize() const { gpu.check(gpu.cu.cuStreamSynchronize(raw), "cuStreamSynchronize"); }
    operator CUstream() const { return raw; }

  private:
    const cuda & gpu;
    CUstream raw = nullptr;
};

// A CUDA event that ggml's functions take for one of theirs.
class event {
  public:
    event(const cuda & gpu, ggml_backend_dev_t dev) : gpu(gpu) {
        CUevent made;
        gpu.check(gpu.cu.cuEventCreate(&made, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        wrapped = {dev, made};
    }
    ~event() { gpu.cu.cuEventDestroy(raw()); }
    event(const event &) = delete;
    event & operator=(const event &) = delete;
    CUevent raw() const { return static_cast<CUevent>(wrapped.context); }
    void record(CUstream stream) const { gpu.check(gpu.cu.cuEventRecord(raw(), stream), "cuEventRecord"); }
    ggml_backend_event wrapped = {};

  private:
    const cuda & gpu;
};

}  // namespace spark
