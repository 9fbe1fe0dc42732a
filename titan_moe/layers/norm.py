"""Root-mean-square normalisation (arXiv 1910.07467)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.init import Constant, Init


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in fp32 whatever x is; returns x's dtype."""

    inits: dict[str, Init]

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.inits = {"weight": Constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return normed.to(x.dtype)
