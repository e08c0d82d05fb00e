"""TransformerEngine's C API: the calls follow its headers, and calls that it would refuse are refused before."""

import ctypes
import os
import re
from pathlib import Path

import pytest
import torch

from ropelab.bench import packages
from ropelab.bench.peers import te_library, te_source

VERSIONS = ("2.18.0", "2.20.2")
INCLUDE = "transformer_engine/common/include/transformer_engine"


# ---------------------------------------------------------------------------------------------------------- headers


def header(version: str, name: str) -> str:
    """The text of a header of the wheel, without comments."""
    _, directory = packages.locate(te_library.DISTRIBUTION, version)
    text = (directory / INCLUDE / name).read_text()
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def parameters(version: str, function: str) -> list[tuple[str, str]]:
    """The type and the name of each parameter of a function."""
    text = header(version, "fused_rope.h" if "rope" in function else "transformer_engine.h")
    declared, *_ = re.findall(rf"\b{function}\(([^)]*)\)\s*;", text)
    return [(kind.replace("const ", "").strip(), name) for kind, name in re.findall(r"([^,]*?)(\w+)(?:,|$)", declared)]


C_TYPES = {
    "NVTETensor": ctypes.c_void_p, "cudaStream_t": ctypes.c_void_p, "void *": ctypes.c_void_p,
    "NVTE_QKV_Format": ctypes.c_int, "NVTEScalingMode": ctypes.c_int, "NVTETensorParam": ctypes.c_int,
    "int": ctypes.c_int, "bool": ctypes.c_bool, "size_t": ctypes.c_size_t,
}  # fmt: skip


@pytest.mark.peers
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("function", te_library.SIGNATURES)
def test_signatures_are_those_of_the_header(version, function):
    arguments, _ = te_library.SIGNATURES[function]
    assert [C_TYPES[kind] for kind, _ in parameters(version, function)] == list(arguments)


@pytest.mark.peers
@pytest.mark.parametrize("version", VERSIONS)
def test_numbers_are_those_of_the_headers(version):
    text = header(version, "transformer_engine.h")
    names = {torch.int32: "Int32", torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}
    for dtype, name in names.items():
        assert int(re.search(rf"\bkNVTE{name} = (\d+)", text).group(1)) == te_library.DTYPES[dtype]
    assert "kNVTERowwiseData = 0" in text and "NVTE_DELAYED_TENSOR_SCALING = 0" in text
    formats = header(version, "fused_attn.h")
    for name, number in te_library.FORMATS.items():
        assert f"NVTE_{name.upper()} = {number}," in formats
    assert re.search(r"struct NVTEShape \{\s*size_t data\[15\];\s*size_t ndim;\s*\}", text)
    fields = r"struct NVTEBasicTensor \{\s*void \*data_ptr;\s*NVTEDType dtype;\s*NVTEShape shape;\s*\}"
    assert re.search(fields, text) and ctypes.sizeof(te_library._BasicTensor) == 8 + 8 + 16 * 8


# ------------------------------------------------------------------------------------------------------------ calls


@pytest.fixture
def recorded(monkeypatch):
    """A library that must not be called, on tensors of the CPU."""
    check = te_library._check

    def on_cpu(name, x, like, rank, dtypes, *, contiguous=False):
        wrong = x.ndim != rank or x.dtype not in dtypes or (contiguous and not x.is_contiguous())
        return check(name, x, like, rank, dtypes, contiguous=contiguous) if wrong else None

    monkeypatch.setattr(te_library, "_check", on_cpu)
    library = te_library.Library.__new__(te_library.Library)
    library.file, library._c = Path("none"), None
    return library


