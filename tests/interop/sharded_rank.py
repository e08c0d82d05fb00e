"""One of two processes that share q and k as DTensors; started by test_ranks.py.

Every sharding of q and k must give the bits that one process gets for the whole, with their gradients. A small model
whose heads, or whose tokens, are shared must have the loss and the gradients of the model in one process.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ropelab
from ropelab.interop import dtensor
from ropelab.layout.seq_format import SEQ_FORMATS
from ropelab.positions.packed import context_parallel_positions

CACHES = "key_cache", "value_cache", "slot_mapping"
SIZES = {"b": 3, "s": 7, "t": 7, "h": 4, "d": 8}
"""Two ranks get 2 and 1 sequences, 4 and 3 tokens."""


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same random numbers on all ranks."""
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


# ---------------------------------------------------------------------------------------------------- single calls


def check_calls(mesh, device: torch.device) -> int:
    """Compare every sharding in every format with one process, bit by bit; the number of comparisons."""
    count = 0
    for seq_format in SEQ_FORMATS:
        for axis in (None, *[i for i, letter in enumerate(seq_format) if letter != "d"]):
            for name, options in cases(seq_format, device).items():
                if seq_format != "bshd" and name not in ("counted", "positions", "offsets"):
                    continue  # each way to give angles and positions once, and what a format can change in all formats
                for k_heads in (2, 1) if axis == seq_format.index("h") else (2,):
                    for dtype in (torch.float32, torch.bfloat16) if name == "counted" else (torch.bfloat16,):
                        compare_call(mesh, seq_format, axis, k_heads, dtype, name, options, device)
                        count += 1
    return count


def cases(seq_format: str, device: torch.device) -> dict[str, dict]:
    """Arguments of a call: name -> positions or offsets, and tables."""
    cos, sin = ropelab.rotary_table(64, 8, device=device)
    tables = {"cos": cos, "sin": sin}
    found: dict[str, dict] = {
        "counted": tables,
        "offset": tables | {"offsets": 5},
        "positions": tables | {"positions": torch.randint(-60, 60, (7,)).to(device)},
        "frequencies": {"frequencies": ropelab.rotary_frequencies(8, device=device)},
    }
    if seq_format != "thd":
        each = torch.randint(0, 50, (3,)).to(device)
        each[1] = ropelab.NO_POSITION
        found["offsets"] = tables | {"offsets": each}
        found["positions of batches"] = tables | {"positions": torch.randint(-60, 60, (3, 7)).to(device)}
        batches = {name: draw(3, 64, 4, device=device, dtype=torch.float32) for name in ("cos", "sin")}
        found["tables of batches"] = batches
    return found


