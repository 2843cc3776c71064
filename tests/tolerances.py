"""The one table of tolerances: how far two ways of computing the same thing may lie apart."""

from __future__ import annotations

import torch

# caches of one model, relative to max(1, a layer's largest entry), fp32 on the CPU
CACHE = 1e-4

# keys after a turn, relative to max(1, the largest key), fp32
TURNED = 1e-5

# log-probabilities in nats against transformers' own, fp32
NATS = 1e-4

# query attention and deviation, relative to the largest; fp32, and bfloat16 through a few layers
EVIDENCE = 1e-4
EVIDENCE_HALF = 1.6e-2

# root mean square of the difference relative to that of the naive result: two units in the last place, PyTorch's code
# and the kernel alike
ATTENTION = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# largest difference relative to the largest key: one unit in the last place of the dtype; fp32 angles reach 500 turns;
# the kernel too
ROTATION = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

# squared deviations, relative to each row's own: sums of a few hundred squares in fp32, whatever the order
DEVIATION = 1e-5

# margin recovery of a repair that works, on the demo model
MR_LOW, MR_HIGH = 0.9, 1.1
