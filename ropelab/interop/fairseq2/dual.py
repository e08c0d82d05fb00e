"""fairseq2's encoder with two bases, one for each half of the features, over `ropelab.apply_rope`."""

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.arguments import integer, number
from ropelab.interop.fairseq2.kernel import KernelEncoder


class DualRotaryEncoder(KernelEncoder):
    """fairseq2's ``DualRotaryEncoder``, with one base for the first half of the features and another for the second.

    Each half has adjacent pairs and the frequencies of a head of ``E/2`` features. The adjacent pairs of the two halves
    are the adjacent pairs of all E features, so the encoder rotates all features in one launch, by the frequencies of
    both halves side by side. The original calls two encoders and concatenates their results.

    The contract comes from fairseq2 0.8.1 (``fairseq2.nn.position_encoder.DualRotaryEncoder``). The encoder has no
    submodules ``rope_std`` and ``rope_long``.

    Args:
        encoding_dim: E, the last dimension of ``seqs``; a multiple of 4.
        max_seq_len: the number of positions that the tables serve.
        theta: the base of the frequencies of the first half.
        dual_theta: the base of the frequencies of the second half.
        device: the device of the tables, by default torch's default device.

    Raises:
        TypeError: a number has another type.
        ValueError: ``encoding_dim`` is no multiple of 4, or a number is out of range.
    """

    def __init__(
        self,
        encoding_dim: int,
        max_seq_len: int,
        *,
        theta: float = 10_000.0,
        dual_theta: float = 100_000.0,
        device: torch.device | str | None = None,
    ):
        if integer("encoding_dim", encoding_dim, at_least=4) % 4:
            raise ValueError(f"encoding_dim: expected a multiple of 4, got {encoding_dim}")
        super().__init__(encoding_dim, max_seq_len, theta=theta, device=device, impl="llama")
        self.dual_theta = number("dual_theta", dual_theta, above=0)
        self.reset_parameters()

    def extra_repr(self) -> str:
        """The text that ``print(model)`` shows."""
        return f"{super().extra_repr()}, dual_theta={self.dual_theta}"

    def _frequencies(self) -> torch.Tensor:
        half = self.encoding_dim // 2
        return torch.cat([inverse_frequencies(half, base) for base in (self.theta, self.dual_theta)])
