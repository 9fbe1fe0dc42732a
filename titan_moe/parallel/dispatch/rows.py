"""Rows to the ranks that hold their experts, and back: what all dispatchers here have in common.

T tokens, D hidden, C copies of tokens that are sent, R rows that arrive, P ranks, E experts of all
ranks, e experts of one rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_moe.parallel.dispatch.wire import Wire, exchange


@dataclass(frozen=True)
class Sizes:
    """How many rows go where, known on the host; and in detail, on the device.

    splits, arriving: rows that go to each rank of the group, and that come from each.
    arriving_Pe: int64; from each rank, for each expert held here.
    """

    splits: list[int]
    arriving: list[int]
    arriving_Pe: Tensor


@dataclass(frozen=True)
class Delivery:
    """What `give_back` needs to undo a `deliver`."""

    token_C: Tensor
    tokens: int
    order_R: Tensor
    sizes: Sizes
    dtype: torch.dtype


def deliver(
    wire: Wire, x_TD: Tensor, token_C: Tensor, weights_C: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor, Delivery]:
    """-> rows_RD, row_weights_R, offsets_e, delivery, as a dispatcher's `dispatch` has them.

    token_C: the token that each copy is of, copies being sorted by the expert they go to.
    """
    rows_RD = exchange(wire, copy(x_TD, token_C), sizes.splits, sizes.arriving)
    weights_R = exchange(wire, weights_C, sizes.splits, sizes.arriving)
    order_R = _by_expert(sizes.arriving_Pe, len(rows_RD))
    offsets_e = sizes.arriving_Pe.sum(dim=0).cumsum(dim=0).to(torch.int32)
    delivery = Delivery(token_C, len(x_TD), order_R, sizes, x_TD.dtype)
    return rows_RD.index_select(0, order_R), weights_R.index_select(0, order_R), offsets_e, delivery


def give_back(wire: Wire, weighted_rows_RD: Tensor, delivery: Delivery) -> Tensor:
    """out_TD, fp32: the sum of each token's rows, which travel in the activations' dtype."""
    rows_RD = weighted_rows_RD.to(delivery.dtype)
    in_order_RD = torch.zeros_like(rows_RD).index_copy(0, delivery.order_R, rows_RD)
    sizes = delivery.sizes
    copies_CD = exchange(wire, in_order_RD, sizes.arriving, sizes.splits)
    return sum_copies(copies_CD, delivery.token_C, delivery.tokens)


def count(sorted_ids: Tensor, num_experts: int) -> Tensor:
    """counts_E, int64, of sorted expert numbers; numbers from num_experts on are not counted."""
    experts_E = torch.arange(num_experts, device=sorted_ids.device)
    ends_E = torch.searchsorted(sorted_ids, experts_E, right=True)
    return ends_E.diff(prepend=ends_E.new_zeros(1))


def copy(x_TD: Tensor, token_C: Tensor) -> Tensor:
    """x_CD. As `sum_copies` its gradients are summed in fp32, whatever their dtype."""
    result: Tensor = _Copy.apply(x_TD, token_C)
    return result


def sum_copies(x_CD: Tensor, token_C: Tensor, tokens: int) -> Tensor:
    """out_TD, fp32."""
    result: Tensor = _SumCopies.apply(x_CD, token_C, tokens)
    return result


def _by_expert(arriving_Pe: Tensor, rows: int) -> Tensor:
    """order_R: arriving rows, which lie by rank and then expert, by expert and then rank."""
    ends_Pe = arriving_Pe.flatten().cumsum(dim=0)
    group_R = torch.searchsorted(ends_Pe, torch.arange(rows, device=ends_Pe.device), right=True)
    return (group_R % arriving_Pe.shape[1]).sort(stable=True).indices


def _summed(x_CD: Tensor, token_C: Tensor, tokens: int) -> Tensor:
    out_TD = x_CD.new_zeros(tokens, x_CD.shape[1], dtype=torch.float32)
    return out_TD.index_add_(0, token_C, x_CD.float())


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_C: Tensor) -> Tensor:
        ctx.save_for_backward(token_C)
        ctx.tokens = len(x_TD)
        return x_TD.index_select(0, token_C)

    @staticmethod
    def backward(ctx: Any, grad_CD: Tensor) -> tuple[Tensor, None]:
        (token_C,) = ctx.saved_tensors
        return _summed(grad_CD, token_C, ctx.tokens).to(grad_CD.dtype), None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_CD: Tensor, token_C: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token_C)
        ctx.dtype = x_CD.dtype
        return _summed(x_CD, token_C, tokens)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        (token_C,) = ctx.saved_tensors
        return grad_TD.to(ctx.dtype).index_select(0, token_C), None, None
