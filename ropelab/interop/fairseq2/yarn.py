"""fairseq2's encoder with the frequencies of YaRN, over `ropelab.apply_rope`."""

import torch

from ropelab.angles import frequencies
from ropelab.arguments import flag, integer, number
from ropelab.interop.fairseq2.kernel import KernelEncoder
from ropelab.interop.refusals import renamed


class YaRNRotaryEncoder(KernelEncoder):
    """fairseq2's ``YaRNRotaryEncoder``, OLMo 3's encoder for long contexts: halves, with YaRN's frequencies and factor.

    The contract comes from fairseq2 0.8.1 (``fairseq2.models.olmo.yarn_rope``), the frequencies from
    `ropelab.angles.frequencies.yarn`. The tables of this encoder contain the factor. fairseq2 multiplies by the factor
    in every call, and rounds every step of the frequencies to float32.

    Args:
        encoding_dim: E, the last dimension of ``seqs``; even.
        max_seq_len: the number of positions that the tables serve, after the extension.
        theta: the base of the frequencies.
        scale_factor: the factor by which the context was extended.
        original_max_seq_len: the length of the context before the extension.
        beta_fast, beta_slow: the turns within the original length at which the ramp of the frequencies begins and ends.
        mscale, mscale_all_dim: with ``m(a) = 0.1 a ln(scale_factor) + 1``, or 1 for a ``scale_factor`` up to 1, the
            factor of cosines and sines is ``m(mscale) / m(mscale_all_dim)`` if neither is 0; ``m(mscale)`` if
            ``mscale_all_dim`` is 0; ``m(1)`` if ``mscale`` is 0.
        truncate: whether the ends of the ramp are rounded outwards to whole planes.
        device: the device of the tables, by default torch's default device.

    Attributes:
        attention_scaling: the factor of cosines and sines.

    Raises:
        TypeError: a number or ``truncate`` has another type.
        ValueError: ``encoding_dim`` is odd, a number is out of range, or ``beta_fast`` is below ``beta_slow``.
    """

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float = 500_000.0,
        scale_factor: float,
        original_max_seq_len: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        truncate: bool = True,
        device: torch.device | str | None = None,
    ):
        super().__init__(encoding_dim, max_seq_len, theta=theta, device=device, impl="reference")
        self.scale_factor = number("scale_factor", scale_factor, above=0)
        self.original_max_seq_len = integer("original_max_seq_len", original_max_seq_len, at_least=1)
        self.beta_fast, self.beta_slow = (
            number("beta_fast", beta_fast, above=0),
            number("beta_slow", beta_slow, above=0),
        )
        self.mscale_param = number("mscale", mscale, at_least=0)
        self.mscale_all_dim = number("mscale_all_dim", mscale_all_dim, at_least=0)
        self.truncate = flag("truncate", truncate)
        self.attention_scaling = self._factor()
        self.reset_parameters()

    def extra_repr(self) -> str:
        """The text that ``print(model)`` shows."""
        scaling = f"scale_factor={self.scale_factor}, attention_scaling={self.attention_scaling:.4f}"
        return f"{super().extra_repr()}, {scaling}"

    def _frequencies(self) -> torch.Tensor:
        try:
            return frequencies.yarn(
                self.encoding_dim, self.theta, self.scale_factor, self.original_max_seq_len,
                beta_fast=self.beta_fast, beta_slow=self.beta_slow, truncate=self.truncate,
            )  # fmt: skip
        except ValueError as error:
            names = {"base": "theta", "factor": "scale_factor"}
            raise renamed(error, original_max_position_embeddings="original_max_seq_len", **names) from error

    def _factor(self) -> float:
        if self.mscale_param and self.mscale_all_dim:
            return frequencies.yarn_attention_factor(self.scale_factor, self.mscale_param, self.mscale_all_dim)
        # m is linear in a, and m(0) = 1.
        return 1 + (self.mscale_param or 1.0) * (frequencies.yarn_attention_factor(self.scale_factor) - 1)
