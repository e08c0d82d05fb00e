"""The projection to q, k and v with a rotation, and its gradient, for plain tensors and as operators of the dispatcher.

A call takes one of several paths (`projection_paths`). The results of all paths are the same up to their roundings:

==========  ==================================================  ==================================================
path        runs                                                rounds a feature of q or k to the dtype of x
==========  ==================================================  ==================================================
"pass"      the product of PyTorch, then a pass over q and k    after the product and after the rotation
"product"   one kernel, which rotates before it writes, also    after the rotation
            straight into a paged cache
"quack"     the same, by quack                                  after the rotation
==========  ==================================================  ==================================================
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from ropelab.arguments import check_tensor, dtype_name
from ropelab.call import operation
from ropelab.call.checks import check_places, check_rope_arguments
from ropelab.call.dispatcher import must_dispatch, operator
from ropelab.call.memory import empty_heads
from ropelab.call.operation import Operation, Prepared, check_plain, properties, views_of
from ropelab.call.projection_paths import ProductSize, fastest
from ropelab.call.qk_norm import BACKWARD, FORWARD, check_qk_norm_arguments
from ropelab.call.rotation import ROTATE
from ropelab.call.where import Options, Where
from ropelab.kernels import projection_quack
from ropelab.kernels.backends import forced_backend
from ropelab.kernels.rotation import MOST_ROWS, Norm, Rotation
from ropelab.kernels.tensors import ProjectionTensors
from ropelab.layout.seq_format import SEQ_AXIS, check_seq_format

Tensors: TypeAlias = Sequence[torch.Tensor]
Norms: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]
"""The weights of the norms of q and of k; or twice None."""


class Heads(NamedTuple):
    """The heads of q, the heads of k, of which v has as many, and the features of a head."""

    q: int
    k: int
    dim: int

    @property
    def features(self) -> tuple[int, int, int]:
        """The features of q, of k and of v, that is, the rows of their weights."""
        return self.q * self.dim, self.k * self.dim, self.k * self.dim

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The views q, k and v ``[..., heads, dim]`` of ``x [..., N]``."""
        return self.apart(x.view(*x.shape[:-1], self.q + 2 * self.k, self.dim))

    def apart(self, heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The views q, k and v of all heads ``[..., q + 2 k, dim]``."""
        return heads.split_with_sizes((self.q, self.k, self.k), -2)


def heads_of_arguments(x, weights: Tensors, biases: Tensors, q_heads: int, k_heads: int, seq_format: str) -> Heads:
    """The heads of a call; raise TypeError or ValueError for arguments that no product can serve, by their metadata."""
    check_seq_format(seq_format)
    if seq_format == "bhsd":
        raise ValueError("seq_format: expected 'bshd', 'sbhd' or 'thd' (a projection has no heads in x), got 'bhsd'")
    axes = ", ".join(axis.upper() for axis in seq_format.replace("hd", "k"))
    check_tensor("x", x, (len(seq_format) - 1,), f"[{axes}] for {seq_format}")
    if not x.shape[-1]:
        raise ValueError(f"x: expected at least one feature, got shape {tuple(x.shape)}")
    counts = (q_heads, k_heads, k_heads) if len(weights) == 3 else (q_heads + 2 * k_heads,)
    dim = 0
    for i, (weight, count) in enumerate(zip(weights, counts, strict=True)):
        name = _name("weight", i, weights)
        check_tensor(name, weight, (2,), "[heads * D, K]")
        dim = dim or weight.shape[0] // count
        if weight.shape != (count * dim, x.shape[-1]) or not dim:
            rows = f"a multiple of {count}" if i == 0 else f"{count * dim}"
            raise ValueError(f"{name}: expected [{rows}, {x.shape[-1]}] for {count} heads, got {tuple(weight.shape)}")
        _check_like(name, weight, x)
    for i, (bias, weight) in enumerate(zip(biases, weights, strict=False)):
        name = _name("bias", i, weights)
        check_tensor(name, bias, (1,), "[heads * D]")
        if bias.shape[0] != weight.shape[0]:
            raise ValueError(f"{name}: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}")
        _check_like(name, bias, x)
    return Heads(q_heads, k_heads, dim)


def check_projection(x, norms: Norms, where: Where, heads: Heads) -> None:
    """Raise TypeError or ValueError for angles, positions and weights of norms that do not fit, by their metadata."""
    q, k = heads_like(x, heads)
    if norms[0] is None and norms[1] is None:
        check_rope_arguments(q, k, where)
        return
    check_qk_norm_arguments((q, k, *norms), where)
    if where.angles.table_free:
        raise ValueError("frequencies: expected cos and sin beside q_weight, got frequencies")


def heads_like(x, heads: Heads) -> Iterator[torch.Tensor]:
    """Tensors with the shapes, the dtype and the device of q and of k."""
    number = x[..., :1].unsqueeze(-1)
    return (number.expand(*x.shape[:-1], count, heads.dim) for count in (heads.q, heads.k))


class Call(NamedTuple):
    """What a projection is told beside tensors and angles.

    Attributes:
        q_heads, k_heads: as in `Heads`.
        eps: the number that a norm adds.
        keep: keep the q and k that a norm reads, for its gradient.
        path: one of `projection_paths.PATHS`.
    """

    q_heads: int
    k_heads: int
    eps: float
    keep: bool
    path: str


def run_projection(
    x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, call: Call
) -> tuple[torch.Tensor, ...]:
    """q and k, normalized and rotated, v, and the tensor ``[..., heads, D]`` of which they are views.

    With ``call.keep`` the last tensor is the product as it is, v is a part of it, and q and k are tensors of their own.
    """
    if not dispatched(x, weights[0]):
        return _projected(x, weights, biases, norms, where, call)
    heads = heads_of_arguments(x, weights, biases, call.q_heads, call.k_heads, where.options.seq_format)
    check_projection(x, norms, where, heads)
    qkv, *turned = qkv_rope(x, weights, biases, *norms, *where.for_operators, *heads, *call[2:])
    y = qkv.unflatten(-1, (-1, heads.dim))
    q, k, v = heads.apart(y)
    return *(turned or (q, k)), v, y


def run_gradient(q_grad, k_grad, v_grad, qkv, norms: Norms, where: Where, eps: float, norm_grads: bool) -> Tensors:
    """The gradient of the product ``[..., N]`` and, with ``norm_grads``, the gradients of the weights of the norms.

    Args:
        q_grad, k_grad, v_grad: the gradients of q, k and v.
        qkv: the product that the norms read; None without norms.
    """
    given = q_grad, k_grad, v_grad, qkv, *norms, *where.for_operators, eps, norm_grads
    return (qkv_rope_backward if must_dispatch(q_grad, k_grad) else _backward)(*given)


# ----------------------------------------------------------------------------------------------------------- the paths


def _projected(
    x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, call: Call
) -> tuple[torch.Tensor, ...]:
    """`run_projection` of plain tensors. A call with a key that an earlier call had makes no check of metadata."""
    angles, positions, first_position, _ = where
    key, prepared, rows = _key(x, weights, biases, norms, where, call), None, 0
    try:
        rows = angles.position_count
        prepared = operation.prepared_calls.get(key)
    except (AttributeError, IndexError, TypeError):  # the checks name the argument that is wrong
        key = None
    try:
        if prepared is None:
            prepared = _prepared(x, weights, biases, norms, where, call)
            operation.prepared_calls.keep(key, prepared)
        if positions is not None or first_position + prepared.seq_len > rows:
            check_places(x.unsqueeze(-1), where)
        given = x, weights, biases, *norms, *angles.for_kernels, positions
        return prepared.launch(given, first_position, rows if rows < MOST_ROWS else MOST_ROWS)
    except RuntimeError:  # a tensor without memory, where others had prepared the call
        _check_plain(weights, biases, norms, where)
        raise


def _key(x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, call: Call) -> Hashable | None:
    angles, positions, _, options = where
    try:
        return (
            call, options, len(weights), forced_backend(), angles.key(), aligned(x, weights[0]),
            *properties((x, *weights, *biases, *norms, positions)),
        )  # fmt: skip
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None


def remember(key: tuple | None, x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, call: Call) -> None:
    """Let calls with ``key``, a key of `Operation.look_up`, share what the call with these arguments has prepared."""
    if key is not None:
        _, recorded, *_ = key
        call = call._replace(keep=recorded and norms[0] is not None)
        prepared = operation.prepared_calls.get(_key(x, weights, biases, norms, where, call))
        if prepared is not None:
            operation.prepared_calls.keep(key, replace(prepared, recorded=recorded))


def run_again(
    prepared: Prepared, x, weight, bias, norms: Norms, cos, sin, positions, offsets
) -> tuple[torch.Tensor, ...]:
    """`run_projection` with one weight, as `Operation.look_up` found it; without ``sin``, ``cos`` are frequencies."""
    if type(offsets) is not int:
        positions, offsets = offsets, 0
    rows = MOST_ROWS if sin is None else cos.shape[-2]
    if positions is not None or offsets + prepared.seq_len > rows:
        check_places(x.unsqueeze(-1), Where.of(cos, sin, positions, offsets, prepared.options))
    given = x, (weight,), () if bias is None else (bias,), *norms, cos, cos if sin is None else sin, positions
    return prepared.launch(given, offsets, rows if rows < MOST_ROWS else MOST_ROWS)


def _check_plain(weights: Tensors, biases: Tensors, norms: Norms, where: Where) -> None:
    named = {"weight": weights, "bias": biases}
    several = [(_name(name, i, given), t) for name, given in named.items() for i, t in enumerate(given)]
    check_plain((*several, *zip(("q_weight", "k_weight"), norms, strict=True), *where.read.items()))


def aligned(x, weight) -> bool:
    """Whether a kernel can move blocks of both, which begin at multiples of 16 bytes."""
    try:
        return (x.data_ptr() | weight.data_ptr()) % 16 == 0
    except (AttributeError, RuntimeError):  # the checks name the argument that is wrong
        return False


def _prepared(x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, call: Call) -> Prepared:
    """Check a call, and choose its path. The launch makes q, k, v and the tensor of all heads."""
    _check_plain(weights, biases, norms, where)
    heads = heads_of_arguments(x, weights, biases, call.q_heads, call.k_heads, where.options.seq_format)
    check_projection(x, norms, where, heads)
    path = call.path
    if path == "auto":
        path = fastest(size_of(x, heads), x.device)
    launch = None
    if path != "pass" and len(weights) == 1 and not call.keep:
        launch = _by_kernel(path, x, weights, biases, norms, where, heads, call.eps)
    if launch is None:
        check_served(call.path)
        launch = _by_pass(x, norms, where, heads, call)
    return Prepared(launch, None, x.shape[SEQ_AXIS[where.options.seq_format]], None, where.options, (call,))


def size_of(x: torch.Tensor, heads: Heads) -> ProductSize:
    """The size of the product of x ``[..., K]``."""
    return ProductSize(x.shape[:-1].numel(), x.shape[-1], sum(heads.features), sum(heads.features[:2]))


def check_served(path: str) -> None:
    """Raise ValueError for a path that a caller asked for, and that does not serve the call."""
    if path not in ("auto", "pass"):
        raise ValueError(f"path: expected 'auto' or 'pass' for a call that {path!r} does not serve, got {path!r}")


def _by_kernel(
    path: str, x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, heads: Heads, eps: float
) -> Callable | None:
    """The launch of a kernel that turns what it multiplies, or None where it does not serve the call."""
    shape, norm = (*x.shape[:-1], heads.q + 2 * heads.k, heads.dim), None if norms[0] is None else Norm(eps)

    def tensors_of(x, weights, biases, q_weight, k_weight, cos, sin, positions):
        bias = biases[0] if biases else None
        y = x.new_empty(shape)
        return None, None, x, weights[0], bias, None, q_weight, k_weight, y, cos, sin, positions

    if path == "quack":
        launch: Any = partial(_launch_quack, where.rotation, where.options, heads)
    else:
        tensors = tensors_of(x, weights, biases, *norms, *where.angles.for_kernels, where.positions)
        launch = KERNEL.prepare(tensors, where, heads, norm)

    def run(given, first_position: int, rows: int):
        tensors = tensors_of(*given)
        launch(tensors, first_position, rows)
        y = tensors[_MADE]
        return *heads.apart(y), y

    return None if launch is None else run


_MADE = ProjectionTensors._fields.index("qkv")


def _launch_quack(rotation: Rotation, options: Options, heads: Heads, tensors, first_position: int, rows: int) -> None:
    t = views_of(ProjectionTensors(*tensors), options)
    if not projection_quack.serves(t, rotation, heads.q, heads.k, first_position):
        check_served("quack")
    projection_quack.project(t, rotation, heads.q, heads.k, None, first_position)


def _by_pass(x, norms: Norms, where: Where, heads: Heads, call: Call) -> Callable:
    """The launch of the pass, behind the product of PyTorch."""
    shape, angles = (*x.shape[:-1], heads.q + 2 * heads.k, heads.dim), (*where.angles.for_kernels, where.positions)
    q, k, _ = heads.apart(x.new_empty(shape))
    made = (empty_heads(q), empty_heads(k)) if call.keep else (q, k)
    if norms[0] is None:
        launch = ROTATE.prepare((q, k, *made, *angles), where)
    else:
        launch = FORWARD.prepare((q, k, *norms, *made, *angles), where, call.eps)

    def run(tensors, first_position: int, rows: int):
        x, weights, biases, q_weight, k_weight, *angles = tensors
        y = product(x, weights, biases).view(shape)
        q, k, v = heads.apart(y)
        made = (empty_heads(q), empty_heads(k)) if call.keep else (q, k)
        weights = () if q_weight is None else (q_weight, k_weight)
        launch((q, k, *weights, *made, *angles), first_position, rows)
        return *made, v, y

    return run


def product(x, weights: Tensors, biases: Tensors, plain: bool = True) -> torch.Tensor:
    """``x W^T + b``, ``[..., N]``. Three weights take three products, and plain tensors need no copy without a bias.

    Args:
        plain: x and the weights are plain tensors that nobody differentiates.
    """
    linear = torch.nn.functional.linear
    if len(weights) == 1 and x.is_contiguous():
        return linear(x, weights[0], *biases)
    rows = x.reshape(-1, x.shape[-1])
    if len(weights) == 1:
        y = linear(rows, weights[0], *biases)
    elif plain:
        features = [len(weight) for weight in weights]
        y = x.new_empty((len(rows), sum(features)))
        for part, weight, bias in zip(y.split(features, 1), weights, biases or (None,) * 3, strict=True):
            if bias is None:
                torch.mm(rows, weight.T, out=part)
            else:  # into a part of a tensor, torch.addmm rounds the product before it adds the bias
                part.copy_(linear(rows, weight, bias))
    else:
        y = torch.cat([linear(rows, w, *b) for w, *b in zip(weights, *([biases] if biases else []), strict=True)], -1)
    return y.view(*x.shape[:-1], y.shape[-1])


KERNEL = Operation(
    "projection", "project", ProjectionTensors, (), lambda given, where, *numbers: None,
    numbers=lambda heads, norm: (heads.q, heads.k, norm), records=True,
)  # fmt: skip
"""The kernel of the path "product". Calls only use how it is prepared, and how it looks up."""


# -------------------------------------------------------------------------------------------------------- the gradient


def _in_one_tensor(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of q, k and v of a new tensor ``[..., N]``."""
    heads = Heads(q.shape[-2], k.shape[-2], q.shape[-1])
    return heads.split(q.new_empty((*q.shape[:-2], sum(heads.features))))


def _make_gradients(given, where: Where, eps: float, norm_grads: bool) -> tuple[torch.Tensor | None, ...]:
    q, k, _, _, *weights = given
    made = [torch.empty_like(w, memory_format=torch.contiguous_format) if norm_grads else None for w in weights]
    return *_in_one_tensor(q, k)[:2], *made


_TURN_BACK = replace(ROTATE, make=lambda given, where: _in_one_tensor(*given)[:2])
_NORM_BACK = replace(BACKWARD, make=_make_gradients)


# -------------------------------------------------------------------------------------------------------- dispatcher


def _forward(x, weights: Tensors, biases: Tensors, q_weight, k_weight, *rest) -> list[torch.Tensor]:
    """The operator ``ropelab::qkv_rope``: the tensor ``[..., N]`` and, with ``keep``, q and k; see `run_projection`."""
    where, (q_heads, k_heads, _, *others) = Where.of_operator(*rest[:-6]), rest[-6:]
    call = Call(q_heads, k_heads, *others)
    q, k, _, y = _projected(x, weights, biases, (q_weight, k_weight), where, call)
    return [y.flatten(-2), q, k] if call.keep else [y.flatten(-2)]


def _forward_fake(x, *rest) -> list[torch.Tensor]:
    heads, keep = Heads(*rest[-6:-3]), rest[-2]
    made = [x.new_empty((*x.shape[:-1], sum(heads.features)))]
    return made + [x.new_empty((*x.shape[:-1], count, heads.dim)) for count in heads[:2]] if keep else made


def _backward(q_grad, k_grad, v_grad, qkv, q_weight, k_weight, *rest) -> list[torch.Tensor]:
    """The operator ``ropelab::qkv_rope_backward``, see `run_gradient`."""
    where, (eps, norm_grads) = Where.of_operator(*rest[:-2]), rest[-2:]
    heads = Heads(q_grad.shape[-2], k_grad.shape[-2], q_grad.shape[-1])
    if qkv is None:
        made = _TURN_BACK((q_grad, k_grad), where.transposed())
    else:
        q, k, _ = heads.split(qkv)
        made = _NORM_BACK((q, k, q_grad, k_grad, q_weight, k_weight), where, eps, norm_grads)
    q, features = made[0], sum(heads.features)
    qkv_grad = q.as_strided((*q.shape[:-2], features), (*q.stride()[:-2], 1))
    heads.split(qkv_grad)[2].copy_(v_grad)
    return [qkv_grad, *(x for x in made[2:] if x is not None)]


def _backward_fake(q_grad, k_grad, v_grad, qkv, q_weight, k_weight, *rest) -> list[torch.Tensor]:
    heads = Heads(q_grad.shape[-2], k_grad.shape[-2], q_grad.shape[-1])
    made = [q_grad.new_empty((*q_grad.shape[:-2], sum(heads.features)))]
    weights = (q_weight, k_weight) if rest[-1] else ()
    return made + [torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights]


qkv_rope = operator(
    "ropelab::qkv_rope", "Tensor x, Tensor[] weights, Tensor[] biases, Tensor? q_weight, Tensor? k_weight",
    "SymInt q_heads, SymInt k_heads, SymInt head_dim, float eps, bool keep, str path", "Tensor[]", _forward,
    _forward_fake,
)  # fmt: skip
qkv_rope_backward = operator(
    "ropelab::qkv_rope_backward",
    "Tensor q_grad, Tensor k_grad, Tensor v_grad, Tensor? qkv, Tensor? q_weight, Tensor? k_weight",
    "float eps, bool norm_grads", "Tensor[]", _backward, _backward_fake,
)  # fmt: skip


def dispatched(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a call must go through the dispatcher, see `must_dispatch`."""
    return must_dispatch(x, weight, ("x", "weight"))


def three(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, and None for those that three weights or three biases would have besides."""
    return [*tensors, *[None] * (3 - len(tensors))]


def _name(name: str, i: int, tensors: Tensors) -> str:
    return name if len(tensors) == 1 else f"{name}[{i}]"


def _check_like(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    if weight.dtype != x.dtype:
        raise TypeError(f"{name}: expected x's dtype {dtype_name(x.dtype)}, got {dtype_name(weight.dtype)}")
    if weight.device != x.device:
        raise ValueError(f"{name}: expected x's device {x.device}, got {weight.device}")
