"""The rotation that also writes into a paged cache, for plain tensors and as an operator of PyTorch's dispatcher."""

from ropelab.call.checks import check_no_grad
from ropelab.call.operation import Operation, Tensors, operator, write_through
from ropelab.call.paged_cache_checks import NAMES, check_call, check_contents
from ropelab.call.where import Where
from ropelab.kernels import Norm
from ropelab.kernels.tensors import CacheTensors

_IN_PLACE = {"q_out": "q", "k_out": "k", "v_out": "v", "q_nope_out": "q_nope"}
"""An output -> the input that it may be."""

WRITE = Operation(
    "paged_cache", "write", CacheTensors, NAMES, check_call, check_contents=check_contents, writes=9,
    same=_IN_PLACE,
)  # fmt: skip


def write(given: Tensors, where: Where, norm: Norm | None) -> None:
    """Make a call with tensors in the order of `NAMES`: through the dispatcher if `must_dispatch`, else directly."""
    check_no_grad(NAMES, given, where)
    numbers = (0.0, 0.0, True) if norm is None else (norm.eps, norm.weight_offset, norm.first)
    write_through(WRITE, rope_and_cache, given, where, (norm,), numbers, *given[WRITE.writes : WRITE.writes + 2])


def _write(*arguments) -> None:
    """The operator ``ropelab::rope_and_cache``, which writes to its arguments and returns nothing."""
    count = len(NAMES)
    given, where, numbers = arguments[:count], Where.of_operator(*arguments[count:-3]), arguments[-3:]
    WRITE(given, where, None if given[NAMES.index("q_weight")] is None else Norm(*numbers))


_REQUIRED = {"key_cache", "value_cache", "q_out", "q", "k", "v", "slot_mapping"}
_GIVEN = ", ".join(
    f"Tensor{f'({chr(97 + i)}!)' if i < WRITE.writes else ''}{'' if name in _REQUIRED else '?'} {name}"
    for i, name in enumerate(NAMES)
)
rope_and_cache = operator(
    "ropelab::rope_and_cache", _GIVEN, "float eps, float weight_offset, bool norm_first", "()", _write,
    lambda *arguments: None, mutates=NAMES[:WRITE.writes],
)  # fmt: skip
