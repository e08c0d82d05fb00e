"""The projection to q, k and v with a rotation, for the torch path and the Triton kernels alike."""

import numpy as np
import pytest
import torch

import ropelab
from ropelab import qkv_rope, qkv_rope_and_cache
from ropelab.call import projection, projection_paths
from ropelab.conformance.bounds import Arithmetic, exact, rotate_exactly, rotation_bound
from ropelab.conformance.projection_bounds import product_bound, projected_pair_bound
from ropelab.kernels import INTERPRETED, NO_POSITION, uses_triton
from ropelab.layout.pairing import LAYOUTS, pairs
from tests.support import all_but_one, forget

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
B, S, K, Q_HEADS, K_HEADS, D = 2, 5, 24, 4, 2, 16
N = (Q_HEADS + 2 * K_HEADS) * D
HEADS = {"q_heads": Q_HEADS, "k_heads": K_HEADS}
ROWS = Q_HEADS * D, K_HEADS * D, K_HEADS * D
TOKENS = {"bshd": (B, S), "sbhd": (S, B), "thd": (S,)}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    forget(monkeypatch)


def case(device="cpu", seq_format="bshd", dtype=torch.float32, *, bias=True, norm=False, three=False):
    """The leaves by name (x, weight, bias and the weights of a norm), and random cotangents of q, k and v."""
    shapes = {"x": (*TOKENS[seq_format], K), "weight": (N, K)} | ({"bias": (N,)} if bias else {})
    shapes |= {"q_weight": (D,), "k_weight": (D,)} if norm else {}
    leaves = {name: torch.randn(shape, dtype=torch.float64).to(device, dtype) for name, shape in shapes.items()}
    for name in {"weight", "bias"} & {*leaves} if three else ():
        leaves |= {f"{name}[{i}]": part.clone() for i, part in enumerate(leaves.pop(name).split(ROWS))}
    for x in leaves.values():
        x.requires_grad_()
    cotangents = [
        torch.randn(*TOKENS[seq_format], heads, D, dtype=torch.float64).to(device, dtype)
        for heads in (Q_HEADS, K_HEADS, K_HEADS)
    ]
    return leaves, cotangents


def called(leaves, **options):
    """The results of `qkv_rope` for leaves by name, with three weights where they have three names."""
    given = {name: x for name, x in leaves.items() if "[" not in name}
    for name in ("weight", "bias"):
        given |= {name: [leaves[f"{name}[{i}]"] for i in range(3)]} if f"{name}[0]" in leaves else {}
    return qkv_rope(**given, **HEADS, **options)


def composition(leaves, **options):
    """The same by a linear layer of PyTorch and the pass of ropelab over q and k."""
    joined = {
        name: torch.cat([leaves[f"{name}[{i}]"] for i in range(3)]) if f"{name}[0]" in leaves else leaves.get(name)
        for name in ("weight", "bias")
    }
    y = torch.nn.functional.linear(leaves["x"], joined["weight"], joined["bias"]).unflatten(-1, (-1, D))
    q, k, v = y.split((Q_HEADS, K_HEADS, K_HEADS), -2)
    if "q_weight" in leaves:
        return *ropelab.apply_qk_norm_rope(q, k, leaves["q_weight"], leaves["k_weight"], **options), v
    return *ropelab.apply_rope(q, k, **options), v


def tables(rows=12, rotary_dim=D, dtype=torch.float32, device="cpu"):
    return dict(zip(("cos", "sin"), ropelab.rotary_table(rows, rotary_dim, dtype=dtype, device=device), strict=True))


def assert_same(actual, expected, bits=True):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e) if bits else torch.testing.assert_close(a, e) is None


@pytest.mark.parametrize(
    ("layout", "seq_format", "bias", "norm", "three"), all_but_one(LAYOUTS, TOKENS, *[[False, True]] * 3)
)
def test_is_the_product_and_the_pass(device, layout, seq_format, bias, norm, three):
    """The bits are those of the two steps; three products may sum in another order, and add the gradients of x last."""
    leaves, cotangents = case(device, seq_format, bias=bias, norm=norm, three=three)
    options = tables(device=device) | {"layout": layout, "seq_format": seq_format}
    ys, expected = called(leaves, **options), composition(leaves, **options)
    assert_same(ys, expected, bits=not three)
    with torch.no_grad():
        assert_same(called(leaves, **options), ys)
    grads, right = (torch.autograd.grad(made, [*leaves.values()], cotangents) for made in (ys, expected))
    assert_same(grads, right, bits=not three)


