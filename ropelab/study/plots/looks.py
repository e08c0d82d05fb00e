"""The label, the colour and the marker of every contender.

A document extends `CONTENDERS` in its own package by the contenders that only the document has.
"""

from collections.abc import Iterable, Mapping

from ropelab.bench.peer_table import ENTRIES

COLORBLIND = [
    "#0173b2", "#c88104", "#029e73", "#d55e00", "#c971b8", "#c2814a", "#f644c0", "#8f8f8f", "#99910e", "#1d96db",
]  # fmt: skip
"""seaborn's palette "colorblind", darkened where a colour had less than 3.2 times the contrast of white paper."""


class Looks:
    """Labels, colours and markers of contenders, in the order of the legends.

    Args:
        known: contender -> label ("" for the contender's name), place of the colour in `COLORBLIND`, marker.
        other: the place of the colour and the marker of every other contender.
    """

    def __init__(self, known: Mapping[str, tuple[str, int, str]], other: tuple[int, str] = (7, "h")) -> None:
        self.known = dict(known)
        self.other = other

    def __call__(self, name: str) -> dict[str, object]:
        """Label, colour and marker as arguments for matplotlib."""
        _, place, marker = self.known.get(name, ("", *self.other))
        return {"label": self.label(name), "color": COLORBLIND[place], "marker": marker}

    def label(self, name: str) -> str:
        return self.known.get(name, ("",))[0] or name

    def color(self, name: str):
        return self(name)["color"]

    def ordered(self, names: Iterable[str]) -> list[str]:
        """The names once each, in the order of the legend; unknown names come last."""
        order = {name: place for place, name in enumerate(self.known)}
        return sorted(dict.fromkeys(names), key=lambda name: order.get(name, len(order)))

    def extended(self, known: Mapping[str, tuple[str, int, str]], other: tuple[int, str] | None = None) -> "Looks":
        """These looks after the looks of a document's own contenders, which win. ``other`` is as in `Looks`."""
        return Looks({**known, **self.known, **known}, other or self.other)


_OF_PEERS = {entry.name: (entry.label, entry.color, entry.marker) for entry in ENTRIES}


def _peers(*names: str) -> dict[str, tuple[str, int, str]]:
    return {name: _OF_PEERS[name] for name in names}


CONTENDERS = Looks({
    **_peers("ropelab", "ropelab in place"),
    "ropelab with positions": ("ropelab, positions found too", 9, "P"),
    **_peers("flash_attn", "liger", "quack", "quack in place", "quack qkv", "quack kv"),
    "torchembed": ("torchembed, kernel", 2, "v"),
    **_peers("torchembed API", "torchembed 0.3.2", "torchembed 0.3.0", "complex", "transformers"),
    **_peers("rotary-embedding-torch", "TransformerEngine 2.18", "TransformerEngine 2.20"),
    "transformer_engine": ("TransformerEngine", 5, ">"),
    **_peers("flashinfer", "flashinfer 0.6.13", "vllm", "sglang"),
    "token-linear, reads twice": ("TransformerEngine's new grid (model)", 2, "^"),
    "legacy grid": ("TransformerEngine's old grid (model)", 5, "v"),
    "compile": ("torch.compile", 3, "X"),
    **_peers("hf_compiled"),
    "compiled separate": ("norm, then formula, torch.compile", 3, "X"),
    "compiled together": ("both in one torch.compile", 2, "v"),
    "eager": ("eager formula", 7, "p"),
    **_peers("hf_eager"),
    "eager separate": ("norm, then formula, eager", 7, "p"),
    **_OF_PEERS,
})  # fmt: skip
"""All contenders in the order of the legends; a peer that is named nowhere here comes last."""
