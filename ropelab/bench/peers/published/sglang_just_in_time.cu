// A C interface around the operator of SGLang#14302 as published in its last two states, compiled just in time.
//
// SOURCE: the published file. POSITIONS: whether the operator also takes positions.
#include SOURCE
#include "view.h"

#include <optional>
#include <stdexcept>
#include <string>

namespace {
struct Tensor {
  DLTensor tensor;
  int64_t sizes[4];

  // The published Python code makes three axes of the heads, as this constructor does.
  Tensor(const View* view, int64_t head_size) {
    std::memcpy(sizes, view->sizes, sizeof sizes);
    int rank = view->rank;
    if (head_size && rank == 2) sizes[2] = head_size, sizes[1] /= head_size, rank = 3;
    if (head_size && rank == 4) sizes[0] *= sizes[1], sizes[1] = sizes[2], sizes[2] = sizes[3], rank = 3;
    if (!view->contiguous) throw std::runtime_error("expected a contiguous tensor");
    const uint8_t code = view->dtype == 15 ? kDLBfloat : kDLFloat, bits = view->dtype == 6 ? 32 : 16;
    int device = 0;
    cudaGetDevice(&device);
    tensor = {view->data, {view->cuda ? kDLCUDA : kDLCPU, device}, rank, {code, bits, 1}, sizes, nullptr, 0};
  }
};

template <int pairs>
void call(const DLTensor* cos, const DLTensor* sin, const DLTensor* q, const DLTensor* k, int64_t head_size, bool adjacent) {
  using tvm::ffi::TensorView;
  using Operator = RotaryEmbeddingCosSinKernel<pairs>;
#if POSITIONS
  if (k) return Operator::run_qk(TensorView(cos), TensorView(sin), TensorView(q), TensorView(k), {}, head_size, adjacent);
  Operator::run_q(TensorView(cos), TensorView(sin), TensorView(q), {}, head_size, adjacent);
#else
  if (k) return Operator::run_qk(TensorView(cos), TensorView(sin), TensorView(q), TensorView(k), head_size, adjacent);
  Operator::run_q(TensorView(cos), TensorView(sin), TensorView(q), head_size, adjacent);
#endif
}

template <bool adjacent, bool wide>
void one_block(const View* cos, const View* sin, const View* query, const View* key, cudaStream_t stream) {
  constexpr int pairs = 64, head_size = 2 * pairs, each = wide ? (adjacent ? 4 : 8) : 1;
  const int tokens = query->sizes[0], heads = query->sizes[1], key_heads = key ? key->sizes[1] : 0;
  const int needed = (std::max(heads, key_heads) * pairs + each - 1) / each;
  auto at = [](const View* view) { return static_cast<nv_bfloat16*>(view->data); };
  rotary_embedding_kernel_1d<nv_bfloat16, adjacent, wide, true, pairs>
      <<<tokens, std::min(512, std::max(128, (needed + 31) / 32 * 32)), 0, stream>>>(
          at(cos), at(sin), at(query), key ? at(key) : nullptr,
#if POSITIONS
          nullptr,
#endif
          static_cast<int>(cos->sizes[1]), pairs, int64_t{heads} * head_size, int64_t{key_heads} * head_size, head_size,
          head_size, heads, key_heads, head_size);
  if (cudaError_t error = cudaGetLastError()) throw std::runtime_error(cudaGetErrorString(error));
}
}  // namespace

extern "C" int rotate(
    const View* cos, const View* sin, const View* query, const View* key, int64_t head_size, int adjacent, void* stream,
    char* message, size_t length) {
  return said(message, length, [&] {
    Tensor c(cos, 0), s(sin, 0), q(query, head_size);
    std::optional<Tensor> k;
    if (key) k.emplace(key, head_size);
    TVMFFIEnvSetStream(kDLCUDA, q.tensor.device.device_id, stream, nullptr);
    auto with = [&](auto launch) { launch(&c.tensor, &s.tensor, &q.tensor, k ? &k->tensor : nullptr, head_size, adjacent); };
    switch (adjacent ? cos->sizes[1] : cos->sizes[1] / 2) {
      case 32: return with(call<32>);
      case 40: return with(call<40>);
      case 48: return with(call<48>);
      case 64: return with(call<64>);
      case 80: return with(call<80>);
      case 96: return with(call<96>);
      case 128: return with(call<128>);
      case 160: return with(call<160>);
    }
    throw std::runtime_error("not compiled for " + std::to_string(cos->sizes[1]) + " columns");
  });
}

extern "C" int rotate_by_one_block(
    const View* cos, const View* sin, const View* query, const View* key, int64_t head_size, int adjacent, int wide,
    void* stream, char* message, size_t length) {
  return said(message, length, [&] {
    if (query->rank != 3 || query->dtype != 15 || head_size != 128 || cos->sizes[1] != (adjacent ? 64 : 128))
      throw std::runtime_error("expected bfloat16 [T, H, 128], all features rotated");
    auto launch = adjacent ? (wide ? one_block<true, true> : one_block<true, false>)
                           : (wide ? one_block<false, true> : one_block<false, false>);
    launch(cos, sin, query, key, static_cast<cudaStream_t>(stream));
  });
}
