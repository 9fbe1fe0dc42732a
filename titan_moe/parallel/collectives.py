"""Collectives that autograd goes back through. Sums of gradients are formed where the name says.

    all_gather        slices -> the whole, on every rank     back: sum over ranks, own slice
    reduce_scatter    sum over ranks, own slice              back: slices -> the whole
    all_reduce        sum over ranks                         back: as it is (the same on all ranks)
    all_reduce_back   as it is (the same on all ranks)       back: sum over ranks
    own_slice         own slice of what is the same on all   back: slices -> the whole
    join_slices       slices -> the whole                    back: own slice (the same on all ranks)

Slices are equal, in order of ranks, along one dimension.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Since torch 2.13 these have new names, and the old ones warn.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_slices(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All ranks' x side by side along dim. Not differentiable."""
    ranks = dist.get_world_size(group)
    pieces = x.new_empty(ranks, *x.shape)
    _all_gather_single(pieces.flatten(0, 1), x.contiguous(), group)
    dim %= x.ndim
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def sum_slices(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's slice, along dim, of the sum over ranks. Not differentiable."""
    ranks = dist.get_world_size(group)
    assert x.shape[dim] % ranks == 0, f"{tuple(x.shape)} in {ranks} along {dim}"
    dim %= x.ndim
    pieces = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(pieces[0])
    _reduce_scatter_single(out, pieces.flatten(0, 1), group=group)
    return out


def slice_of(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's slice of x along dim."""
    ranks = dist.get_world_size(group)
    assert x.shape[dim] % ranks == 0, f"{tuple(x.shape)} in {ranks} along {dim}"
    return x.chunk(ranks, dim)[dist.get_rank(group)].contiguous()


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks, in memory of its own. Not differentiable."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_slices(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_slices(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return sum_slices(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_slices(grad, ctx.dim, ctx.group), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllReduceBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return slice_of(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_slices(grad, ctx.dim, ctx.group), None, None


class _JoinSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_slices(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return slice_of(grad, ctx.dim, ctx.group), None, None


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    result: Tensor = _AllGather.apply(x, dim, group)
    return result


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    result: Tensor = _ReduceScatter.apply(x, dim, group)
    return result


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    result: Tensor = _AllReduce.apply(x, group)
    return result


def all_reduce_back(x: Tensor, group: ProcessGroup) -> Tensor:
    result: Tensor = _AllReduceBack.apply(x, group)
    return result


def own_slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    result: Tensor = _OwnSlice.apply(x, dim, group)
    return result


def join_slices(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    result: Tensor = _JoinSlices.apply(x, dim, group)
    return result
