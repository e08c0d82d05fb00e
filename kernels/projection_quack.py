"""The product that rotates of quack 0.6 (https://github.com/Dao-AILab/quack), for the calls that it serves.

quack's kernel is written in CuTe DSL. Two groups of warps take turns: one rotates its tile while the other multiplies,
so the rotation costs the product 1 to 2 %. The kernel computes the cosines and sines of float32 positions, and it turns
v by an angle of zero. So tables, norms, and tokens without a position are not for it, and where a feature of v is not
finite, the other member of its pair becomes NaN.
"""

from functools import cache
from types import ModuleType

import torch

from ropelab.kernels.angles_torch import FACTOR, HIGH
from ropelab.kernels.rotation import Norm, Rotation
from ropelab.kernels.tensors import ProjectionTensors

_DTYPES = torch.float16, torch.bfloat16
_POSITIONS = 2**24
"""Float32 represents the positions below."""
_ONE = 0x3F800000
"""The bits of 1 in float32."""


@cache
def _epilogues() -> ModuleType | None:
    """The module of quack's epilogues; None where no release is installed whose functions this module knows."""
    try:
        import quack
        from quack.epilogue import rotary
    except Exception:  # its DSL raises errors of its own where libraries do not fit
        return None
    return rotary if quack.__version__.startswith("0.6.") else None


def serves(t: ProjectionTensors, rotation: Rotation, q_heads: int, k_heads: int, first_position: int = 0) -> bool:
    """Whether quack can serve a call: frequencies, adjacent pairs, positions that count up, and no norm."""
    plain = not (rotation.full_width or rotation.axes or rotation.offsets or rotation.first)
    adjacent = rotation.interleaved and rotation.out_interleaved and not rotation.transpose
    return (
        t.x.is_cuda and torch.cuda.get_device_capability(t.x.device)[0] == 9 and _epilogues() is not None
        and t.x.dtype in _DTYPES and t.x.numel() > 0 and plain and adjacent and rotation.table_free
        and t.positions is None and t.q_weight is None and 0 <= first_position <= _POSITIONS - t.qkv.shape[1]
        and all(number % 8 == 0 for number in t.weight.shape) and t.slots is None
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (t.qkv, t.x, t.weight))
        and _columns(t.cos, (q_heads, k_heads), t.qkv.shape[3]) is not None
    )  # fmt: skip


def project(
    t: ProjectionTensors,
    rotation: Rotation,
    q_heads: int,
    k_heads: int,
    norm: Norm | None = None,
    first_position: int = 0,
) -> None:
    """`projection_torch.project`, for the calls that `serves` allows."""
    batch, tokens, _, head_dim = t.qkv.shape
    operands: dict[str, torch.Tensor | None] = {"freq": _columns(t.cos, (q_heads, k_heads), head_dim)}
    position = torch.arange(first_position, first_position + tokens, dtype=torch.float32, device=t.x.device)
    operands["pos"] = position.repeat(batch)[None]
    epilogues, name = _epilogues(), "rope_posfreq_epi"
    if t.bias is not None:
        name, operands["bias"] = "rope_posfreq_bias_epi", t.bias
    x, qkv = t.x.flatten(0, -2), t.qkv.view(batch * tokens, -1)
    getattr(epilogues, name)(x, t.weight.T, out={"D": qkv}, tuned=False, **operands)


def _columns(frequencies: torch.Tensor, heads: tuple[int, int], head_dim: int) -> torch.Tensor | None:
    """The frequencies of all columns of the product as quack reads them, float32 ``[1, N]``.

    A pair of q or k has two numbers, whose sum is its frequency in turns. All other features have zeros. The columns
    are kept with the frequencies. None where quack cannot have them: with an attention factor, which would multiply v
    too; and in the capture of a CUDA graph that no call with these frequencies preceded, because the first call waits
    for the GPU.
    """
    version = 0 if frequencies.is_inference() else frequencies._version
    key = frequencies.data_ptr(), frequencies.shape, frequencies.device, version, heads, head_dim
    if key not in _known:
        if torch.cuda.is_current_stream_capturing():
            return None
        if len(_known) == _MOST_KNOWN:
            del _known[next(iter(_known))]
        _known[key] = frequencies, _made_columns(frequencies, *heads, head_dim)
    return _known[key][1]


_known: dict[tuple, tuple[torch.Tensor, torch.Tensor | None]] = {}
_MOST_KNOWN = 16


def _made_columns(frequencies: torch.Tensor, q_heads: int, k_heads: int, head_dim: int) -> torch.Tensor | None:
    given = frequencies.cpu()
    if (given[:, FACTOR] != _ONE).any():
        return None
    turns = given[:, HIGH].double() / 2.0**64
    first = turns.float()
    pairs = torch.stack((first, (turns - first.double()).float()), 1).flatten()
    head = torch.nn.functional.pad(pairs, (0, head_dim - len(pairs)))
    columns = torch.cat((head.repeat(q_heads + k_heads), head.new_zeros(k_heads * head_dim)))
    return columns[None].to(frequencies.device)
