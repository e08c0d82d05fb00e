// The C interface of the libraries: a tensor as `ropelab.study.documents.sglang.kernels` hands it over.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <exception>

struct View {
  void* data;
  int64_t sizes[4];
  int32_t rank, dtype, contiguous, cuda;
};

// Call `function`. Returns 0, or 1 with the words of its exception in `message`.
template <typename Function>
int said(char* message, size_t length, Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), length - 1);
    return 1;
  }
}
