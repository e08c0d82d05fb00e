"""Call functions of PyTorch once, because their first call on several CPU threads may be imprecise.

Intel's MKL chooses the code of a vector function at the function's first call. If several threads make the first call
together, a thread may silently run code of low accuracy once: https://github.com/pytorch/pytorch/issues/188792. A call
with a single element runs on one thread and makes the choice for all later calls.
"""

import torch

for dtype in (torch.float32, torch.float64):
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt):
        function(torch.ones(1, dtype=dtype, device="cpu"))
