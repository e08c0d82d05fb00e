// The part of TransformerEngine's interior that its fused_rope.cu uses. Tensors are the C interface's basic tensors.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <transformer_engine/transformer_engine.h>

#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <vector>

#define NVTE_ERROR(...) ::transformer_engine::fail(__VA_ARGS__)
#define NVTE_CHECK(holds, ...) \
  if (!(holds)) NVTE_ERROR(__VA_ARGS__)
#define NVTE_CHECK_CUDA(call)                                                                   \
  if (const cudaError_t error = (call); error != cudaSuccess) NVTE_ERROR(cudaGetErrorString(error))
#define NVTE_API_CALL(name)
#define TRANSFORMER_ENGINE_TYPE_SWITCH_INPUT(dtype, type, ...) \
  switch (dtype) {                                             \
    case DType::kFloat32: {                                    \
      using type = float;                                      \
      { __VA_ARGS__ }                                          \
    } break;                                                   \
    case DType::kFloat16: {                                    \
      using type = __half;                                     \
      { __VA_ARGS__ }                                          \
    } break;                                                   \
    case DType::kBFloat16: {                                   \
      using type = __nv_bfloat16;                              \
      { __VA_ARGS__ }                                          \
    } break;                                                   \
    default:                                                   \
      NVTE_ERROR("expected float32, float16 or bfloat16");     \
  }

namespace transformer_engine {
constexpr uint32_t THREADS_PER_WARP = 32;

template <typename... Words>
[[noreturn]] void fail(const Words &...words) {
  std::ostringstream message;
  (message << ... << words);
  throw std::runtime_error(message.str());
}

struct Tensor {
  struct {
    void *dptr = nullptr;
    std::vector<size_t> shape;
    DType dtype = DType::kFloat32;
  } data;
};

inline Tensor *convertNVTETensorCheck(const NVTETensor tensor) { return reinterpret_cast<Tensor *>(tensor); }

template <typename T>
T getenv(const char *name, const T &otherwise) {
  const char *value = std::getenv(name);
  return value ? static_cast<T>(std::atoi(value)) : otherwise;
}
}  // namespace transformer_engine
