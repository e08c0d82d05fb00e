"""The rotation that also writes into a paged cache, for plain tensors and as an operator of PyTorch's dispatcher."""

from ropelab.call.operation import Operation, Tensors
from ropelab.call.paged_cache_checks import NAMES, check_call, check_contents
from ropelab.kernels import Norm
from ropelab.kernels.tensors import CacheTensors

Q_OUT = NAMES.index("q_out")
WRITE = Operation(
    "paged_cache", "write", CacheTensors, NAMES, check_call, check_contents=check_contents, writes=9,
    same={"q_out": "q", "k_out": "k", "v_out": "v", "q_nope_out": "q_nope"},
)  # fmt: skip


def _norm(given: Tensors, *flat) -> tuple[Norm | None]:
    return (None if given[NAMES.index("q_weight")] is None else Norm(*flat),)


WRITE.operator("ropelab::rope_and_cache", "float eps, float weight_offset, bool norm_first", read=_norm)
