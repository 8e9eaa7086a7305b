# Included by CMake right after llama-cpp-python's project() command (CMAKE_PROJECT_llama_cpp_INCLUDE).
#
# llama-cpp-python forces the cache variable LLAMA_BUILD_COMMON to ON, so -DLLAMA_BUILD_COMMON=OFF on the command line
# has no effect. Its only user is the multimodal library, which LLAVA_BUILD=OFF leaves out; yet it costs most of the
# build: about 20 CPU-minutes with it, 4 without. A normal variable set here shadows the cache variable, because
# set(CACHE) leaves normal variables alone (policy CMP0126, CMake 3.21) and option() in llama.cpp honours them
# (policy CMP0077).
set(LLAMA_BUILD_COMMON OFF)
