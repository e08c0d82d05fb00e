"""The public function `rotate_cached_keys`, for prefixes that a paged cache holds at other positions."""

from collections.abc import Sequence

import torch

from ropelab.arguments import POSITION_DTYPES, check_tensor, integer, integers, warn
from ropelab.call.angles import given_angles
from ropelab.call.cached_keys import ROTATE, as_keys
from ropelab.call.dispatcher import check_untransformed
from ropelab.call.paged_cache_checks import CACHE_DTYPES
from ropelab.call.refusals import renamed
from ropelab.call.where import located
from ropelab.foreign import hinted
from ropelab.layout.pairing import MOST_FEATURES, Layout


@hinted
def rotate_cached_keys(
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    deltas: int | torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    layout: Layout = "split_half",
    axes: Sequence[int] | None = None,
    rotary_slice: tuple[int, int] | None = None,
    k_scale_cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate keys that a paged cache holds by further positions, in place: ``K[s] <- R(delta) K[s]``.

    Example: ``rotate_cached_keys(key_cache, slots, 500, cos=cos, sin=sin)``.

    A rotation by p and then by delta is the rotation by p + delta, so the keys of a prefix can serve at other positions
    (reused passages, evicted tokens). Values stay as they are. The function has no backward.

    It also brings keys to other frequencies, as where a sequence outgrows the short factors of LongRoPE: the rotation
    by ``p theta'`` after that by ``-p theta`` is a rotation by ``p (theta' - theta)``. `Rope.relative_to` has these
    frequencies, and the deltas are then the positions of the keys::

        change = rope.at_length(65536).relative_to(rope)
        cos, sin = change.tables(65536)
        rotate_cached_keys(key_cache, slots, positions, cos=cos, sin=sin, layout=change.layout)

    Slots are as for `rope_and_cache`. They must differ from each other; otherwise the content of a slot that comes
    twice is undefined. A slot that is negative or beyond the cache is skipped, and so is a slot whose delta is
    ``NO_POSITION``.

    **Error.** The second rotation reads a key that is already rounded. Let E be the largest error of the cached pair
    ``y`` against the exact rotation by p, and c and s the cosine and sine of the further angle. The rotation passes E
    on, and itself rounds as a rotation of a pair of at most ``|y| + E``::

        |y0' - R(p + delta) k| <= |c| E0 + |s| E1 + B(|y| + E)

    B is the bound of one rotation (`ropelab.conformance.bounds.rotation_bound`), for which a dtype with the unit
    roundoff u rounds by ``u |y0'|`` and the arithmetic by a few units of float32. So a pair is off by at most about
    ``2 u`` of its length instead of ``u``, and by ``(n + 1) u`` after n calls: rotate by the sum of the deltas, not in
    steps. `ropelab.conformance.bounds.inexact_rotation_bound` computes the bound.

    A scale that a row shares commutes with the rotation. So 8-bit floats rotate without their scales and are rounded
    once more; a number beyond the largest finite one becomes that number. With ``k_scale_cache`` the call makes a new
    scale for each row, as `rope_and_cache` does, and rounds all features of the row once more.

    Args:
        key_cache: ``[blocks, block_size, H, D]``, or ``[blocks, block_size, D]`` for the entries of a latent cache;
            dtypes and strides as for `rope_and_cache`. The call overwrites the slots. Of a pool ``[slots, H, D]``, as
            SGLang has it, pass ``pool.unsqueeze(1)``: three axes are those of a latent cache, and the call warns if all
            features of its entries turn without ``rotary_slice``.
        slots: ``[N]`` of int32 or int64.
        deltas: by how many positions the slots turn: an int, or an int32 or int64 tensor ``()`` or ``[N]``; negative
            numbers turn back. With ``axes`` a tensor ``[axes]`` or ``[axes, N]``, or one number along all axes.
        cos, sin, frequencies: as for `apply_rope`. The tables hold plain cosines and sines: a factor of the attention
            would multiply the keys once more.
        layout: as for `apply_rope`.
        axes: as for `apply_rope`, ``[R/2]``: the axis of ``deltas`` that each pair reads, for M-RoPE.
        rotary_slice: as for `apply_rope`; ``(L, L + R)`` for a latent cache.
        k_scale_cache: float32, the shape of ``key_cache`` without the features: the scales of rows that
            `rope_and_cache` made, which the call reads and overwrites. Other scales stay, and the call does not need
            them.

    Returns:
        ``key_cache``.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported.
        ValueError: shapes, strides, devices or options do not fit each other; tensors that are written overlap others;
            a tensor requires grad while autograd records; or, for tensors in CPU memory, a slot is beyond the cache or
            comes twice, or a delta is beyond the tables. On a GPU a delta beyond the tables gives NaN.
        NotImplementedError: the call is under a transform of torch.func or in forward mode.
    """
    tensors = (cos, sin) if frequencies is None else (frequencies, sin if cos is None else cos)
    key, prepared = ROTATE.look_up(
        (layout, frequencies is None, type(deltas)), (), (key_cache, k_scale_cache, slots), *tensors,
        deltas if isinstance(deltas, torch.Tensor) else None, 0, axes, rotary_slice,
    )  # fmt: skip
    if prepared is None:
        check_untransformed("rotate_cached_keys")
        check_tensor(
            "key_cache", key_cache, (3, 4), "[blocks, block_size, heads, head_dim] or [blocks, block_size, features]",
            CACHE_DTYPES,
        )  # fmt: skip
        check_tensor("slots", slots, (1,), "[slots]", POSITION_DTYPES)
        if key_cache.ndim == 3 and k_scale_cache is not None:
            check_tensor("k_scale_cache", k_scale_cache, (2,), "[blocks, block_size]", (torch.float32,))
        if axes is not None:
            axes = integers("axes", axes, at_least=0, below=MOST_FEATURES)
        if isinstance(deltas, torch.Tensor):
            ranks, shape = ((0, 1), "() or [slots]") if axes is None else ((0, 1, 2), "(), [axes] or [axes, slots]")
            check_tensor("deltas", deltas, ranks, shape, POSITION_DTYPES)
    given = key_cache, k_scale_cache, slots
    if key_cache.ndim == 3:
        given = key_cache.unsqueeze(2), None if k_scale_cache is None else k_scale_cache.unsqueeze(2), slots
    if not isinstance(deltas, torch.Tensor):
        deltas = torch.full((), integer("deltas", deltas, -(2**63), 2**63), dtype=torch.int64, device=key_cache.device)
    if axes is None:
        positions = deltas.expand(1, len(deltas) if deltas.ndim else len(slots))
    else:
        along = deltas.expand(max(axes, default=0) + 1) if deltas.ndim == 0 else deltas
        positions = along if along.ndim == 2 else along[:, None].expand(-1, len(slots))
    try:
        if prepared is not None:
            prepared(given, *tensors, positions, 0)
            return key_cache
        angles = given_angles(cos, sin, frequencies)
        where = located(as_keys(given[0], slots), angles, positions, 0, layout, None, "thd", rotary_slice, axes=axes)
        features = key_cache.shape[-1]
        if key_cache.ndim == 3 and rotary_slice is None and 2 * angles.columns == features:
            key = None  # every such call warns
            if not torch.compiler.is_compiling():
                warn(
                    f"key_cache: blocks of {key_cache.shape[1]} entries, all of whose {features} features turn (of a "
                    f"pool [slots, heads, head_dim] pass key_cache.unsqueeze(1); of entries pass rotary_slice=(0, "
                    f"{features}))"
                )
        ROTATE.run(given, where, key=key)
    except (TypeError, ValueError) as error:
        raise renamed(error, positions="deltas", q="key_cache") from error
    return key_cache
