"""Compile the conversion of a constant to two 8-bit floats, stored twice, and show the instruction that converts."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PTX = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry zeros(.param .u64 to) {
    .reg .b16 %two; .reg .b32 %four; .reg .f32 %zero; .reg .b64 %at;
    ld.param.u64 %at, [to];
    mov.f32 %zero, 0f00000000;
    cvt.rn.satfinite.e4m3x2.f32 %two, %zero, %zero;
    mov.b32 %four, {%two, %two};
    st.global.b32 [%at], %four;
    ret;
}
"""


def run(program: str, *arguments: str) -> str:
    """What a program of Triton's wheel prints."""
    return subprocess.run([TOOLS / program, *arguments], check=True, capture_output=True, text=True).stdout


with tempfile.TemporaryDirectory() as folder:
    source, binary = Path(folder, "zeros.ptx"), Path(folder, "zeros.cubin")
    source.write_text(PTX)
    run("ptxas", "-arch=sm_90a", str(source), "-o", str(binary))
    release = re.search(r"release ([\d.]+)", run("ptxas", "--version"))
    print(f"ptxas {release[1]}")
    for line in re.findall(r"(?:F2FP|PRMT|STG)[^;]*", run("nvdisasm", "-c", str(binary))):
        print(line.strip())
