"""Which features ``is_neox`` of SGLang#14302 pairs (first version, 02f22ef8), compiled for the CPU from its own file.

Argument: ``sgl-kernel/csrc/multimodal/rotary_embedding.cu`` at that commit. Needs g++. The angle is a quarter turn, so
a feature receives the number of its partner.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(sys.argv[1]).read_text()
PROGRAM = r"""
#include <cstdio>
#define __device__
#define SGLANG_LDG(pointer) (*(pointer))
FUNCTION
template <bool IS_NEOX> void show(const char *said) {
  const float cos[8] = {}, sin[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  float head[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  for (int pair = 0; pair < 4; pair++) apply_token_rotary_embedding<float, IS_NEOX>(head, cos, sin, pair, 4);
  std::printf("%s: feature 0 turns with feature %d, feature 1 with feature %d\n", said, int(-head[0]),
              int(head[1] < 0 ? -head[1] : head[1]));
}
int main() { show<true>("is_neox = true"); show<false>("is_neox = false"); }
"""
head = r"template <typename scalar_t, bool IS_NEOX>\ninline __device__ void apply_token_rotary_embedding\("
(function,) = re.findall(rf"{head}.*?^\}}", SOURCE, re.DOTALL | re.MULTILINE)
with tempfile.TemporaryDirectory() as folder:
    program = Path(folder, "program")
    code = PROGRAM.replace("FUNCTION", function)
    subprocess.run(["g++", "-std=c++17", "-x", "c++", "-", "-o", program], input=code, text=True, check=True)
    print(subprocess.run([program], capture_output=True, text=True, check=True).stdout, end="")
