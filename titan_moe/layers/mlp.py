"""The gated MLP of dense blocks and of shared experts (SwiGLU, arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.linear import Linear


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, [..., hidden_size] -> [..., hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, std: float) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, intermediate_size, std=std)
        self.up = Linear(hidden_size, intermediate_size, std=std)
        self.down = Linear(intermediate_size, hidden_size, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
