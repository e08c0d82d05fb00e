"""Show how a model of Transformers calls attention, eager and compiled.

Attention that knows that it is causal can leave out the scores of later tokens. A mask may hide any token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pandas as pd
import torch

_ATTENTION = "scaled_dot_product_attention"


def calls(model: torch.nn.Module, tokens: int = 8) -> pd.DataFrame:
    """The ways in which a causal language model calls ``torch``'s attention for a sequence without padding.

    Returns:
        Columns mode (``"eager"`` or ``"compiled"``), calls (their number), is_causal, mask (whether a mask is passed).
    """
    ids = torch.ones(1, tokens, dtype=torch.long)
    found: list[dict] = []

    def seen(mode: str, options: dict) -> None:
        found.append(
            {"mode": mode, "is_causal": bool(options.get("is_causal")), "mask": options.get("attn_mask") is not None}
        )

    def traced(graph: torch.fx.GraphModule, _):
        for node in graph.graph.nodes:
            if _ATTENTION in str(node.target):
                seen("compiled", node.kwargs)
        return graph

    with torch.no_grad():
        with _watched(lambda options: seen("eager", options)):
            model(input_ids=ids, use_cache=False)
        torch._dynamo.reset()
        torch.compile(model, backend=traced, dynamic=False)(input_ids=ids, use_cache=False)
    return pd.DataFrame(found).value_counts(sort=False).rename("calls").reset_index()


@contextmanager
def _watched(seen) -> Iterator[None]:
    attention = getattr(torch.nn.functional, _ATTENTION)

    def watched(*arguments, **options):
        seen(options)
        return attention(*arguments, **options)

    with mock.patch.object(torch.nn.functional, _ATTENTION, watched):
        yield
