"""Root-mean-square normalisation (arXiv 1910.07467)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.init import Constant, Init


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in fp32 whatever x is; returns x's dtype.

    Slot: sum_over_width, which adds up squares where a process holds a part of that dimension.
    """

    inits: dict[str, Init]

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.sum_over_width: Callable[[Tensor], Tensor] | None = None
        self.weight = nn.Parameter(torch.empty(width))
        self.inits = {"weight": Constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        if self.sum_over_width is None:
            normed = F.rms_norm(x.float(), (self.width,), self.weight.float(), self.eps)
            return normed.to(x.dtype)
        squares = self.sum_over_width(x.float().square().sum(-1, keepdim=True))
        normed = x.float() * torch.rsqrt(squares / self.width + self.eps) * self.weight.float()
        return normed.to(x.dtype)
