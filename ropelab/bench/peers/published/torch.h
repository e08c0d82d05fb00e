// The part of torch's C++ interface that SGLang#14302 uses, over plain pointers: the library then needs no torch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace at {
enum class ScalarType : int { Half = 5, Float = 6, Double = 7, BFloat16 = 15 };
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

namespace cuda {
inline cudaStream_t current = nullptr;
inline cudaStream_t getCurrentCUDAStream() { return current; }
struct OptionalCUDAGuard {
  explicit OptionalCUDAGuard(int) {}
};
}  // namespace cuda

class Tensor {
 public:
  Tensor(void* data, std::vector<int64_t> sizes, ScalarType dtype, bool contiguous, bool on_cuda)
      : data_(static_cast<char*>(data)), sizes_(std::move(sizes)), dtype_(dtype), contiguous_(contiguous), cuda_(on_cuda) {
    strides_.assign(sizes_.size(), 1);
    for (int i = static_cast<int>(sizes_.size()) - 2; i >= 0; --i) strides_[i] = strides_[i + 1] * sizes_[i + 1];
  }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t axis) const { return sizes_.at(axis); }
  int64_t stride(int64_t axis) const { return strides_.at(axis); }
  ScalarType scalar_type() const { return dtype_; }
  bool is_cuda() const { return cuda_; }
  bool is_contiguous() const { return contiguous_; }
  void* data_ptr() const { return data_; }
  template <typename T>
  T* data_ptr() const { return reinterpret_cast<T*>(data_); }

  Tensor view(const std::vector<int64_t>& sizes) const { return Tensor(data_, sizes, dtype_, contiguous_, cuda_); }
  Tensor select(int64_t axis, int64_t index) const {
    Tensor found = *this;
    found.data_ += index * strides_.at(axis) * bytes();
    found.sizes_.erase(found.sizes_.begin() + axis);
    found.strides_.erase(found.strides_.begin() + axis);
    found.contiguous_ = false;
    return found;
  }
  // Of what `view` and `select` give here: two axes, the last with a stride.
  Tensor contiguous() const {
    if (contiguous_) return *this;
    const size_t count = sizes_.at(0) * sizes_.at(1);
    void* made = nullptr;
    cudaStream_t stream = cuda::current;
    if (cudaMallocAsync(&made, count * bytes(), stream) != cudaSuccess) throw std::runtime_error("out of memory");
    cudaMemcpy2DAsync(made, bytes(), data_, strides_.at(1) * bytes(), bytes(), count, cudaMemcpyDeviceToDevice, stream);
    Tensor found(made, sizes_, dtype_, true, cuda_);
    found.own_ = std::shared_ptr<void>(made, [stream](void* x) { cudaFreeAsync(x, stream); });
    return found;
  }

 private:
  size_t bytes() const { return dtype_ == ScalarType::Double ? 8 : dtype_ == ScalarType::Float ? 4 : 2; }
  char* data_;
  std::vector<int64_t> sizes_, strides_;
  ScalarType dtype_;
  bool contiguous_, cuda_;
  std::shared_ptr<void> own_;
};

inline int device_of(const Tensor&) { return 0; }
}  // namespace at

template <typename... Words>
void check(bool holds, const Words&... words) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << words);
  throw std::runtime_error(message.str());
}

#define TORCH_CHECK(...) check(__VA_ARGS__)
#define C10_CUDA_KERNEL_LAUNCH_CHECK()                                   \
  do {                                                                   \
    const cudaError_t error = cudaGetLastError();                        \
    check(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error)); \
  } while (0)
#define SGLANG_LDG(address) __ldg(address)
#define DISPATCH_CASE(name, type, ...) \
  case at::ScalarType::name: {         \
    using scalar_t = type;             \
    return __VA_ARGS__();              \
  }
#define AT_DISPATCH_FLOATING_TYPES_AND2(first, second, dtype, name, ...) \
  [&] {                                                                  \
    switch (dtype) {                                                     \
      DISPATCH_CASE(Double, double, __VA_ARGS__)                         \
      DISPATCH_CASE(Float, float, __VA_ARGS__)                           \
      DISPATCH_CASE(Half, at::Half, __VA_ARGS__)                         \
      DISPATCH_CASE(BFloat16, at::BFloat16, __VA_ARGS__)                 \
    }                                                                    \
    check(false, name, " not implemented for this dtype");               \
  }()
