"""The end of a model: final norm, output projection, cross-entropy.

B batch, S sequence, D hidden, V vocabulary.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.linear import Linear
from titan_moe.layers.norm import RMSNorm

IGNORED_LABEL = -100


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum over labels other than -100, in nats: fp32, 0-d."""
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(),
        labels_BS.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )


def keep(logits_BSV: Tensor) -> Tensor:
    """`whole_logits` where one process holds the whole vocabulary and sequence."""
    return logits_BSV


class Head(nn.Module):
    """Both uses go through `forward`, so that whatever wraps the module sees them.

    Slots: cross_entropy(logits, labels_BS) -> 0-d sum; whole_logits(logits) -> logits_BSV.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, norm_eps: float, std: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps=norm_eps)
        self.output = Linear(hidden_size, vocab_size, std=std)
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        self.whole_logits: Callable[[Tensor], Tensor] = keep

    def forward(self, hidden_BSD: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        logits_BSV = self.output(self.norm(hidden_BSD))
        if labels_BS is None:
            return self.whole_logits(logits_BSV)
        return self.cross_entropy(logits_BSV, labels_BS)

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """Sum of the cross-entropy in nats over labels other than -100: fp32, 0-d."""
        return self(hidden_BSD, labels_BS)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """[B, S, V], in the dtype of the output weight."""
        return self(hidden_BSD)
