"""The end of a model: final norm, output projection, cross-entropy.

B batch, S sequence, D hidden, V vocabulary, M depths of multi-token prediction, K = 1 + M.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.balance import accumulate, attach_loss
from titan_moe.layers.init import Constant, Init
from titan_moe.layers.linear import Linear
from titan_moe.layers.norm import RMSNorm
from titan_moe.layers.router import FixedDtype

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


class LossesAhead(FixedDtype):
    """Losses of multi-token prediction: differentiated with the main loss, and logged apart.

    Buffers, fp32 [M], which are not saved:
        scale_M: factor on each depth's gradient; whoever knows a step's labels at that depth
            writes it.
        nats_M: each depth's summed cross-entropy since someone zeroed it, in this process.
    """

    inits: dict[str, Init]
    scale_M: Tensor
    nats_M: Tensor

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.register_buffer("scale_M", torch.empty(depth, dtype=torch.float32), persistent=False)
        self.register_buffer("nats_M", torch.empty(depth, dtype=torch.float32), persistent=False)
        self.inits = {"scale_M": Constant(1.0), "nats_M": Constant(0.0)}

    def forward(self, main: Tensor, ahead: list[Tensor]) -> Tensor:
        """main, whose gradient is from now on that of main + the sum of scale * loss, all 0-d.

        Whatever main is multiplied by afterwards does not reach the others.
        """
        accumulate(torch.stack(ahead).detach(), self.nats_M)
        for loss, scale in zip(ahead, self.scale_M.unbind(), strict=True):
            main = attach_loss(main, loss, scale)
        return main.clone()  # no view: FSDP hangs its hook on what the head returns


class Head(nn.Module):
    """Both uses go through `forward`, so that whatever wraps the module sees them.

    mtp_depth: M, layers of multi-token prediction, whose logits are made by the same output.

    Slots: cross_entropy(logits, labels_BS) -> 0-d sum; whole_logits(logits) -> logits_BSV.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, norm_eps: float, std: float, mtp_depth: int = 0
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps=norm_eps)
        self.output = Linear(hidden_size, vocab_size, std=std)
        self.ahead = LossesAhead(mtp_depth) if mtp_depth else None
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        self.whole_logits: Callable[[Tensor], Tensor] = keep

    def forward(self, hidden_BSD: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        if labels_BS is None:
            return self.whole_logits(self.output(self.norm(hidden_BSD)))
        if labels_BS.ndim == 2:
            return self.cross_entropy(self.output(self.norm(hidden_BSD)), labels_BS)
        assert self.ahead is not None, "labels ahead without multi-token prediction"
        # One use of the weight for all depths, as a split backward wants it (see layers/mtp.py).
        logits_BSKV = self.output(hidden_BSD.unflatten(2, (labels_BS.shape[2], -1)))
        depths = zip(logits_BSKV.unbind(dim=2), labels_BS.unbind(dim=2), strict=True)
        main, *ahead = [self.cross_entropy(*of_depth) for of_depth in depths]
        return self.ahead(main, ahead)

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """Sum of the cross-entropy in nats over labels other than -100: fp32, 0-d.

        Given what a decoder returns of all depths, [B, S, K·D] and normed, and labels_BSK, it is
        the main loss still, to whose gradient `ahead` adds that of the other depths.
        """
        return self(hidden_BSD, labels_BS)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """[B, S, V], in the dtype of the output weight."""
        return self(hidden_BSD)
