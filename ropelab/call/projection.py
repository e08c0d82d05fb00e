"""The projection to q, k and v with a rotation, and its gradient, for plain tensors and as operators of the dispatcher.

A call takes one of several paths (`path`). The results of all paths are the same up to their roundings:

==========  ==================================================  ==================================================
path        runs                                                rounds a feature of q or k to the dtype of x
==========  ==================================================  ==================================================
"pass"      the product of PyTorch, then a pass over q and k    after the product and after the rotation
"product"   one kernel, which rotates before it writes, also    after the rotation
            straight into a paged cache
"quack"     the same, by quack, where it is installed           after the rotation
==========  ==================================================  ==================================================
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch

from ropelab.arguments import check_tensor, dtype_name, integer
from ropelab.call.checks import check_places, check_rope_arguments
from ropelab.call.operation import must_dispatch, operator
from ropelab.call.paged_cache import check_write
from ropelab.call.qk_norm import BACKWARD, FORWARD, check_qk_norm_arguments, run_forward
from ropelab.call.rotation import ROTATE, rotate_or_dispatch
from ropelab.call.where import Where, along_axes
from ropelab.kernels import backend, projection_quack
from ropelab.kernels.rotation import Norm
from ropelab.kernels.tensors import ProjectionTensors
from ropelab.layout.seq_format import check_seq_format

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
        return x.unflatten(-1, (-1, self.dim)).split((self.q, self.k, self.k), -2)


def heads_of_arguments(x, weights: Tensors, biases: Tensors, q_heads: int, k_heads: int, seq_format: str) -> Heads:
    """The heads of a call; raise TypeError or ValueError for arguments that no product can serve, by their metadata."""
    q_heads, k_heads = integer("q_heads", q_heads, at_least=1), integer("k_heads", k_heads, at_least=1)
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
        check_tensor(name, weight, (2,), f"[{count} heads of D, {x.shape[-1]}]")
        dim = dim or weight.shape[0] // count
        if weight.shape != (count * dim, x.shape[-1]) or not dim:
            rows = f"a multiple of {count}" if i == 0 else f"{count * dim}"
            raise ValueError(f"{name}: expected [{rows}, {x.shape[-1]}] for {count} heads, got {tuple(weight.shape)}")
        _check_like(name, weight, x)
    for i, (bias, weight) in enumerate(zip(biases, weights, strict=False)):
        name = _name("bias", i, weights)
        check_tensor(name, bias, (1,), f"({weight.shape[0]},)")
        if bias.shape[0] != weight.shape[0]:
            raise ValueError(f"{name}: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}")
        _check_like(name, bias, x)
    return Heads(q_heads, k_heads, dim)


def check_projection(x, norms: Norms, where: Where, heads: Heads) -> None:
    """Raise TypeError or ValueError for angles, positions and weights of norms that do not fit, by their metadata."""
    number = x[..., :1].unsqueeze(-1)  # views of it have the shapes, the dtype and the device of q and of k
    q, k = (number.expand(*x.shape[:-1], count, heads.dim) for count in (heads.q, heads.k))
    if norms[0] is None and norms[1] is None:
        check_rope_arguments(q, k, where)
    else:
        check_qk_norm_arguments((q, k, *norms), where)


def run_projection(
    x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, heads: Heads, eps: float, keep: bool
) -> tuple[torch.Tensor, ...]:
    """q and k, normalized and rotated, v, and the tensor ``[..., N]`` of which they are views.

    Args:
        x, weights, biases: they have passed `heads_of_arguments`.
        keep: keep the q and k that a norm reads, for its gradient. The last tensor is then the product as it is, v is a
            part of it, and q and k are tensors of their own.
    """
    given = x, weights, biases, norms, where, heads, eps, keep
    if not dispatched(x, weights[0]):
        return _projected(*given)
    check_projection(x, norms, where, heads)
    qkv, *turned = qkv_rope(x, weights, biases, *norms, *where.for_operators, *heads, eps, keep)
    q, k, v = heads.split(qkv)
    return *(turned or (q, k)), v, qkv


def run_into_cache(
    x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, heads: Heads, eps: float, cached: Tensors
) -> torch.Tensor | None:
    """q, whose k and v a single kernel wrote into a paged cache; or None where the pass is faster or has to serve.

    Args:
        x, weights, biases: plain tensors that have passed `heads_of_arguments`.
        cached: the key cache, the value cache and the slots.
    """
    if "product" not in paths(Work(x.shape[:-1].numel(), x.shape[-1], sum(heads.features))):
        return None
    return _one_kernel("product", x, weights, biases, norms, where, heads, eps, cached)


def run_gradient(q_grad, k_grad, v_grad, qkv, norms: Norms, where: Where, eps: float, norm_grads: bool) -> Tensors:
    """The gradient of the product ``[..., N]`` and, with ``norm_grads``, the gradients of the weights of the norms.

    Args:
        q_grad, k_grad, v_grad: the gradients of q, k and v.
        qkv: the product that the norms read; None without norms.
    """
    given = q_grad, k_grad, v_grad, qkv, *norms, *where.for_operators, eps, norm_grads
    return (qkv_rope_backward if must_dispatch(q_grad, k_grad) else _backward)(*given)


# ----------------------------------------------------------------------------------------------------------- the paths


class Work(NamedTuple):
    """The size of a product: T, K and N."""

    tokens: int
    inputs: int
    outputs: int


def paths(work: Work) -> tuple[str, ...]:
    """The paths for this size, the fastest first, by the studies `projection` and `projection_blocks`.

    Where quack is installed and serves the call, it comes first from `_QUACK_TOKENS` tokens on. Another path is faster
    in 4 of these 36 sizes on an H100 and in 5 on an H200, by at most 5 %.

    The programs of the path "product" compute tiles of 128 tokens and 256 features, one on each multiprocessor in each
    turn. The rotation costs them 2 to 4 % of the product, and the pass costs 5 to 22 %. The rest decides: the share of
    all turns that is no work, because tiles reach past the end or the last turn has few tiles.
    """
    tiles = -(-work.tokens // _TILE_TOKENS) * -(-work.outputs // _TILE_FEATURES)
    places = -(-tiles // _MULTIPROCESSORS) * _MULTIPROCESSORS * _TILE_TOKENS * _TILE_FEATURES
    found = ("quack",) if work.tokens >= _QUACK_TOKENS else ()
    return (*found, "product", "pass") if work.tokens * work.outputs >= _LEAST_WORK * places else (*found, "pass")


_TILE_TOKENS, _TILE_FEATURES, _MULTIPROCESSORS = 128, 256, 132
"""The numbers of `projection_triton.ProjectionTile`, and of an H100 or H200."""
_LEAST_WORK = 0.9
_QUACK_TOKENS = 2048


def _projected(
    x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, heads: Heads, eps: float, keep: bool
) -> tuple[torch.Tensor, ...]:
    """`run_projection` of plain tensors."""
    for path in () if keep else paths(Work(x.shape[:-1].numel(), x.shape[-1], sum(heads.features)))[:-1]:
        qkv = _one_kernel(path, x, weights, biases, norms, where, heads, eps)
        if qkv is not None:
            return *heads.split(qkv), qkv
    return _pass(x, weights, biases, norms, where, heads, eps, keep)


def _pass(
    x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, heads: Heads, eps: float, keep: bool
) -> tuple[torch.Tensor, ...]:
    qkv = product(x, weights, biases)
    q, k, v = heads.split(qkv)
    if norms[0] is None:
        rotate_or_dispatch(q, k, where, True)
    elif keep:
        q, k = run_forward(q, k, *norms, where, eps)
    else:
        _NORM_IN_PLACE((q, k, *norms), where, eps)
    return q, k, v, qkv


def product(x, weights: Tensors, biases: Tensors, plain: bool = True) -> torch.Tensor:
    """``x W^T + b``, ``[..., N]``. Three weights take three products, and plain tensors need no copy without a bias.

    Args:
        plain: x and the weights are plain tensors that nobody differentiates.
    """
    linear = torch.nn.functional.linear
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


def _one_kernel(
    path: str, x, weights: Tensors, biases: Tensors, norms: Norms, where: Where, heads: Heads, eps: float,
    cached: Tensors = (),
) -> torch.Tensor | None:  # fmt: skip
    """The result of the kernel of a path, or None where the kernel does not serve the call.

    Args:
        cached: the key cache, the value cache and the slots, if the kernel writes k and v there; the result is then q.
    """
    contiguous = len(weights) == 1 and x.is_contiguous() and weights[0].is_contiguous()
    if not contiguous or where.options.seq_format == "sbhd":
        return None
    norm = None if norms[0] is None else Norm(eps)
    if cached:
        q = x.new_empty((*x.shape[:-1], heads.q, heads.dim))
        kv = x[..., :1].unsqueeze(-1).expand(*x.shape[:-1], heads.k, heads.dim)  # for checks of metadata
        unused = (None,) * 6
        check_write((*cached[:2], q, *unused, q, kv, kv, None, cached[2], *norms, None, None, None), where, norm)
        qkv = q.flatten(-2)
    else:
        check_projection(x, norms, where, heads)
        qkv = x.new_empty((*x.shape[:-1], sum(heads.features)))
        check_places(heads.split(qkv)[0], where)
    qkv_rows, rows = (t.unsqueeze(0) if t.ndim == 2 else t for t in (qkv, x))
    positions = where.positions
    if positions is not None and not where.options.offsets:
        axes = where.options.axes
        positions = positions if axes is None else along_axes(positions, axes).movedim(0, -1)
        positions = positions.expand(*rows.shape[:2], *positions.shape[2:])
    tensors = ProjectionTensors(
        qkv_rows, rows, weights[0], biases[0] if biases else None, *norms, *where.angles.for_kernels, positions, *cached
    )
    kernels = projection_quack if path == "quack" else backend("projection", x)
    if not kernels.serves(tensors, where.rotation, *heads, where.first_position):
        return None
    kernels.project(tensors, where.rotation, *heads, where.first_position, norm)
    return q if cached else qkv


_NORM_IN_PLACE = replace(FORWARD, make=lambda given, where, eps: given[:2], writes=2)


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
    """The operator ``ropelab::qkv_rope``, see `run_projection`."""
    where, heads, (eps, keep) = Where.of_operator(*rest[:-5]), Heads(*rest[-5:-2]), rest[-2:]
    q, k, _, qkv = _projected(x, weights, biases, (q_weight, k_weight), where, heads, eps, keep)
    return [qkv, q, k] if keep else [qkv]


def _forward_fake(x, *rest) -> list[torch.Tensor]:
    heads, keep = Heads(*rest[-5:-2]), rest[-1]
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
    "SymInt q_heads, SymInt k_heads, SymInt head_dim, float eps, bool keep", "Tensor[]", _forward, _forward_fake,
)  # fmt: skip
qkv_rope_backward = operator(
    "ropelab::qkv_rope_backward",
    "Tensor q_grad, Tensor k_grad, Tensor v_grad, Tensor? qkv, Tensor? q_weight, Tensor? k_weight",
    "float eps, bool norm_grads", "Tensor[]", _backward, _backward_fake,
)  # fmt: skip


def dispatched(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a call must go through the dispatcher, see `must_dispatch`."""
    return must_dispatch(x, weight, ("x", "weight"))


def _name(name: str, i: int, tensors: Tensors) -> str:
    return name if len(tensors) == 1 else f"{name}[{i}]"


def _check_like(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    if weight.dtype != x.dtype:
        raise TypeError(f"{name}: expected x's dtype {dtype_name(x.dtype)}, got {dtype_name(weight.dtype)}")
    if weight.device != x.device:
        raise ValueError(f"{name}: expected x's device {x.device}, got {weight.device}")
