#include "cuda_device.h"
#include "device_tables.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace spark {

std::string read_kernels(const tier & tier, std::string & reason) {
    const char * named = std::getenv("SPARKMOE_KERNELS");
    const std::string path = tier.kernels.empty() && named != nullptr ? named : tier.kernels;
    if (path.empty()) {
        reason = "there are no kernels for it: spark-agent doctor says why";
        return "";
    }
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    if (!file || text.str().empty()) {
        reason = "the kernels in " + path + " cannot be read";
        return "";
    }
    return text.str();
}

std::string beyond_limits(const tier & tier) {
    for (const auto & c : tier.classes) {
        if (c->layers.size() > SPARK_MAX_LAYERS) {
            return std::to_string(c->layers.size()) + " layers, expected at most " + std::to_string(SPARK_MAX_LAYERS);
        }
        for (const tier_layer * layer : c->layers) {
            if (layer->n_experts > SPARK_MAX_EXPERTS || layer->tensors.size() > SPARK_MAX_KINDS) {
                return std::to_string(layer->n_experts) + " experts of " + std::to_string(layer->tensors.size()) + " tensors, expected at most " +
                       std::to_string(SPARK_MAX_EXPERTS) + " of " + std::to_string(SPARK_MAX_KINDS);
            }
        }
    }
    return "";
}

bool find_device(ggml_backend_dev_t inner, const cuda_driver *& driver, CUdevice & device, cuda_version & found, std::string & reason) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(inner, &props);
    if (std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(inner)), "CUDA") != 0 || props.device_id == nullptr) {
        reason = std::string(props.name) + " is not a CUDA device";
        return false;
    }
    driver = load_cuda_driver(reason);
    if (driver == nullptr) {
        return false;
    }
    int major = 0, minor = 0;
    if (driver->cuDeviceGetByPCIBusId(&device, props.device_id) != CUDA_SUCCESS ||
        driver->cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) != CUDA_SUCCESS ||
        driver->cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device) != CUDA_SUCCESS) {
        reason = std::string("the NVIDIA driver does not know ") + props.device_id;
        return false;
    }
    found = {10 * major + minor, driver->version};
    return true;
}

bool find_cuda(ggml_backend_dev_t inner, cuda_version & found, std::string & reason) {
    const cuda_driver * driver;
    CUdevice device;
    return find_device(inner, driver, device, found, reason);
}

}  // namespace spark
