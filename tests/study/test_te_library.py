"""TransformerEngine's C API: the calls follow its headers, and calls that it would refuse are refused before."""

import contextlib
import ctypes
import json
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


class Recorder:
    """A library that notes its calls and the tensors of its handles."""

    def __init__(self):
        self.handles, self.called, self.alive = {}, [], 0

    def nvte_create_tensor(self, mode):
        self.alive += 1
        return len(self.handles) + 1

    def nvte_set_tensor_param_v2(self, handle, param, pointer, size):
        basic = te_library._BasicTensor.from_buffer_copy(ctypes.string_at(pointer, size))
        shape = tuple(basic.shape.data[: basic.shape.ndim])
        self.handles[handle] = (basic.data_ptr, basic.dtype, shape)

    def nvte_destroy_tensor(self, handle):
        self.alive -= 1

    def __getattr__(self, name):
        return lambda *arguments: self.called.append((name, arguments))


@pytest.fixture
def recorded(monkeypatch):
    """A library that records, on tensors of the CPU."""
    check = te_library._check

    def on_cpu(name, x, like, rank, dtypes, *, contiguous=False):
        wrong = x.ndim != rank or x.dtype not in dtypes or (contiguous and not x.is_contiguous())
        return check(name, x, like, rank, dtypes, contiguous=contiguous) if wrong else None

    monkeypatch.setattr(te_library, "_check", on_cpu)
    monkeypatch.setattr(te_library, "_stream", lambda x: 77)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    library = te_library.Library.__new__(te_library.Library)
    library.file, library._c = Path("recorder"), Recorder()
    return library


def named(version: str, call) -> dict[str, object]:
    """The arguments of a recorded call by the names of the header."""
    name, arguments = call
    return dict(zip((parameter for _, parameter in parameters(version, name)), arguments, strict=True))


@pytest.mark.peers
@pytest.mark.parametrize("inverse", [False, True])
def test_dense_tensors_arrive_by_their_names(recorded, inverse):
    t = torch.randn(3, 6, 4, 20)[..., :16].transpose(0, 1)  # [s, b, h, d] with strides of its own
    freqs, starts = torch.zeros(12, 1, 1, 8), torch.zeros(3, dtype=torch.int32)
    options = {"interleaved": True, "start_positions": starts, "cp_size": 2, "cp_rank": 1}
    y = recorded.rotate(t, freqs, "sbhd", inverse=inverse, **options)
    assert y.is_contiguous() and y.shape == t.shape and recorded._c.alive == 0
    (call,) = recorded._c.called
    assert call[0] == f"nvte_fused_rope_{'backward' if inverse else 'forward'}"
    values = named("2.20.2", call)
    assert {name: values[name] for name in ("qkv_format", "interleaved", "cp_size", "cp_rank", "stream")} == {
        "qkv_format": 0, "interleaved": True, "cp_size": 2, "cp_rank": 1, "stream": 77
    }  # fmt: skip
    assert [values[name] for name in ("s", "b", "h", "d", "d2")] == [6, 3, 4, 16, 8]
    strides = ("stride_s_or_t", "stride_b", "stride_h", "stride_d")
    assert [values[name] for name in strides] == [t.stride(i) for i in range(4)]
    tensors = [values[name] for name in list(values)[:5]]
    pointers = [recorded._c.handles[handle][0] for handle in tensors]
    assert pointers == [t.data_ptr(), None, freqs.data_ptr(), starts.data_ptr(), y.data_ptr()]
    assert recorded._c.handles[tensors[1]] == (None, 4, (0,)), "a tensor that is not given"


@pytest.mark.peers
def test_packed_tensors_arrive_by_their_names(recorded):
    t, cu = torch.randn(10, 2, 16), torch.tensor([0, 4, 10], dtype=torch.int32)
    recorded.rotate(t, torch.zeros(32, 1, 1, 16), "thd", cu_seqlens=cu)
    values = named("2.20.2", recorded._c.called[0])
    assert [values[name] for name in ("qkv_format", "s", "b", "h", "d", "d2")] == [2, 32, 2, 2, 16, 16]
    assert [values[name] for name in ("stride_s_or_t", "stride_b", "stride_h", "stride_d")] == [32, 0, 16, 1]
    assert recorded._c.handles[values["input"]][2] == (10, 2, 16), "the library reads the number of tokens"


@pytest.mark.peers
def test_packed_qkv_arrives_by_its_names(recorded):
    qkv, freqs = torch.randn(2, 6, 3, 80), torch.zeros(6, 1, 1, 12)
    q, k, v = recorded.rotate_qkv(qkv, freqs, freqs, (48, 16, 16), "bshd")
    assert [tuple(x.shape) for x in (q, k, v)] == [(2, 6, 9, 16), (2, 6, 3, 16), (2, 6, 3, 16)]
    gradient = recorded.rotate_qkv_backward((q, k, v), freqs, freqs, (48, 16, 16), "bshd")
    assert gradient.shape == qkv.shape
    for call in recorded._c.called:
        values = named("2.20.2", call)
        assert [values[name] for name in ("s", "b", "h", "d", "d2")] == [6, 2, 3, 16, 12]
        assert [values[f"qkv_split_arg_list_{i}"] for i in range(3)] == [48, 16, 16]


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
    assert not recorded._c.called and recorded._c.alive == 0


def test_nothing_is_launched_for_no_token(recorded):
    assert recorded.rotate(torch.zeros(0, 2, 16), FREQS, "thd", cu_seqlens=CU[:1]).shape == (0, 2, 16)
    assert recorded.rotate(T[:, :0], FREQS, "sbhd").shape == (8, 0, 3, 16)
    assert not recorded._c.called


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


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs Linux's list of loaded libraries")
def test_a_library_of_another_version_is_replaced_by_the_library_beside_the_loaded_one():
    (loaded,) = te_library._loaded("libtorch_cpu.so")
    words = "undefined symbol: _ZTVN5c10, version libtorch_cpu.so"
    refused = te_library._REFUSED.match(f"/usr/lib/x86_64-linux-gnu/libc10.so: {words}")
    assert next(te_library._instead(refused)) == loaded.parent / "libc10.so"
    assert list(te_library._loaded("libtorch_cpu.so.9")) == []


def test_a_library_that_the_loader_does_not_find_is_sought_in_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "nvidia" / "cudnn" / "lib" / "libropelab_cudnn.so.9"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    words = "cannot open shared object file: No such file or directory"
    assert list(te_library._instead(te_library._REFUSED.match(f"{file.name}: {words}"))) == [file]


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


# ------------------------------------------------------------------------------------------------- the file of a commit


def test_a_missing_library_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "PEERS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    te_source.library.cache_clear()
    with pytest.raises(packages.NotInstalled, match=r"at 6c46696f1: .*fused_rope.cu is CUDA code"):
        te_source.library()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(packages.NotInstalled, match=r"fused_rope.cu is not compiled for sm_90"):
        te_source.library()
    library = tmp_path / "compiled" / "transformer-engine-3057-6c46696f1-sm_90.so"
    library.parent.mkdir()
    library.touch()
    library.with_suffix(".json").write_text(json.dumps({"sha256": packages.sha256(library)}))
    loaded = []
    monkeypatch.setattr(te_library, "load", lambda path: loaded.append(path) or path)
    assert te_source.library() == library == te_source.library() and loaded == [library]
    te_source.library.cache_clear()
