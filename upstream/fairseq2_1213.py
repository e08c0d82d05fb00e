"""A complex product under torch.compile: Inductor warns, and leaves the product to an operator of its own."""

import warnings

import torch
from torch._inductor.utils import run_and_get_code


def rotate(x, factors):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2)


x = torch.randn(2, 64, 128)
factors = torch.polar(torch.ones(64, 64), torch.rand(64, 64))
# Code from an earlier run would come without the warning.
with warnings.catch_warnings(record=True) as caught, torch._inductor.config.patch(force_disable_caches=True):
    warnings.simplefilter("always")
    _, code = run_and_get_code(torch.compile(rotate), x, factors)
print("torch", torch.__version__)
print("warns of complex operators:", any("complex" in str(warning.message) for warning in caught))
print("the product is left to eager:", "aten.mul" in code[0])