WHERE = {
    "a slice": {"rotary_slice": (2, 10), **tables(rotary_dim=8)},
    "the first features": tables(rotary_dim=6),
    "a column for each feature": {"rotary_slice": (0, 8), **tables(rotary_dim=16)},
    "positions": {"positions": torch.tensor([[0, 3, -5, NO_POSITION, 11], [2, 2, 0, 1, NO_POSITION]]), **tables()},
    "positions for all": {"positions": torch.tensor([4, 3, 2, 1, 0], dtype=torch.int32), **tables()},
    "offsets": {"offsets": torch.tensor([3, NO_POSITION]), **tables()},
    "a start": {"offsets": -4, **tables()},
    "axes": {"positions": torch.arange(10).view(2, 1, 5), "axes": [0] * 5 + [1] * 3, **tables()},
    "packed": {"positions": ropelab.PackedSequences(torch.tensor([0, 2, 5]), 5).positions, **tables()},
    "tables for each batch": {name: torch.stack((t, t.flip(0))) for name, t in tables().items()},
    "no tables": {"frequencies": ropelab.rotary_frequencies(D)},
}


def errors_within(found, truth, bound):
    assert (abs(exact(found) - truth) <= bound).all()


BY_ONE_KERNEL = {"path": "product"}
"""In torch operations, this path serves all calls."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("three", "one_kernel"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_are_within_the_bounds(device, request, dtype, layout, three, one_kernel):
    if one_kernel:
        request.getfixturevalue("torch_backend")
    leaves, cotangents = case(device, "thd", dtype, three=three)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    path = BY_ONE_KERNEL if one_kernel else {}
    made = called(leaves, **tables(dtype=wide, device=device), layout=layout, seq_format="thd", **path)
    grads = dict(zip(leaves, torch.autograd.grad(made, [*leaves.values()], cotangents), strict=True))
    arithmetic = Arithmetic.of_kernel(dtype, interpreted=INTERPRETED and ropelab.kernels.uses_triton(made[0]))
    c, s = (exact(t[:S, None]) for t in ropelab.rotary_table(12, D, dtype=torch.float64))
    x = exact(leaves["x"])
    weight, bias = (
        np.concatenate([exact(leaves[name]) for name in leaves if name.partition("[")[0] == kind])
        for kind in ("weight", "bias")
    )
    first, g, g_error = 0, [], []
    for y, cotangent in zip(made, cotangents, strict=True):
        heads, rows = y.shape[1], slice(first, first + y.shape[1] * D)
        first = rows.stop
        if y is made[2]:
            errors_within(y.flatten(1), x @ weight[rows].T + bias[rows],
                          product_bound(x, weight[rows].T, arithmetic, added=bias[rows]))  # fmt: skip
            g.append(exact(cotangent.flatten(1)))
            g_error.append(np.zeros_like(g[-1]))
            continue
        halves = [exact(half).reshape(heads * D // 2, K) for half in _pairs_of_rows(leaves, rows, layout, "weight")]
        added = [exact(half).reshape(heads * D // 2) for half in _pairs_of_rows(leaves, rows, layout, "bias")]
        turned = [np.broadcast_to(t, (S, heads, D // 2)).reshape(S, -1) for t in (c, s)]
        truth = rotate_exactly(*(x @ w.T + b for w, b in zip(halves, added, strict=True)), *turned)
        bound = projected_pair_bound(x, halves, added, *turned, arithmetic, rounds_product=not one_kernel)
        for member, t, limit in zip(pairs(y, layout), truth, bound, strict=True):
            errors_within(member.flatten(1), t, limit)
        pair = [exact(half) for half in pairs(cotangent, layout)]
        for values, to in (
            (rotate_exactly(*pair, c, -s), g), (rotation_bound(*pair, c, -s, arithmetic), g_error)
        ):  # fmt: skip
            together = np.stack(values, -1) if layout == "interleaved" else np.concatenate(values, -1)
            to.append(together.reshape(S, -1))

    dqkv, error = np.concatenate(g, 1), np.concatenate(g_error, 1)
    store = Arithmetic.of_kernel(dtype, interpreted=False)  # PyTorch makes the products
    if three:
        truth, limit, first = 0.0, 0.0, 0
        for part, part_error in zip(g, g_error, strict=True):
            rows = slice(first, first := first + part.shape[1])
            limit = product_bound(part, weight[rows], store, a_error=part_error, added=truth, added_error=limit)
            truth = truth + part @ weight[rows]
    else:
        truth, limit = dqkv @ weight, product_bound(dqkv, weight, store, a_error=error)
    errors_within(grads["x"], truth, limit)
    ones = np.ones((S, 1), dtype=x.dtype)
    for kind, factor in (("weight", x), ("bias", ones)):
        found = torch.cat([grads[name] for name in leaves if name.partition("[")[0] == kind]).reshape(N, -1)
        errors_within(found, dqkv.T @ factor, product_bound(dqkv.T, factor, store, a_error=error.T))


def _pairs_of_rows(leaves, rows, layout, kind):
    """Both members of the pairs of heads along the rows of a weight or of a bias, ``[heads, D/2, ...]``."""
    whole = torch.cat([leaves[name] for name in leaves if name.partition("[")[0] == kind]).detach()
    heads = whole[rows].unflatten(0, (-1, D)).movedim(1, -1)
    return [half.movedim(-1, 1) for half in pairs(heads, layout)]


def test_the_bounds_reject_what_is_wrong():
    """The faults: one term of the product is left out, the sum has bfloat16, and one rounding is too many."""
    x, weight = (torch.randn(*shape, dtype=torch.float32) for shape in ((64, 256), (8, 256)))
    arithmetic = Arithmetic.of_kernel(torch.bfloat16, interpreted=False)
    truth = exact(x) @ exact(weight).T
    bound = product_bound(exact(x), exact(weight).T, arithmetic)
    low = torch.zeros(64, 8, dtype=torch.bfloat16)
    for i in range(256):
        low += (x[:, i : i + 1] * weight[:, i]).bfloat16()
    for name, found in {"a term less": x[:, 1:] @ weight[:, 1:].T, "in bfloat16": low}.items():
        assert (abs(exact(found.bfloat16()) - truth) > 2 * bound).any(), name

    weights = [exact(w) for w in weight.split(4)]
    c, s = (exact(t[1:65]) for t in ropelab.rotary_table(65, 8, dtype=torch.float64))
    members = [(x @ w.T).bfloat16().float() for w in weight.split(4)]
    twice = (members[0] * c.astype("f4") - members[1] * s.astype("f4")).bfloat16()
    truth, _ = rotate_exactly(*(exact(x) @ w.T for w in weights), c, s)
    zeros = (np.zeros(4), np.zeros(4))
    for rounds_product in (False, True):
        bound, _ = projected_pair_bound(exact(x), weights, zeros, c, s, arithmetic, rounds_product=rounds_product)
        assert (abs(exact(twice) - truth) <= bound).all() == rounds_product


@pytest.mark.parametrize("norm", [False, True])
def test_results_are_views_of_one_tensor(device, norm):
    """All features of a token lie side by side. While autograd records a norm, q and k are tensors of their own."""
    leaves, _ = case(device, norm=norm)
    with torch.no_grad():
        q, k, v = called(leaves, **tables(device=device))
    assert len({y.untyped_storage().data_ptr() for y in (q, k, v)}) == 1
    assert [y.storage_offset() for y in (q, k, v)] == [0, Q_HEADS * D, (Q_HEADS + K_HEADS) * D]
    assert all(y.stride() == (S * N, N, D, 1) for y in (q, k, v))
    recorded = called(leaves, **tables(device=device))
    assert len({y.untyped_storage().data_ptr() for y in recorded}) == (3 if norm else 1)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_autograd_keeps(device, norm, frozen):
    """Without a norm neither the product nor q nor k, and with frozen weights not even x."""
    leaves, _ = case(device, norm=norm)
    leaves["weight"].requires_grad_(not frozen)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        called(leaves, **(where := tables(device=device)))
    names = {x.data_ptr(): name for name, x in (leaves | where).items()}
    expected = {"weight", "cos", "sin"} | ({"q_weight", "k_weight"} if norm else set())
    expected |= set() if frozen and not norm else {"x"}
    assert {names.get(x.data_ptr(), f"{x.numel()}") for x in kept} == expected | ({f"{B * S * N}"} if norm else set())


@pytest.mark.parametrize("three", [False, True])
def test_autocast_is_that_of_a_linear_layer(device, three):
    leaves, _ = case(device, three=three)
    where = tables(device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        ys, expected = called(leaves, **where), composition(leaves, **where)
    assert ys[0].dtype == torch.bfloat16
    assert_same(ys, expected, bits=not three)
    grads = torch.autograd.grad(sum(y.float().square().sum() for y in ys), [*leaves.values()])
    assert all(g.dtype == x.dtype for g, x in zip(grads, leaves.values(), strict=True))


@pytest.mark.parametrize(("three", "one_kernel"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("norm", [False, True])
def test_into_a_paged_cache(device, request, norm, three, one_kernel):
    if one_kernel:
        request.getfixturevalue("torch_backend")
    leaves, _ = case(device, "thd", norm=norm, three=three)
    slots = torch.tensor([3, -1, 0, 6], device=device)
    caches = [[torch.full((2, 4, K_HEADS, D), -7.0, device=device) for _ in range(2)] for _ in range(2)]
    where, path = tables(device=device), BY_ONE_KERNEL if one_kernel else {}
    with torch.no_grad():
        q, k, v = composition(leaves, seq_format="thd", **where)
        given = {name: x for name, x in leaves.items() if "[" not in name}
        for name in ("weight", "bias") if three else ():
            given[name] = [leaves[f"{name}[{i}]"] for i in range(3)]
        found = qkv_rope_and_cache(
            key_cache=caches[0][0], value_cache=caches[0][1], slot_mapping=slots, **given, **HEADS, **where, **path
        )
    for cache, x in zip(caches[1], (k, v), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache.view(-1, K_HEADS, D)[slot] = x[token]
    torch.testing.assert_close((found, *caches[0]), (q, *caches[1]))
    assert found.is_contiguous()


@pytest.mark.parametrize("path", ["pass", "product"])
def test_one_token_of_each_sequence_into_a_paged_cache(device, request, path):
    """Along the tokens, an axis of one element, strides may be those of another axis."""
    if not (path == "pass" or uses_triton(torch.empty(1, device=device))):
        request.getfixturevalue("torch_backend")
    dtype, dim, tokens = torch.float16, 64, 3
    x, weight = (torch.randn(n, 48, device=device, dtype=dtype) for n in (tokens, 4 * dim))
    options = tables(rotary_dim=dim, device=device) | {"q_heads": 2, "k_heads": 1, "path": path}
    slots, found = torch.arange(tokens, device=device), []
    for seq_format, sizes in (("thd", (tokens,)), ("bshd", (tokens, 1)), ("sbhd", (1, tokens))):
        caches = [torch.zeros(1, 4, 1, dim, device=device, dtype=dtype) for _ in range(2)]
        where = {"positions": torch.arange(tokens, device=device).view(sizes if seq_format == "thd" else (tokens, 1))}
        given = {"x": x.view(*sizes, 48), "weight": weight, "slot_mapping": slots, "seq_format": seq_format, **where}
        q = qkv_rope_and_cache(key_cache=caches[0], value_cache=caches[1], **given, **options)
        found.append([q.view(tokens, 2, dim), *caches])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("kind", ["across heads", "weight_offset", "after the rotation", "q_nope"])
def test_calls_into_a_cache_that_the_kernel_does_not_serve_take_the_pass(torch_backend, monkeypatch, kind):
    """The kernel knows a norm of each head before the rotation, so "auto" must not take it for any other."""
    monkeypatch.setattr(projection, "fastest", lambda work, device: "product")
    heads, dim = {"q_heads": 2, "k_heads": 1}, 64
    given = {"x": torch.randn(5, 48), "weight": torch.randn(4 * dim, 48), "slot_mapping": torch.arange(5), **heads}
    given |= tables(rotary_dim=dim) | {"q_weight": torch.randn(dim), "k_weight": torch.randn(dim)}
    nope = torch.randn(5, 2, 3)
    given |= {
        "across heads": {"q_weight": torch.randn(2 * dim)}, "weight_offset": {"weight_offset": 1.0},
        "after the rotation": {"norm_first": False},
        "q_nope": {"q_weight": None, "k_weight": None, "q_nope": nope, "q_nope_out": nope},
    }[kind]  # fmt: skip

    def called(path):
        caches = [torch.zeros(2, 4, 1, dim) for _ in range(2)]
        q = qkv_rope_and_cache(**given, key_cache=caches[0], value_cache=caches[1], path=path)
        return q, *caches

    assert_same(called("auto"), called("pass"))
    with pytest.raises(ValueError, match="path: expected 'auto' or 'pass'"):
        called("product")


@pytest.mark.parametrize("seq_format", ["bshd", "thd"])
@pytest.mark.parametrize("where", ["no tables", "positions", "positions for all", "offsets", "axes", "a start"])
def test_the_path_of_one_kernel_rounds_once(torch_backend, where, seq_format):
    """The path in torch operations: q and k are the float32 product, turned, and rounded once."""
    leaves, _ = case(dtype=torch.bfloat16, seq_format=seq_format)
    options = {name: x for name, x in WHERE[where].items()}
    if seq_format == "thd" and where in ("positions", "axes"):
        options["positions"] = options["positions"][..., :1, :]
        options["positions"] = options["positions"].squeeze(-2)
    if seq_format == "thd" and where == "offsets":
        options["offsets"] = options["offsets"][:1]
    with torch.no_grad():
        ys = called(leaves, **options, seq_format=seq_format, **BY_ONE_KERNEL)
        wide = {name: x.float() for name, x in leaves.items()}
        expected = composition(wide, **options, seq_format=seq_format)
    assert_same(ys, [y.bfloat16() for y in expected])


@pytest.mark.parametrize(("name", "path"), [("NVIDIA H200", "product"), ("NVIDIA H100 PCIe", "pass")])
def test_a_gpu_that_was_not_measured_takes_the_pass(monkeypatch, name, path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    projection_paths._name.cache_clear()
    work = projection_paths.ProductSize(8192, 2048, 6144, 5120)
    try:
        assert projection_paths.fastest(work, torch.device("cuda")) == path
        assert projection_paths.fastest(work, torch.device("cpu")) == "pass"
    finally:
        projection_paths._name.cache_clear()
