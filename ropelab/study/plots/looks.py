"""The label, the colour and the marker of every contender.

A document extends `CONTENDERS` in its own package by the contenders that only the document has.
"""

from collections.abc import Iterable, Mapping

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


# Two names of one implementation share colour and marker.
CONTENDERS = Looks({
    "ropelab": ("", 0, "o"),
    "ropelab in place": ("ropelab, in place", 9, "P"),
    "ropelab with positions": ("ropelab, positions found too", 9, "P"),
    "flash_attn": ("flash-attn", 1, "s"),
    "liger": ("Liger, in place", 6, "D"),
    "quack": ("", 8, "p"),
    "quack in place": ("quack, in place", 8, "X"),
    "quack qkv": ("quack, packed qkv in place", 8, "d"),
    "quack kv": ("quack, packed kv in place", 8, "*"),
    "torchembed": ("torchembed, kernel", 2, "v"),
    "torchembed API": ("torchembed, module", 8, "^"),
    "torchembed 0.3.2": ("", 2, "v"),
    "torchembed 0.3.0": ("", 8, "^"),
    "complex": ("complex product", 4, "*"),
    "transformers": ("transformers' own", 7, "d"),
    "rotary-embedding-torch": ("", 5, "<"),
    "TransformerEngine 2.18": ("", 3, "<"),
    "TransformerEngine 2.20": ("", 5, ">"),
    "transformer_engine": ("TransformerEngine", 5, ">"),
    "flashinfer": ("FlashInfer", 4, "X"),
    "flashinfer 0.6.13": ("FlashInfer 0.6.13", 4, "h"),
    "vllm": ("vLLM, in place", 5, "D"),
    "sglang": ("SGLang, in place", 8, "<"),
    "token-linear, reads twice": ("TransformerEngine's new grid (model)", 2, "^"),
    "legacy grid": ("TransformerEngine's old grid (model)", 5, "v"),
    "compile": ("torch.compile", 3, "X"),
    "hf_compiled": ("formula, torch.compile", 3, "X"),
    "compiled separate": ("norm, then formula, torch.compile", 3, "X"),
    "compiled together": ("both in one torch.compile", 2, "v"),
    "eager": ("eager formula", 7, "p"),
    "hf_eager": ("formula, eager", 7, "p"),
    "eager separate": ("norm, then formula, eager", 7, "p"),
})  # fmt: skip
