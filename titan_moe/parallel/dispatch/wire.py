"""Process groups that rows are sent over, and the bytes that really go.

R rows, of any further shape.
"""

import itertools
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.parallel.collectives import there_and_back


@dataclass
class Traffic:
    """Bytes that this rank has sent to others, forward and backward, since `reset`.

    inside: to ranks of its own fast domain. across: to all others.
    """

    inside: int = 0
    across: int = 0

    def reset(self) -> None:
        self.inside = self.across = 0


@runtime_checkable
class CountsBytes(Protocol):
    """A dispatcher with this attribute has its bytes reported."""

    traffic: Traffic


class Wire:
    """A process group to send uneven numbers of rows over.

    scale_up_size: neighbouring ranks that make up a fast domain; None: all ranks do.
    traffic: where the bytes are counted.
    """

    def __init__(self, group: ProcessGroup, scale_up_size: int | None, traffic: Traffic) -> None:
        members = dist.get_process_group_ranks(group)
        self.group, self.traffic = group, traffic
        self.ranks, self.rank = len(members), dist.get_rank(group)
        domains = [member // scale_up_size if scale_up_size else 0 for member in members]
        self._is_inside = [domain == domains[self.rank] for domain in domains]
        self.handle = next(_handles)
        _wires[self.handle] = self

    @staticmethod
    def of(handle: int) -> "Wire":
        """For custom operators, which take numbers but no objects."""
        return _wires[handle]

    def send(self, rows: Tensor, splits: list[int], arriving: list[int]) -> Tensor:
        """All to all, not differentiable.

        rows: in order of the rank to send them to; splits, arriving: how many go to each rank, and
        come from each. Returns what arrived, in order of the rank it came from.
        """
        arrived = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), arriving, splits, group=self.group)
        row_bytes = rows.element_size() * prod(rows.shape[1:])
        for rank, (count, is_inside) in enumerate(zip(splits, self._is_inside, strict=True)):
            if rank == self.rank:
                continue
            if is_inside:
                self.traffic.inside += count * row_bytes
            else:
                self.traffic.across += count * row_bytes
        return arrived

    def send_one(self, x: Tensor) -> Tensor:
        """x[r] goes to rank r; returns the same shape, in order of the rank it came from."""
        ones = [1] * self.ranks
        return self.send(x, ones, ones)


_wires: WeakValueDictionary[int, Wire] = WeakValueDictionary()
_handles = itertools.count()


def exchange(wire: Wire, rows: Tensor, splits: list[int], arriving: list[int]) -> Tensor:
    """`Wire.send`, differentiable: gradients go back where their rows came from."""
    return there_and_back(
        rows,
        lambda rows: wire.send(rows, splits, arriving),
        lambda grad: wire.send(grad, arriving, splits),
    )
