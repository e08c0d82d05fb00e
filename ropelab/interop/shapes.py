"""Check one tensor of an adapter against sizes that other arguments give."""

import torch

from ropelab.arguments import DTYPES, check_tensor


def check_shape(
    name: str, x: torch.Tensor, shape: tuple[int | str, ...], like: str, device: torch.device, dtypes=DTYPES
) -> None:
    """Check dtype, shape and device of a tensor.

    Args:
        name: the name of the argument, for the message.
        shape: the size of each axis, or the name of a size that is free.
        like: the name of the argument whose device the tensor must have.
        device: the device of that argument.
        dtypes: the dtypes that ``x`` may have.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.
        ValueError: ``x`` has another shape or device.
    """
    expected = f"[{', '.join(map(str, shape))}]"
    check_tensor(name, x, (len(shape),), expected, dtypes)
    if any(isinstance(size, int) and size != found for size, found in zip(shape, x.shape, strict=True)):
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name}: expected {like}'s device {device}, got {x.device}")
