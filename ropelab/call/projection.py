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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ropelab.arguments import check_dtype, check_like, check_shape, check_tensor
from ropelab.call.checks import check_places, check_rope_arguments
from ropelab.call.dispatcher import must_dispatch, operator
from ropelab.call.memory import empty_heads
from ropelab.call.operation import Operation, Tensors, views_of
from ropelab.call.projection_paths import ProductSize, fastest
from ropelab.call.qk_norm import BACKWARD, FORWARD, check_qk_norm_arguments
from ropelab.call.rotation import ROTATE
from ropelab.call.where import Options, Where
from ropelab.kernels import projection_quack
from ropelab.kernels.rotation import Norm, Rotation
from ropelab.kernels.tensors import ProjectionTensors
from ropelab.layout.seq_format import check_seq_format


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


class Call(NamedTuple):
    """What a projection is told beside tensors and angles.

    Attributes:
        q_heads, k_heads: as in `Heads`.
        norm: the norm of q and k, or None.
        path: one of `projection_paths.PATHS`.
        keep: keep the q and k that a norm reads, for its gradient.
    """

    q_heads: int
    k_heads: int
    norm: Norm | None
    path: str
    keep: bool = False


def three(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, and None for those that three weights or three biases would have besides."""
    return [*tensors, *[None] * (3 - len(tensors))]


def factors(given: Tensors) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """x, the weights and the biases, of ``(x, *three(weights), *three(biases), ...)``."""
    weights, biases = ([x for x in part if x is not None] for part in (given[1:4], given[4:7]))
    return given[0], weights, biases


def heads_of(given: Tensors, call: Call, seq_format: str) -> Heads:
    """The heads of a call; raise TypeError or ValueError for arguments that no product can serve, by their metadata.

    Args:
        given: see `factors`.
    """
    (x, weights, biases), (q_heads, k_heads, *_) = factors(given), call
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
        name = "weight" if len(weights) == 1 else f"weight[{i}]"
        check_tensor(name, weight, (2,), "[heads * D, K]")
        dim = dim or weight.shape[0] // count
        if weight.shape != (count * dim, x.shape[-1]) or not dim:
            rows = f"a multiple of {count}" if i == 0 else f"{count * dim}"
            raise ValueError(f"{name}: expected [{rows}, {x.shape[-1]}] for {count} heads, got {tuple(weight.shape)}")
        check_like(name, weight, x, "x")
    for i, (bias, weight) in enumerate(zip(biases, weights, strict=False)):
        name = "bias" if len(weights) == 1 else f"bias[{i}]"
        check_shape(name, bias, weight.shape[:1], x, "x")
        check_dtype(name, bias, x, "x")
    return Heads(q_heads, k_heads, dim)


def check_call(given: Tensors, where: Where, call: Call) -> Heads:
    """`heads_of` a call of `qkv_rope`; raise TypeError or ValueError also for its angles, positions and norms."""
    heads = heads_of(given, call, where.options.seq_format)
    q, k = heads_like(given[0], heads)
    if call.norm is None:
        check_rope_arguments(q, k, where)
    else:
        check_qk_norm_arguments((q, k, *given[7:9]), where)
        if where.angles.table_free:
            raise ValueError("frequencies: expected cos and sin beside q_weight, got frequencies")
    return heads


def heads_like(x, heads: Heads) -> Iterator[torch.Tensor]:
    """Tensors with the shapes, the dtype and the device of q and of k."""
    number = x[..., :1].unsqueeze(-1)
    return (number.expand(*x.shape[:-1], count, heads.dim) for count in (heads.q, heads.k))


def run_projection(given: Tensors, where: Where, call: Call) -> tuple[torch.Tensor, ...]:
    """q and k, normalized and rotated, v, and the tensor ``[..., heads, D]`` of which they are views.

    With ``call.keep`` the last tensor is the product as it is, v is a part of it, and q and k are tensors of their own.

    Args:
        given: the tensors of `PROJECT`.
    """
    (x, weights, biases), norms = factors(given), given[7:9]
    if not must_dispatch(x, weights[0], PROJECT.names[:2]):
        return PROJECT(given, where, call)
    heads, eps = check_call(given, where, call), 0.0 if call.norm is None else call.norm.eps
    qkv, *turned = qkv_rope(x, weights, biases, *norms, *where.for_operators, *heads, eps, call.keep, call.path)
    y = qkv.unflatten(-1, (-1, heads.dim))
    q, k, v = heads.apart(y)
    return *(turned or (q, k)), v, y


def run_gradient(q_grad, k_grad, v_grad, qkv, norms: Tensors, where: Where, eps: float, norm_grads: bool) -> Tensors:
    """The gradient of the product ``[..., N]`` and, with ``norm_grads``, the gradients of the weights of the norms.

    Args:
        q_grad, k_grad, v_grad: the gradients of q, k and v.
        qkv: the product that the norms read; None without norms.
    """
    given = q_grad, k_grad, v_grad, qkv, *norms, *where.for_operators, eps, norm_grads
    return (qkv_rope_backward if must_dispatch(q_grad, k_grad) else _backward)(*given)


# ----------------------------------------------------------------------------------------------------------- the paths


class Projection(Operation):
    """An operation that begins with a product, on one of the paths; x is the first tensor that it only reads.

    Its number is a `Call`.
    """

    def prepare(self, tensors: Tensors, where: Where, call: Call) -> Callable:  # type: ignore[override]
        """As of `Operation`."""
        x, weights, _ = factors(tensors[self.writes :])
        heads, path, launch = heads_of(tensors[self.writes :], call, where.options.seq_format), call.path, None
        if path == "auto":
            features, normed = heads.features, tensors[self.names.index("q_weight")] is not None
            size = ProductSize(x.shape[:-1].numel(), x.shape[-1], sum(features), sum(features[:2]), normed)
            path = fastest(size, x.device)
        if path != "pass" and len(weights) == 1:
            launch = self.by_kernel(path, tensors, where, heads, call)
        if launch is None:
            check_served(call.path)
            launch = self.by_pass(tensors, where, heads, call)
        return launch

    def by_kernel(self, path: str, tensors: Tensors, where: Where, heads: Heads, call: Call) -> Callable | None:
        """The launch of a kernel that turns what it multiplies, or None where it does not serve the call.

        It makes q, k, v and the tensor of all heads.
        """
        shape = *tensors[0].shape[:-1], heads.q + 2 * heads.k, heads.dim

        def for_kernel(tensors: Tensors, y: torch.Tensor) -> tuple:
            x, weight, _, _, bias, _, _, q_weight, k_weight, *angles = tensors
            return None, None, x, weight, bias, None, q_weight, k_weight, y, *angles

        if call.keep:
            return None
        if path == "quack":
            launch: Any = partial(_launch_quack, where.rotation, where.options, heads)
        else:
            launch = KERNEL.prepare(for_kernel(tensors, tensors[0].new_empty(shape)), where, heads, call.norm)

        def run(tensors: Tensors, first_position: int, rows: int) -> tuple:
            y = tensors[0].new_empty(shape)
            launch(for_kernel(tensors, y), first_position, rows)
            return *heads.apart(y), y

        return None if launch is None else run

    def by_pass(self, tensors: Tensors, where: Where, heads: Heads, call: Call) -> Callable:
        """The launch of the pass, behind the product of PyTorch. It makes what `by_kernel` makes."""
        x, norm, norms = tensors[0], call.norm, slice(9 if call.norm is None else 7, 9)
        shape = *x.shape[:-1], heads.q + 2 * heads.k, heads.dim

        def turned(y: torch.Tensor) -> tuple:
            q, k, v = heads.apart(y)
            return q, k, *((empty_heads(q), empty_heads(k)) if call.keep else (q, k)), v

        q, k, *made, _ = turned(x.new_empty(shape))
        operation, numbers = (ROTATE, ()) if norm is None else (FORWARD, (norm.eps,))
        launch = operation.prepare((q, k, *tensors[norms], *made, *tensors[9:]), where, *numbers)

        def run(tensors: Tensors, first_position: int, rows: int) -> tuple:
            y = product(*factors(tensors)).view(shape)
            q, k, *made, v = turned(y)
            launch((q, k, *tensors[norms], *made, *tensors[9:]), first_position, rows)
            return *made, v, y

        return run


def check_served(path: str) -> None:
    """Raise ValueError for a path that a caller asked for, and that does not serve the call."""
    if path not in ("auto", "pass"):
        raise ValueError(f"path: expected 'auto' or 'pass' for a call that {path!r} does not serve, got {path!r}")


def _launch_quack(rotation: Rotation, options: Options, heads: Heads, tensors, first_position: int, rows: int) -> None:
    t = views_of(ProjectionTensors(*tensors), options)
    if not projection_quack.serves(t, rotation, heads.q, heads.k, first_position):
        check_served("quack")
    projection_quack.project(t, rotation, heads.q, heads.k, None, first_position)


def product(x, weights: Sequence, biases: Sequence, plain: bool = True) -> torch.Tensor:
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
    numbers=lambda heads, norm: (heads.q, heads.k, norm),
)  # fmt: skip
"""The kernel of the path "product". Calls only use how it is prepared."""
PROJECT = Projection(
    "projection", "project", ProjectionTensors,
    ("x", "weight", "weight[1]", "weight[2]", "bias", "bias[1]", "bias[2]", "q_weight", "k_weight"), check_call,
    check_contents=lambda given, where, call: check_places(given[0].unsqueeze(-1), where), multiplies=True,
    records=True,
)  # fmt: skip


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
    where, (q_heads, k_heads, _, eps, keep, path) = Where.of_operator(*rest[:-6]), rest[-6:]
    call = Call(q_heads, k_heads, None if q_weight is None else Norm(eps), path, keep)
    q, k, _, y = PROJECT((x, *three(weights), *three(biases), q_weight, k_weight), where, call)
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
