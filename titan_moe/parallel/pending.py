"""Gradients that ranks still have to add up when all of a step's micro-batches are through.

    over tp   weights that are whole on each rank, each of which saw other tokens, or other heads
    over pp   a weight that several stages hold, as tied embeddings

Once per step, on FSDP's slices and in their dtype: a fraction of what each micro-batch would send.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.mesh import Meshes
from titan_moe.parallel.initialise import unwrapped
from titan_moe.parallel.local import replicated_parameters
from titan_moe.parallel.shares import check_shares
from titan_moe.world import gather


@dataclass(frozen=True)
class SharedWeight:
    """One weight of several stages. parameters: those on this rank. group: its ranks; None: one."""

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None


class PendingSums:
    """copies: for each parameter that several stages hold, by how many; the norm counts one."""

    def __init__(
        self,
        replicated: dict[str, tuple[nn.Parameter, bool]],
        tp_group: dist.ProcessGroup,
        over_pp: list[SharedWeight],
        copies: dict[nn.Parameter, int],
    ) -> None:
        """replicated: by name, what every tp rank holds whole, and whether gradients are shares."""
        self._replicated, self._tp_group, self._over_pp = replicated, tp_group, over_pp
        self._checked = dist.get_world_size(tp_group) == 1
        self.copies = copies

    @classmethod
    def of(cls, parts: list[nn.Module], meshes: Meshes) -> "PendingSums":
        """Collective: stages find out what they share. After FSDP, which replaces parameters."""
        replicated: dict[str, tuple[nn.Parameter, bool]] = {}
        for part in parts:
            partial = replicated_parameters(part)
            replicated |= {n: (p, partial[p]) for n, p in part.named_parameters() if p in partial}
        own: dict[str, list[nn.Parameter]] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                own.setdefault(unwrapped(name), []).append(parameter)
        pipeline = meshes.pipeline.get_group()
        of_ranks = gather({name: len(held) for name, held in own.items()}, pipeline)
        ranks = dist.get_process_group_ranks(pipeline)
        over_pp: list[SharedWeight] = []
        copies: dict[nn.Parameter, int] = {}
        for name in sorted(own):  # the same order on all ranks that share
            held = [of_rank.get(name, 0) for of_rank in of_ranks]
            if sum(held) == 1:
                continue
            holders = [rank for rank, count in zip(ranks, held, strict=True) if count]
            group = dist.new_group(holders, use_local_synchronization=True)
            over_pp.append(SharedWeight(own[name], group if len(holders) > 1 else None))
            copies |= dict.fromkeys(own[name], sum(held))
        return cls(replicated, meshes.tensor.get_group(), over_pp, copies)

    @torch.no_grad()
    def add_up(self) -> None:
        """In place, in `.grad`. Once per step: a second call would add the sums up again.

        Raises:
            ValueError: in the first step, a gradient that is no share, or is one, against what the
                recipe's sharding made of it.
        """
        gradients = {
            name: (local_gradient(parameter), partial)
            for name, (parameter, partial) in self._replicated.items()
            if parameter.grad is not None
        }
        if not self._checked:
            check_shares(gradients, self._tp_group)
            self._checked = True
        slices = [gradient for gradient, partial in gradients.values() if partial]
        for of_dtype in _by_dtype(slices):
            _all_reduce(of_dtype, self._tp_group)
        for shared in self._over_pp:
            slices = [local_gradient(p) for p in shared.parameters]
            for other in slices[1:]:
                slices[0].add_(other)
            if shared.group is not None:
                _all_reduce(slices[:1], shared.group)
            for other in slices[1:]:
                other.copy_(slices[0])


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's slice of the gradient, sharing memory."""
    assert isinstance(parameter.grad, DTensor), "a gradient outside FSDP"
    return parameter.grad.to_local()


def _by_dtype(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield [tensor for tensor in tensors if tensor.dtype is dtype]


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """All of them as one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))
