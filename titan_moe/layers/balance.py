"""Auxiliary losses of routing, in forms that do not depend on how a batch is cut.

B batch, S sequence, E experts, K experts chosen per token.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SumOverSequence = Callable[[Tensor], Tensor]


def keep(statistics: Tensor) -> Tensor:
    """`sum_over_sequence` where one process holds whole sequences."""
    return statistics


def sequence_balance_loss(
    scores_BSE: Tensor, valid_BS: Tensor, top_k: int, sum_over_sequence: SumOverSequence = keep
) -> Tensor:
    """loss_B: sum over experts of f_E · P_E (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).

    f: E/K times the share of the sequence's valid tokens that have the expert among the K highest
    *scores*: by equation 18 neither the selection bias nor groups play a part. (The modelling code
    published with V3 has no balance loss; V2's counts the experts really chosen, but has no bias.)
    P: mean over valid tokens of the score as a share of the token's scores. The gradient flows
    through P. A sequence without a valid token has loss 0.

    sum_over_sequence: adds up a tensor over the processes that hold parts of the same sequences.
        Then each returns its tokens' share of the loss. As P is a sum over tokens, and f and the
        number of tokens have no gradient, no gradient has to travel.
    """
    num_experts = scores_BSE.shape[-1]
    valid_BS1 = valid_BS.unsqueeze(-1).to(scores_BSE.dtype)
    top_BSE = mark_top_scores(scores_BSE.detach(), top_k)
    statistics_BX = torch.cat([(top_BSE * valid_BS1).sum(dim=1), valid_BS1.sum(dim=1)], dim=-1)
    chosen_BE, tokens_B1 = sum_over_sequence(statistics_BX).split([num_experts, 1], dim=-1)
    tokens_B1 = tokens_B1.clamp(min=1)
    f_BE = chosen_BE * (num_experts / top_k) / tokens_B1
    shares_BSE = F.normalize(scores_BSE, p=1.0, dim=-1)
    p_BE = (shares_BSE * valid_BS1).sum(dim=1) / tokens_B1
    return (f_BE * p_BE).sum(dim=-1)


def global_balance_loss(
    scores_BSE: Tensor,
    valid_BS: Tensor,
    counts_E: Tensor,
    sum_over_sequence: SumOverSequence = keep,
) -> Tensor:
    """loss_B: sum over experts of f_E · P_E, where f is that of a whole step, the one before.

    counts_E: int64, the tokens that each expert really got in that step, over all processes, the
        selection bias having had its say. f: E times its share of them; 0 before the first step.
    P: as in `sequence_balance_loss`. As f is given, a sequence's loss is a mean over its tokens,
        and it does not matter which of them a process holds (after arXiv 2501.11873, which adds up
        the counts of the running step over processes instead, micro-batch by micro-batch).

    sum_over_sequence: as for the balance loss.
    """
    total = counts_E.sum().clamp(min=1)
    f_E = (counts_E.double() * (len(counts_E) / total)).to(scores_BSE.dtype)
    valid_BS1 = valid_BS.unsqueeze(-1).to(scores_BSE.dtype)
    tokens_B1 = sum_over_sequence(valid_BS1.sum(dim=1)).clamp(min=1)
    shares_BSE = F.normalize(scores_BSE, p=1.0, dim=-1)
    p_BE = (shares_BSE * valid_BS1).sum(dim=1) / tokens_B1
    return (f_E * p_BE).sum(dim=-1)


def sequence_z_loss(
    logits_BSE: Tensor, valid_BS: Tensor, sum_over_sequence: SumOverSequence = keep
) -> Tensor:
    """loss_B: mean over valid tokens of logsumexp(logits)² (ST-MoE, arXiv 2202.08906, eq. 5).

    sum_over_sequence: as for the balance loss.
    """
    valid = valid_BS.to(logits_BSE.dtype)
    squares_BS = logits_BSE.logsumexp(dim=-1).square()
    tokens_B = sum_over_sequence(valid.sum(dim=1)).clamp(min=1)
    return (squares_BS * valid).sum(dim=1) / tokens_B


class _Attach(torch.autograd.Function):
    """Hands out on unchanged, and gives the loss a gradient of `scale` when out gets its own."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad_out, scale.clone(), None


def attach_loss(out: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """out, with `scale * loss` (both 0-d) added to whatever the caller minimises."""
    return _Attach.apply(out, loss, scale)


@torch.library.custom_op("titan_moe::mark_top_scores", mutates_args=())
def mark_top_scores(scores_BSE: Tensor, top_k: int) -> Tensor:
    """1 where a score is among its token's top_k, else 0. Not differentiable."""
    top_BSK = scores_BSE.topk(top_k, dim=-1).indices
    return torch.zeros_like(scores_BSE).scatter_(-1, top_BSK, 1.0)


@mark_top_scores.register_fake
def _(scores_BSE: Tensor, top_k: int) -> Tensor:
    return torch.empty_like(scores_BSE)


@torch.library.custom_op("titan_moe::accumulate", mutates_args={"total"})
def accumulate(value: Tensor, total: Tensor) -> Tensor:
    """total += value, in place. Returns value again, for recomputation to save."""
    total.add_(value)
    return value.clone()


@accumulate.register_fake
def _(value: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(value)


OPS = (torch.ops.titan_moe.mark_top_scores.default, torch.ops.titan_moe.accumulate.default)
