"""Random valid arguments of the public functions, for Hypothesis.

Sizes are small: a fault of an index shows with three heads, and a small failing example is the point. All numbers of a
case follow from the seed in it.
"""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from ropelab import NO_POSITION
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import SEQ_FORMATS, from_bshd

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POSITION_DTYPES = (torch.int32, torch.int64)
MEMORIES = ("contiguous", "sliced", "every second feature", "reversed axes", "expanded")


@dataclass
class Rotation:
    """A valid call of `ropelab.apply_rope`: q, k or None, and the options by name, cos and sin among them."""

    q: torch.Tensor
    k: torch.Tensor | None
    options: dict = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.q,) if self.k is None else (self.q, self.k)


def tensor(shape, dtype: torch.dtype, memory: str, generator: torch.Generator) -> torch.Tensor:
    """Standard normal numbers of this shape, a view of whatever ``memory`` says."""
    if memory == "sliced":  # addresses of every alignment, rows with gaps
        whole = torch.randn([size + 1 for size in shape], generator=generator, dtype=torch.float64).to(dtype)
        return whole[tuple(slice(1, None) for _ in shape)]
    if memory == "every second feature":
        return torch.randn([*shape[:-1], 2 * shape[-1]], generator=generator, dtype=torch.float64).to(dtype)[..., ::2]
    if memory == "reversed axes":
        return (
            torch.randn(shape[::-1], generator=generator, dtype=torch.float64)
            .to(dtype)
            .permute(*range(len(shape))[::-1])
        )
    if memory == "expanded":
        return torch.randn([1, *shape[1:]], generator=generator, dtype=torch.float64).to(dtype).expand(shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def rotations(
    draw, *, inplace: bool = False, dtypes=DTYPES, table_dtypes=DTYPES, with_k: bool | None = None
) -> Rotation:
    """Any valid call. With ``inplace``, the call can overwrite its inputs, and has no option ``inplace`` yet."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16), label="seed"))
    memories = st.sampled_from([memory for memory in MEMORIES if not (inplace and memory == "expanded")])
    seq_format = draw(st.sampled_from(SEQ_FORMATS))
    batch = 1 if seq_format == "thd" else draw(st.integers(0, 3))
    seq_len, head_dim = draw(st.integers(0, 6)), draw(st.integers(2, 20))
    dtype, table_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(table_dtypes))

    def heads(least: int) -> torch.Tensor:
        like = torch.empty(batch, seq_len, draw(st.integers(least, 4)), head_dim, device="meta")
        return tensor(from_bshd(like, seq_format).shape, dtype, draw(memories), generator)

    q = heads(0)
    case = Rotation(
        q, heads(0) if (draw(st.booleans()) if with_k is None else with_k) else None, {"seq_format": seq_format}
    )
    layout = draw(st.sampled_from(LAYOUTS))
    case.options["layout"] = layout
    if inverse := draw(st.booleans()):
        case.options["inverse"] = inverse

    rotary_dim = 2 * draw(st.integers(1, head_dim // 2))
    columns = rotary_dim // 2
    if draw(st.booleans()):
        first = draw(st.integers(0, head_dim - rotary_dim))
        case.options["rotary_slice"] = (first, first + rotary_dim)
        if draw(st.booleans()):
            columns = rotary_dim
    if columns != rotary_dim and not inplace and draw(st.booleans()):
        case.options["out_layout"] = draw(st.sampled_from(LAYOUTS))

    rows = max(1, seq_len) + draw(st.integers(0, 5))
    each = draw(st.sampled_from([(), (1,), (batch,)] if batch else [()]))
    shape = (*each, rows, columns)
    memories_of_tables = st.sampled_from(["contiguous", "sliced", "every second feature"])
    case.options["cos"], case.options["sin"] = (
        tensor(shape, table_dtype, draw(memories_of_tables), generator) for _ in range(2)
    )
    case.options |= draw(places(batch, seq_len, rows, packed=seq_format == "thd"))
    return case


@st.composite
def places(draw, batch: int, seq_len: int, rows: int, *, packed: bool) -> dict:
    """``positions`` or ``offsets``, or neither, such that every token has one of the rows."""
    starts = st.integers(1 - rows, rows - max(1, seq_len))
    kind = draw(st.sampled_from(["neither", "offset", "offsets", "positions", "positions of batches"]))
    if kind == "neither":
        return {}
    if kind == "offset":
        return {"offsets": draw(starts)}
    dtype = draw(st.sampled_from(POSITION_DTYPES))

    def numbers(count: int, one) -> torch.Tensor:
        drawn = draw(st.lists(one | st.just(NO_POSITION), min_size=count, max_size=count))
        spaced = torch.full((count, draw(st.integers(1, 2))), -7, dtype=dtype)  # adjacent or with a gap
        spaced[:, 0] = torch.tensor(drawn, dtype=dtype)
        return spaced[:, 0]

    if kind == "offsets":
        return {"offsets": numbers(batch, starts)}
    position = st.integers(1 - rows, rows - 1)
    if packed or kind == "positions":
        return {"positions": numbers(seq_len, position)}
    return {"positions": numbers(batch * seq_len, position).reshape(batch, seq_len)}
