#include "cuda_driver.h"

#include <dlfcn.h>
#include <mutex>

namespace spark {

namespace {

std::string load(cuda_driver & driver) {
    void * library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        return "the NVIDIA driver's libcuda.so.1 cannot be loaded";
    }
    std::string missing;
    const auto find = [&](const char * symbol) {
        void * function = dlsym(library, symbol);
        if (function == nullptr) {
            missing = symbol;
        }
        return function;
    };
#define SPARK_LOAD(name, arguments, symbol) driver.name = reinterpret_cast<CUresult(*) arguments>(find(symbol));
    SPARK_CUDA_FUNCTIONS(SPARK_LOAD)
    if (!missing.empty()) {
        return "the NVIDIA driver is too old: it has no " + missing;
    }
    SPARK_CUDA_NEWER_FUNCTIONS(SPARK_LOAD)
#undef SPARK_LOAD
    driver.edits_graphs = missing.empty();
    const CUresult result = driver.cuInit(0);
    if (result != CUDA_SUCCESS || driver.cuDriverGetVersion(&driver.version) != CUDA_SUCCESS) {
        return "the NVIDIA driver does not start: error " + std::to_string(result);
    }
    return "";
}

}  // namespace

const cuda_driver * load_cuda_driver(std::string & reason) {
    static cuda_driver driver;
    static std::string fault;
    static std::once_flag once;
    std::call_once(once, [] { fault = load(driver); });
    reason = fault;
    return fault.empty() ? &driver : nullptr;
}

}  // namespace spark
