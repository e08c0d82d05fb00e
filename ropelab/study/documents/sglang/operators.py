"""Models in plain torch of the operators that SGLang#14302 compares, to show the effect of each layout flag.

The models follow the contracts of the operators. ``diffusers`` is the package's own function, where its files are at
hand. `document` was compared, check by check, with the operator's public source:
``sgl-kernel/csrc/multimodal/rotary_embedding.cu`` of sgl-project/sglang at 02f22ef8.
"""

import ast
from collections.abc import Callable

import torch

from ropelab.bench import packages
from ropelab.layout.pairing import join, pairs


def document(
    cos: torch.Tensor, sin: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, head_size: int, is_neox: bool
) -> None:
    """The first version, in place. Its ``is_neox`` means adjacent pairs, and the width of the tables has two meanings.

    Args:
        cos, sin: ``[T, W]`` in the dtype of query: W pairs rotate if ``is_neox``, else W features.
        query, key: ``[T, H * D]`` or ``[T, H, D]``, contiguous.

    Raises:
        ValueError: the operator checks this and refuses.
        IndexError: the tables are wider than the head. The operator does not check this: it takes the further pairs
            from the next head, or from behind q.
    """
    for name, x in (("query", query), ("key", key)):
        if x is None:
            continue
        if x.ndim not in (2, 3):
            raise ValueError(f"{name}: 2-D or 3-D")
        if not x.is_contiguous() or x.dtype != cos.dtype or len(x) != len(cos) or x[0].numel() % head_size:
            raise ValueError(f"{name}: contiguous, of the tables' dtype and tokens, in heads of head_size")
        heads = x.view(len(x), -1, head_size)
        rotary_dim = 2 * cos.shape[-1] if is_neox else cos.shape[-1]
        if rotary_dim > head_size:
            raise IndexError("cos: pairs past the head")
        wide = [table.float()[:, None] for table in (cos, sin)]
        if is_neox:
            wide = [join(table, table, "interleaved") for table in wide]
        _overwrite(heads[..., :rotary_dim], *wide, "interleaved" if is_neox else "split_half")


def positions_operator(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """The operator of vLLM and FlashInfer, in place. Its ``is_neox`` means halves.

    A row of the cache has R/2 cosines, and then R/2 sines.
    """
    layout = "split_half" if is_neox else "interleaved"
    rotary_dim = cos_sin_cache.shape[-1]
    rows = [half.float()[:, None] for half in cos_sin_cache[positions].chunk(2, -1)]
    for x in (query, key):
        if x is not None:
            wide = (join(half, half, layout) for half in rows)
            _overwrite(x.view(len(x), -1, head_size)[..., :rotary_dim], *wide, layout)


def _overwrite(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> None:
    """Overwrite x with its rotation in float32, rounded once; the tables have a column for each feature."""
    x0, x1 = pairs(x.float(), layout)
    x.copy_(x.float() * cos + join(-x1, x0, layout) * sin)


def diffusers() -> tuple[str, Callable]:
    """(version, ``apply_rotary_emb``) of diffusers.

    The function is executed alone, because an import of the package would need all its dependencies.

    Raises:
        Unavailable: diffusers is not at hand.
    """
    version, directory = packages.locate("diffusers")
    source = directory / "diffusers" / "models" / "embeddings.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "apply_rotary_emb"]
    namespace: dict[str, object] = {"torch": torch}
    exec(compile(tree, str(source), "exec"), namespace)
    return version, namespace["apply_rotary_emb"]
