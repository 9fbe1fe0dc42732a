"""Collectives that autograd goes back through. Sums of gradients are formed where the name says.

    all_gather        slices -> the whole, on every rank     back: sum over ranks, own slice
    reduce_scatter    sum over ranks, own slice              back: slices -> the whole
    all_reduce        sum over ranks                         back: as it is (the same on all ranks)
    all_reduce_back   as it is (the same on all ranks)       back: sum over ranks
    all_reduce_both_ways  sum over ranks                     back: sum over ranks
    own_slice         own slice of what is the same on all   back: slices -> the whole
    join_slices       slices -> the whole                    back: own slice (the same on all ranks)

Slices are equal, in order of ranks, along one dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Map = Callable[[Tensor], Tensor]

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


def there_and_back(x: Tensor, there: Map, back: Map) -> Tensor:
    """there(x), whose gradient is back(that of the result): a linear map and its transpose.

    Neither is differentiated itself. `there` gives a new tensor, or a view of x.
    """
    result: Tensor = _ThereAndBack.apply(x, there, back)
    return result


class _ThereAndBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return there_and_back(
        x, lambda x: gather_slices(x, dim, group), lambda grad: sum_slices(grad, dim, group)
    )


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return there_and_back(
        x, lambda x: sum_slices(x, dim, group), lambda grad: gather_slices(grad, dim, group)
    )


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return there_and_back(x, lambda x: summed(x, group), _same)


def all_reduce_back(x: Tensor, group: ProcessGroup) -> Tensor:
    return there_and_back(x, _same, lambda grad: summed(grad, group))


def all_reduce_both_ways(x: Tensor, group: ProcessGroup) -> Tensor:
    return there_and_back(x, lambda x: summed(x, group), lambda grad: summed(grad, group))


def own_slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return there_and_back(
        x, lambda x: slice_of(x, dim, group), lambda grad: gather_slices(grad, dim, group)
    )


def join_slices(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return there_and_back(
        x, lambda x: gather_slices(x, dim, group), lambda grad: slice_of(grad, dim, group)
    )


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
