// A C interface around the operator of SGLang#14302 as published in its first three states, compiled ahead.
//
// STATE: 1 to 3. SOURCE: the published file.
#include SOURCE
#include "view.h"

namespace {
at::Tensor tensor(const View* view) {
  std::vector<int64_t> sizes(view->sizes, view->sizes + view->rank);
  return at::Tensor(view->data, sizes, static_cast<at::ScalarType>(view->dtype), view->contiguous, view->cuda);
}

#if STATE > 1
// The threads of a block of the published launch of one block for each token.
int threads(int pairs, int heads, bool adjacent, bool wide) {
#if STATE == 2
  return std::min(256, std::max(128, pairs));
#else
  const int each = !wide ? 1 : adjacent ? 4 : 8;  // pairs of a thread at a time, in accesses of 16 bytes
  return std::min(512, std::max(128, ((heads * pairs + each - 1) / each + 31) / 32 * 32));
#endif
}

template <bool adjacent, bool wide>
void one_block(const View* cos, const View* sin, const View* query, const View* key, int head_size, cudaStream_t stream) {
  const int width = cos->sizes[1], pairs = adjacent ? width : width / 2, tokens = query->sizes[0];
  const int heads = query->sizes[1], key_heads = key ? key->sizes[1] : heads;
  auto at = [](const View* view) { return static_cast<nv_bfloat16*>(view->data); };
#if STATE == 2
  auto kernel = rotary_embedding_kernel_1d<nv_bfloat16, adjacent>;
  const size_t shared = 0;
#else
  auto kernel = rotary_embedding_kernel_1d<nv_bfloat16, adjacent, wide>;
  const size_t shared = 2 * width * sizeof(nv_bfloat16);
#endif
  kernel<<<tokens, threads(pairs, std::max(heads, key_heads), adjacent, wide), shared, stream>>>(
      at(cos), at(sin), at(query), key ? at(key) : nullptr, width, pairs, int64_t{heads} * head_size,
      key ? int64_t{key_heads} * head_size : 0, head_size, head_size, heads, key_heads, head_size);
}
#endif
}  // namespace

extern "C" int rotate(
    const View* cos, const View* sin, const View* query, const View* key, int64_t head_size, int adjacent, void* stream,
    char* message, size_t length) {
  at::cuda::current = static_cast<cudaStream_t>(stream);
  return said(message, length, [&] {
    at::Tensor c = tensor(cos), s = tensor(sin), q = tensor(query);
    std::optional<at::Tensor> k;
    if (key) k = tensor(key);
#if STATE == 1
    rotary_embedding(c, s, q, k, head_size, adjacent);
#else
    rotary_embedding_cos_sin(c, s, q, k, head_size, adjacent);
#endif
  });
}

#if STATE > 1
extern "C" int rotate_by_one_block(
    const View* cos, const View* sin, const View* query, const View* key, int64_t head_size, int adjacent, int wide,
    void* stream, char* message, size_t length) {
  return said(message, length, [&] {
    auto launch = adjacent ? (wide ? one_block<true, true> : one_block<true, false>)
                           : (wide ? one_block<false, true> : one_block<false, false>);
    check(query->rank == 3 && query->dtype == 15, "expected bfloat16 [T, H, D]");
    check(STATE > 2 || !wide, "this state has no wide accesses");
    launch(cos, sin, query, key, head_size, static_cast<cudaStream_t>(stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}
#endif
