"""Kernels and condition of TransformerEngine#3057 as first proposed (6c46696), compiled for the CPU from its own file.

Argument: ``transformer_engine/common/fused_rope/fused_rope.cu`` at that commit. Needs g++. The rotation itself is
replaced by a line that notes which row of ``freqs`` a block reads.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(sys.argv[1]).read_text()
PROGRAM = r"""
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#define __device__
#define __forceinline__ inline
#define __global__
namespace transformer_engine { template <typename T> T getenv(const char *, T unset) { return unset; } }
enum class NVTE_QKV_Format { NVTE_THD };
struct { int x, y; } blockIdx;
int read[8];  // for each token, the row of freqs that its block reads
template <typename... Rest> void fused_rope_block_forward(
    const float *, const float *, float *, bool, int row, int offset, Rest...) { read[offset] = row; }
FUNCTIONS
void show(const char *grid) {
  std::printf("%s grid, rows of freqs that the tokens 5, 6, 7 read:", grid);
  for (int t = 5; t < 8; t++) read[t] < 0 ? std::printf(" none") : std::printf(" %d", read[t]);
  for (int &row : read) row = -1;
  std::puts("");
}
int main() {
  int cu_seqlens[] = {0, 3, 5};  // two sequences, and three tokens past the last one
  for (int &row : read) row = -1;
  for (int s = 0; s < 4; s++) for (int b = 0; b < 2; b++) {
    blockIdx = {s, b};
    fused_rope_forward_kernel<float>(nullptr, cu_seqlens, nullptr, nullptr, nullptr, false, 1, 0, 4, 1, 2, 2,
                                     1, 0, 1, 1, 1, 0, 1, 1);
  }
  std::puts("4 rows of freqs, 0 to 3");
  show("old");
  for (int t = 0; t < 8; t++) {
    blockIdx = {t, 0};
    fused_rope_thd_token_forward_kernel<float>(nullptr, cu_seqlens, nullptr, nullptr, nullptr, false, 1, 0, 2, 1, 2, 2,
                                               1, 1, 1, 1, 1, 1);
  }
  show("new");
  for (int n : {1, 8, 32, 128, 512, 1024, 2401})  // the published table: 65,536 tokens and rows
    std::printf("n_seqs %d: %s grid; blocks of the old grid for each token: %d\n", n,
                fused_rope_thd_use_token_linear(NVTE_QKV_Format::NVTE_THD, n, 65536, 65536) ? "new" : "old", n);
}
"""
functions = []
for name in ("thd_find_seq_id", "forward_kernel", "thd_token_forward_kernel", "thd_use_token_linear"):
    head = r"(?:template <typename scalar_t>\n)?^(?:__|inline)[^\n]*\bfused_rope_"
    functions += re.findall(rf"{head}{name}\([^{{;]*\{{.*?^\}}", SOURCE, re.DOTALL | re.MULTILINE)
with tempfile.TemporaryDirectory() as folder:
    program = Path(folder, "program")
    code = PROGRAM.replace("FUNCTIONS", "\n".join(functions))
    subprocess.run(["g++", "-std=c++17", "-x", "c++", "-", "-o", program], input=code, text=True, check=True)
    print(subprocess.run([program], capture_output=True, text=True, check=True).stdout, end="")