def compare_call(mesh, seq_format, axis, k_heads, dtype, name, options, device) -> None:
    """Raise AssertionError unless a sharded call has the bits of the whole call, and so have its gradients."""
    placement = Replicate() if axis is None else Shard(axis)
    shares_heads = axis == seq_format.index("h") and k_heads == 1
    placements = [placement], [Replicate() if shares_heads else placement]
    shapes = [[{**SIZES, "h": heads}[letter] for letter in seq_format] for heads in (4, k_heads)]
    xs = [draw(*shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    cotangents = [draw(*shape, device=device, dtype=dtype) for shape in shapes]
    expected = ropelab.apply_rope(*xs, seq_format=seq_format, **options)
    expected_grads = torch.autograd.grad(expected, xs, cotangents)

    parts = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(xs, placements, strict=True)]
    found = dtensor.apply_rope(*parts, seq_format=seq_format, **options)
    given = [distribute_tensor(x, mesh, p) for x, p in zip(cotangents, placements, strict=True)]
    grads = torch.autograd.grad(found, parts, given)
    for ours, whole, p in zip((*found, *grads), (*expected, *expected_grads), placements * 2, strict=True):
        assert ours.shape == whole.shape and ours.placements == tuple(p), (seq_format, axis, name)
        assert torch.equal(ours.full_tensor(), whole), (seq_format, axis, k_heads, dtype, name)
    with torch.no_grad():
        overwritten = [x.detach().clone() for x in parts]
        results = dtensor.apply_rope(*overwritten, seq_format=seq_format, inplace=True, **options)
        for x, result, whole in zip(overwritten, results, expected, strict=True):
            assert result is x and torch.equal(x.full_tensor(), whole), ("inplace", seq_format, axis, name)


def check_gradients_of_weights_and_tables(mesh, device: torch.device) -> None:
    """The gradients of norm weights and tables are sums over ranks; each token is on one rank."""
    for axis, k_heads in ((0, 2), (1, 2), (2, 2), (2, 1), (None, 2)):
        placement = [Replicate() if axis is None else Shard(axis)]
        k_placement = [Replicate()] if k_heads == 1 else placement
        q, k = (draw(3, 7, heads, 8, device=device) for heads in (4, k_heads))
        weights = [draw(8, device=device).requires_grad_() for _ in range(2)]
        tables = [draw(9, 4, device=device).requires_grad_() for _ in range(2)]
        cotangents = [draw(*x.shape, device=device) for x in (q, k)]
        frozen = [table.detach() for table in tables]

        def expected_and_found(call: Callable, sharded: Callable, inputs, device_mesh=mesh, x=(q, k),
                               places=(placement, k_placement), cotangents=cotangents) -> None:  # fmt: skip
            expected = torch.autograd.grad(call(*x), inputs, cotangents)
            parts = [distribute_tensor(t, device_mesh, p) for t, p in zip(x, places, strict=True)]
            given = [distribute_tensor(t, device_mesh, p) for t, p in zip(cotangents, places, strict=True)]
            for as_dtensor in (False, True):
                leaves = inputs
                if as_dtensor:
                    leaves = [distribute_tensor(t.detach(), device_mesh, [Replicate()]) for t in inputs]
                    leaves = [t.requires_grad_() for t in leaves]
                found = torch.autograd.grad(sharded(*parts, leaves), leaves, given)
                for ours, whole in zip(found, expected, strict=True):
                    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
                    close(ours, whole, terms=3 * 7 * 4)

        expected_and_found(
            lambda q, k, w=weights, t=frozen: ropelab.apply_qk_norm_rope(q, k, *w, cos=t[0], sin=t[1]),
            lambda q, k, w, t=frozen: dtensor.apply_qk_norm_rope(q, k, *w, cos=t[0], sin=t[1]),
            weights,
        )
        if k_heads == 2:
            expected_and_found(
                lambda q, k, t=tables: ropelab.apply_rope(q, k, cos=t[0], sin=t[1], offsets=1),
                lambda q, k, t: dtensor.apply_rope(q, k, cos=t[0], sin=t[1], offsets=1),
                tables,
            )


def close(found: torch.Tensor, expected: torch.Tensor, terms: int) -> None:
    """Raise unless two float64 results of sums of ``terms`` numbers in another order agree.

    A sum of n numbers in any order is within ``(n - 1) u sum|x|`` of the exact sum, u = 2**-53 (Higham, Accuracy and
    Stability of Numerical Algorithms, section 4.2). Two orders differ by at most twice this bound, and ``sum|x|`` is at
    most n times the largest term. The terms here are at most 16 times the largest result.
    """
    bound = 2 * terms * terms * 2.0**-53 * 16 * expected.abs().max()
    assert found.shape == expected.shape and (found - expected).abs().max() <= bound, (found - expected).abs().max()


# ------------------------------------------------------------------------------------------------------ a small model

BATCH, TOKENS, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 12, 4, 2, 6


def parameters(device: torch.device) -> dict[str, torch.Tensor]:
    shapes = {
        "q": (FEATURES, HEADS * HEAD_DIM), "k": (FEATURES, KV_HEADS * HEAD_DIM), "v": (FEATURES, KV_HEADS * HEAD_DIM),
        "o": (HEADS * HEAD_DIM, FEATURES), "q_norm": (HEAD_DIM,), "k_norm": (HEAD_DIM,),
    }  # fmt: skip
    return {name: draw(*shape, device=device) / shape[0] ** 0.5 for name, shape in shapes.items()}


def loss(
    w: dict[str, torch.Tensor], x, positions, gather: Callable, add: Callable, rotate: Callable, norm_rotate: Callable
):
    """A layer of attention with the norm of heads, a second one without, and the mean square of the result.

    Older versions of DTensor flatten axes only if no axis but the first is sharded. Tokens are therefore the first axis
    of the input, and heads the first axis of the attention.

    Args:
        x: ``[S, B, F]``.
        gather: makes keys, values and positions of all tokens from the part of each rank.
        add: makes the result of a layer from the summand of each rank.
        rotate, norm_rotate: `apply_rope` and `apply_qk_norm_rope`, of ropelab or of ropelab.interop.dtensor.
    """
    cos, sin = ropelab.rotary_table(TOKENS, HEAD_DIM, dtype=torch.float64, device=x.device)
    seen = gather(positions)[None, :] <= positions[:, None]
    for normed in (True, False):
        q, k, v = ((x @ w[name]).unflatten(-1, (-1, HEAD_DIM)) for name in ("q", "k", "v"))
        where = {"cos": cos, "sin": sin, "positions": positions, "seq_format": "sbhd"}
        q, k = norm_rotate(q, k, w["q_norm"], w["k_norm"], **where) if normed else rotate(q, k, **where)
        k, v = (gather(t).repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
        q, k, v = (t.permute(2, 1, 0, 3) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / HEAD_DIM**0.5
        attention = torch.softmax(scores + torch.log(seen.to(scores.dtype)), dim=-1)
        x = x + add((attention @ v).permute(2, 1, 0, 3).flatten(2) @ w["o"])
    return (x * x).sum() / (BATCH * TOKENS)


def check_model(mesh, device: torch.device, parallel: str) -> None:
    """Raise AssertionError unless the sharded model has the loss and the gradients of one process."""
    torch.manual_seed(1)
    w, x = parameters(device), draw(TOKENS, BATCH, FEATURES, device=device)
    whole = {name: t.clone().requires_grad_() for name, t in w.items()}
    order = torch.arange(TOKENS, device=device)
    functions = ropelab.apply_rope, ropelab.apply_qk_norm_rope
    expected = loss(whole, x, order, lambda t: t, lambda t: t, *functions)
    expected.backward()

    size, own = mesh.size(), mesh.get_local_rank()
    if parallel == "context":  # every rank has all parameters, and chunks of the tokens in the order of its positions
        places = dict.fromkeys(w, [Replicate()])
        parts = [context_parallel_positions(TOKENS, cp_size=size, cp_rank=i, device=device).long() for i in range(size)]
        positions = DTensor.from_local(parts[own].reshape(-1), mesh, [Shard(0)], run_check=False)
        x = DTensor.from_local(x[parts[own].reshape(-1)], mesh, [Shard(0)], run_check=False)
    else:  # every rank has its heads of the projections, and all tokens
        columns, rows, all_of_it = [Shard(1)], [Shard(0)], [Replicate()]
        places = {"q": columns, "k": columns, "v": columns, "o": rows, "q_norm": all_of_it, "k_norm": all_of_it}
        positions = distribute_tensor(order, mesh, [Replicate()])
        x = distribute_tensor(x, mesh, [Replicate()])
    shared = {name: distribute_tensor(t, mesh, places[name]).requires_grad_() for name, t in w.items()}

    def gather(t):
        return t.redistribute(mesh, [Replicate()]) if parallel == "context" else t

    def add(t):
        return t.redistribute(mesh, [Replicate()]) if parallel == "tensor" else t

    found = loss(shared, x, positions, gather, add, dtensor.apply_rope, dtensor.apply_qk_norm_rope)
    found.backward()
    terms = 2 * (FEATURES + HEAD_DIM + TOKENS + HEADS * HEAD_DIM) + BATCH * TOKENS * FEATURES
    close(found.full_tensor().detach(), expected.detach(), terms)
    for name, t in whole.items():
        close(shared[name].grad.full_tensor(), t.grad, terms)


# ------------------------------------------------------------------------------------------------------------ refusals


def check_refusals(mesh, device: torch.device) -> None:
    """Raise AssertionError unless calls that cannot be right raise with the argument's name."""
    cos, sin = ropelab.rotary_table(8, 8, device=device)
    plain = draw(2, 8, 4, 8, device=device)
    cut = {axis: distribute_tensor(plain, mesh, [Shard(axis)]) for axis in range(4)}
    cache = torch.zeros(2, 8, 4, 8, device=device, dtype=plain.dtype)
    written = cache, cache.clone(), torch.arange(16, device=device).view(2, 8)
    tables, shared, along = {"cos": cos, "sin": sin}, plain[:, :, :1], torch.arange(8, device=device)
    normed = {"q": cut[2], "k": cut[2], "q_weight": cos[0], "k_weight": cos[0]} | tables
    by = {"q": cut[1], "k": cut[1], "offsets": 2**70}
    for argument, function, options in (
        ("q", ropelab.apply_rope, {"q": cut[2]} | tables),
        ("q", ropelab.apply_qk_norm_rope, normed),
        ("kv", ropelab.assemble_mla_kv, {"kv": cut[2], "k_pe": shared, "nope_dim": 0} | tables),
        ("k_pe", ropelab.assemble_mla_kv, {"kv": plain, "k_pe": cut[2][:, :, :1], "nope_dim": 0} | tables),
        ("q", ropelab.rope_and_cache, {
            **dict.fromkeys(("q", "k", "v"), cut[2]), **dict(zip(CACHES, written, strict=True)), **tables,
            "seq_format": "bshd",
        }),
        ("q", dtensor.apply_rope, {"q": plain} | tables),
        ("q", dtensor.apply_rope, {"q": cut[3]} | tables),
        ("k", dtensor.apply_rope, {"q": cut[0], "k": cut[1]} | tables),
        ("q", dtensor.apply_rope, {"q": cut[2].clone().requires_grad_(), "inplace": True} | tables),
        *((name, dtensor.apply_qk_norm_rope, normed | {name: None}) for name in normed),
        ("offsets", dtensor.apply_qk_norm_rope, normed | by),
        *(
            (argument, dtensor.apply_rope, {"q": cut[axis], "k": cut[axis]} | tables | wrong)
            for axis in (1, 2)
            for argument, wrong in (
                *(("offsets", {"positions": along, "offsets": offsets}) for offsets in (1, along[:2])),
                ("positions", {"positions": along[0]}), ("positions", {"positions": [1, 2]}),
                ("offsets", {"offsets": along[0]}), ("inplace", {"inplace": "no"}), ("k", {"inplace": True}),
                ("out_layout", {"inplace": True, "out_layout": "interleaved"}), ("cos", {"cos": None}),
                ("sin", {"sin": None}),
            )
        ),
    ):  # fmt: skip
        before = {axis: x.full_tensor() for axis, x in cut.items()}
        try:
            function(**options)
        except (TypeError, ValueError) as error:
            assert str(error).startswith(f"{argument}: expected"), error
        else:
            raise AssertionError(f"{function.__name__}: expected a refusal of {argument}, got a result")
        assert all(torch.equal(x.full_tensor(), before[axis]) for axis, x in cut.items()), argument


# ------------------------------------------------------------------------------------------------------ torch.compile


def check_compiled(mesh, device: torch.device) -> None:
    """Raise AssertionError unless compiled calls (one graph) and traced calls give the bits of the eager call."""
    cos, sin = ropelab.rotary_table(8, 8, device=device)
    compiled = torch.compile(dtensor.apply_rope, backend="aot_eager", fullgraph=True)
    for axis in (1, 2):
        xs = [distribute_tensor(draw(2, 8, heads, 8, device=device), mesh, [Shard(axis)]) for heads in (4, 2)]
        xs, cotangents = [x.requires_grad_() for x in xs], [x.detach() * 2 for x in xs]
        results = [call(*xs, cos=cos, sin=sin) for call in (compiled, dtensor.apply_rope)]
        traced = torch.fx.symbolic_trace(lambda q, k: dtensor.apply_rope(q, k, cos=cos, sin=sin))
        assert [y.full_tensor().equal(z.full_tensor()) for y, z in zip(traced(*xs), results[1], strict=True)] == [
            True
        ] * 2
        for ours, eager in zip(*((*ys, *torch.autograd.grad(ys, xs, cotangents)) for ys in results), strict=True):
            assert torch.equal(ours.full_tensor(), eager.full_tensor()), axis


def main(backend: str, rendezvous: str, own: int, size: int) -> None:
    device = torch.device("cuda", own) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=rendezvous, rank=own, world_size=size, timeout=timedelta(seconds=300))
    try:
        run(device, size)
    finally:
        dist.destroy_process_group()


def run(device: torch.device, size: int) -> None:
    """All checks, in a process group that exists."""
    mesh = init_device_mesh(device.type, (size,))
    torch.manual_seed(0)
    assert check_calls(mesh, device) > 50
    check_gradients_of_weights_and_tables(mesh, device)
    for parallel in ("tensor", "context"):
        check_model(mesh, device, parallel)
    check_refusals(mesh, device)
    check_compiled(mesh, device)
    print("right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    # Compiled graphs keep the mesh, and with it gloo's threads. Such a thread aborts the process if it frees a tensor
    # while the interpreter ends (https://github.com/pytorch/pytorch/pull/179291), so the interpreter does not end.
    sys.stdout.flush()
    os._exit(0)
