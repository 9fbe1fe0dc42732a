"""The gradient's norm over a sharded model: each parameter of the whole model counted once."""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# As in torch.nn.utils.clip_grad_norm_: keeps a norm of 0 from dividing.
CLIP_EPS = 1e-6


@torch.no_grad()
def grad_norm(
    parameters: Iterable[nn.Parameter],
    ranks_per_stage: int,
    device: torch.device,
    p: float = 2.0,
    copies: Mapping[nn.Parameter, int] | None = None,
) -> Tensor:
    """p-norm of all gradients together, 0-d fp64, the same on every rank. Collective over all.

    Slices of one parameter are on different ranks, on meshes that differ between parameters, and
    replicas (of HSDP, or along a mesh dimension that a parameter knows nothing of) hold a slice
    more than once. Of a stage's ranks, each distinct slice is on `ranks_per_stage / slices`, so
    what a rank adds is weighted by the inverse. A rank that holds no gradient at all adds 0.

    device: where the parameters are.
    copies: how many stages hold a parameter, where it is more than one.
    p: 2.0 or any other finite order above 0, or math.inf. A gradient that is not finite makes the
    norm inf or nan.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        assert isinstance(gradient, DTensor), (
            "a gradient outside FSDP would be counted on each rank"
        )
        local = gradient.to_local()
        if not local.numel():
            continue
        norm = torch.linalg.vector_norm(local, p, dtype=torch.float64)
        if p == math.inf:
            total = torch.maximum(total, norm)
        else:
            ranks = ranks_per_stage * (copies or {}).get(parameter, 1)
            total += norm**p * (_slices(gradient) / ranks)
    if p == math.inf:
        # A maximum over ranks may drop nan, but never inf.
        total = torch.nan_to_num(total, nan=math.inf, posinf=math.inf)
        dist.all_reduce(total, dist.ReduceOp.MAX)
        return total
    dist.all_reduce(total)
    return total ** (1.0 / p)


@torch.no_grad()
def clip_grads(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Multiply every gradient by min(1, max_norm / (norm + CLIP_EPS)), in place.

    A norm that is not finite leaves no finite gradient behind: look at it first.
    """
    factor = torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().mul_(factor.to(parameter.grad.device))


def _slices(tensor: DTensor) -> int:
    """Into how many distinct slices the tensor is cut."""
    slices = 1
    for mesh_dim, placement in enumerate(tensor.placements):
        assert not isinstance(placement, Partial), "a gradient that is still to be summed"
        if isinstance(placement, Shard | _StridedShard):
            slices *= tensor.device_mesh.size(mesh_dim)
    return slices
