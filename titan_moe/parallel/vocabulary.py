"""Embedding and loss where each rank has a part of the vocabulary.

B batch, S sequence, D hidden, V vocabulary, v this rank's part of it: V / ranks rows, in order.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.layers.head import IGNORED_LABEL


def embed_slice(tokens_BS: Tensor, weight_vD: Tensor, group: ProcessGroup) -> Tensor:
    """[B, S, D], this rank's share of a sum: rows of its own tokens, zeros for all others."""
    local_BS, own_BS = _within(tokens_BS, len(weight_vD), group)
    return F.embedding(local_BS, weight_vD).masked_fill(~own_BS[..., None], 0.0)


def sliced_cross_entropy(logits_BSv: Tensor, labels_BS: Tensor, group: ProcessGroup) -> Tensor:
    """Summed over labels other than -100, fp32, 0-d, the same on all ranks. No rank sees V logits.

    Two numbers per token travel, after their maximum: the sum of exponentials and the label's logit
    (arXiv 1909.08053, section 3).
    """
    loss: Tensor = _SlicedCrossEntropy.apply(logits_BSv, labels_BS, group)
    return loss


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSv: Tensor, labels_BS: Tensor, group: ProcessGroup) -> Tensor:
        scores_BSv = logits_BSv.float()
        highest_BS = scores_BSv.amax(dim=-1)
        dist.all_reduce(highest_BS, dist.ReduceOp.MAX, group=group)
        scores_BSv = scores_BSv - highest_BS[..., None]
        local_BS, own_BS = _within(labels_BS, logits_BSv.shape[-1], group)
        chosen_BS = scores_BSv.gather(-1, local_BS[..., None]).squeeze(-1) * own_BS
        powers_BSv = scores_BSv.exp()
        sums = torch.stack([powers_BSv.sum(dim=-1), chosen_BS])
        dist.all_reduce(sums, group=group)
        total_BS, chosen_BS = sums
        counted_BS = labels_BS != IGNORED_LABEL
        shares_BSv = powers_BSv.div_(total_BS[..., None])
        ctx.save_for_backward(shares_BSv, local_BS, own_BS, counted_BS)
        ctx.dtype = logits_BSv.dtype
        return ((total_BS.log() - chosen_BS) * counted_BS).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shares_BSv, local_BS, own_BS, counted_BS = ctx.saved_tensors
        labels_BS1 = own_BS[..., None].to(shares_BSv.dtype)
        grad_BSv = shares_BSv.scatter_add(-1, local_BS[..., None], -labels_BS1)
        return (grad_BSv * (counted_BS[..., None] * grad)).to(ctx.dtype), None, None


def _within(ids_BS: Tensor, size: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Places in this rank's part of the vocabulary (0 for ids of another's), and whose is its."""
    local_BS = ids_BS - dist.get_rank(group) * size
    own_BS = (local_BS >= 0) & (local_BS < size)
    return local_BS.where(own_BS, 0), own_BS