T, FREQS, CU = torch.zeros(8, 2, 3, 16), torch.zeros(8, 1, 1, 16), torch.tensor([0, 8], dtype=torch.int32)
REFUSED = [
    ((T.double(), FREQS, "sbhd"), {}, "x: expected rank 4"),
    ((T, FREQS.double(), "sbhd"), {}, "freqs: expected rank 4"),
    ((T, FREQS.transpose(0, 1).expand(8, 8, 1, 16)[:, :1], "sbhd"), {}, "freqs: expected"),
    ((T, torch.zeros(8, 1, 1, 18), "sbhd"), {}, "freqs: expected .* at most 16"),
    ((T, FREQS[:7], "sbhd"), {}, "freqs: expected at least 8 rows"),
    ((T, FREQS, "sbhd"), {"cp_size": 2}, "freqs: expected at least 16 rows"),
    ((T, FREQS, "sbhd"), {"cp_rank": 1}, "cp_rank: expected a rank below"),
    ((T, FREQS, "sbhd"), {"start_positions": CU[:1]}, r"start_positions: expected shape \(2,\)"),
    ((T, FREQS, "sbhd"), {"start_positions": CU.long()}, "start_positions: expected rank 1"),
    ((T[:, 0], FREQS, "thd"), {}, "cu_seqlens: expected a tensor"),
    ((T[:, 0], FREQS, "thd"), {"cu_seqlens": CU.long()}, "cu_seqlens: expected rank 1"),
    ((T[:, 0], FREQS, "thd"), {"cu_seqlens": torch.zeros(65537, dtype=torch.int32)}, "x: expected at most 65,535"),
    ((torch.zeros(1, 1, 1, 16).expand(8, 2**26, 1, 16), FREQS, "sbhd"), {}, "x: expected at most 65,535"),
    ((torch.zeros(1, 1, 1, 16).expand(8, 2**15, 2**12, 16), FREQS, "sbhd"), {}, r"x: expected offsets below 2\*\*31"),
]


@pytest.mark.parametrize("arguments, options, message", REFUSED)
def test_what_would_end_the_process_is_refused(recorded, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        recorded.rotate(*arguments, **options)


def test_nothing_is_launched_for_no_token(recorded):
    assert recorded.rotate(torch.zeros(0, 2, 16), FREQS, "thd", cu_seqlens=CU[:1]).shape == (0, 2, 16)
    assert recorded.rotate(T[:, :0], FREQS, "sbhd").shape == (8, 0, 3, 16)


@pytest.mark.parametrize("widths", [(16, 16), (24, 16, 8), (16, 8, 24), (32, 16, 16)])
def test_widths_that_do_not_fit_are_refused(recorded, widths):
    with pytest.raises(ValueError, match="widths: expected multiples"):
        recorded.rotate_qkv(torch.zeros(8, 2, 3, 48), FREQS, FREQS, widths, "sbhd")
    with pytest.raises(ValueError, match="qkv: expected"):
        recorded.rotate_qkv(torch.zeros(2, 8, 3, 48).transpose(0, 1), FREQS, FREQS, (16, 16, 16), "sbhd")


# --------------------------------------------------------------------------------------------------- where it lies


def library_file(root: Path, version: str, place: str = te_library.PLACES[0]) -> Path:
    file = root / f"{te_library.DISTRIBUTION}-{version}" / place
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a library")
    return file


def test_the_library_is_found_by_version(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "PEERS", tmp_path)
    monkeypatch.setattr(te_library.packages.locate, "__defaults__", (None, tmp_path))
    monkeypatch.setattr(packages, "_check", lambda package, version, peers: None)
    first, second = library_file(tmp_path, "2.18.0"), library_file(tmp_path, "2.20.2", te_library.PLACES[1])
    assert [te_library.find(version) for version in VERSIONS] == [first, second]
    with pytest.raises(packages.NotInstalled, match="2.19.0 with .*libtransformer_engine.so not installed"):
        te_library.find("2.19.0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_kernels_need_a_gpu(tmp_path):
    with pytest.raises(packages.NotInstalled, match="need a GPU"):
        te_library.load(library_file(tmp_path, "2.20.2"))


def test_a_library_that_does_not_load_says_why(tmp_path):
    with pytest.raises(packages.NotInstalled, match="libtransformer_engine.so does not load: .*libtransformer_engine"):
        te_library.Library(library_file(tmp_path, "2.20.2"))


# --------------------------------------------------------------------------------------------------- the adapters


def test_the_variable_is_put_back(monkeypatch):
    monkeypatch.setenv(te_source.VARIABLE, "x")
    with te_source.forced(None):
        assert te_source.VARIABLE not in os.environ
    assert os.environ[te_source.VARIABLE] == "x"
    monkeypatch.delenv(te_source.VARIABLE)
    with pytest.raises(RuntimeError), te_source.forced(True):
        raise RuntimeError
    assert te_source.VARIABLE not in os.environ
