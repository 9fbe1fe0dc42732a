"""Which dimension of the mesh a collective is over, and how much a rank sends in it."""

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops

from titan_moe.mesh import Meshes
from titan_moe.planner.figures import Dimension
from titan_moe.planner.message import Message, Operation, When

Tier = Literal["inside", "across"]

c10d = torch.ops.c10d

OPERATIONS: dict[Any, Operation] = {
    c10d.allreduce_.default: "all_reduce",
    c10d._allgather_base_.default: "all_gather",
    c10d.allgather_.default: "all_gather",
    c10d._reduce_scatter_base_.default: "reduce_scatter",
    c10d.reduce_scatter_.default: "reduce_scatter",
    c10d.alltoall_base_.default: "all_to_all",
    c10d.send.default: "send",
}
# What arrives was counted where it was sent.
ARRIVALS = {c10d.recv_.default}
COLLECTIVES = collective_ops | set(OPERATIONS) | ARRIVALS


class Groups:
    """Knows the groups of one rank. Subsets of a dimension's ranks, as tiers are, belong to it."""

    def __init__(self, meshes: Meshes) -> None:
        self._world = meshes.layout.world
        sizes = {**meshes.layout.dense, **meshes.layout.sparse}
        views: dict[Dimension, Any] = {
            "tp": meshes.dense, "cp": meshes.dense, "pp": meshes.dense,
            "dp_replicate": meshes.dense, "dp_shard": meshes.dense,
            "ep": meshes.sparse, "efsdp": meshes.sparse,
        }  # fmt: skip
        self._ranks: dict[Dimension, set[int]] = {
            name: set(dist.get_process_group_ranks(mesh[name].get_group()))
            for name, mesh in views.items()
            if sizes[name] > 1
        }
        outermost_first: tuple[Dimension, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        self._widest: Dimension = next(
            (name for name in outermost_first if sizes[name] > 1), "dp_shard"
        )

    def dimension(self, group: ProcessGroup, operation: Operation) -> Dimension:
        """All-to-alls are of experts. A group of all ranks counts as the outermost dimension."""
        members = set(dist.get_process_group_ranks(group))
        if operation == "all_to_all":
            return "ep"
        for name, ranks in self._ranks.items():
            if name not in ("ep", "efsdp") and members <= ranks:
                return name
        if len(members) < self._world and "cp" in self._ranks:  # the ranks of a sequence
            return "cp"
        return self._widest

    def tier(self, group: ProcessGroup) -> Tier | None:
        """Of a dispatcher's all-to-all over a part of the ep ranks: neighbours, or one of each."""
        members = dist.get_process_group_ranks(group)
        if set(members) == self._ranks["ep"]:
            return None
        return "inside" if members[-1] - members[0] == len(members) - 1 else "across"


def message(
    operator: Any,
    args: Sequence[Any],
    groups: Groups,
    *,
    when: When,
    what: str,
    of: Dimension | None,
) -> Message | None:
    """What an operator of c10d sends; None: nothing. of: the dimension, where it is known.

    Raises NotImplementedError for a collective that nothing here uses.
    """
    if operator in ARRIVALS:
        return None
    if operator not in OPERATIONS:
        raise NotImplementedError(f"{operator} is counted nowhere")
    operation = OPERATIONS[operator]
    group = CollectiveOp.get_process_group(operator, args)
    size = _sent(operator, args, group)
    if not size:
        return None
    if of is None or operation == "all_reduce":  # over replicas, not over shards
        of = groups.dimension(group, operation)
    if of == "dp_replicate":
        when = "step"
    tier = groups.tier(group) if operation == "all_to_all" else None
    return Message(of, operation, size, 1, when, what, tier)


def _sent(operator: Any, args: Sequence[Any], group: ProcessGroup) -> int:
    """Bytes to other ranks."""
    ranks = group.size()
    if operator is c10d.send.default:
        return sum(map(_bytes, args[0]))
    if operator is c10d.allreduce_.default:
        return 2 * sum(map(_bytes, args[0])) * (ranks - 1) // ranks
    if operator is c10d._allgather_base_.default:
        return _bytes(args[1]) * (ranks - 1)
    if operator is c10d.allgather_.default:
        return sum(map(_bytes, args[1])) * (ranks - 1)
    if operator is c10d._reduce_scatter_base_.default:
        return _bytes(args[0]) * (ranks - 1)
    if operator is c10d.reduce_scatter_.default:
        return sum(map(_bytes, args[0])) * (ranks - 1)
    assert operator is c10d.alltoall_base_.default
    rows, splits = args[1], args[4]
    if not splits:
        return _bytes(rows) * (ranks - 1) // ranks
    row_bytes = rows.element_size() * prod(rows.shape[1:])
    return (sum(splits) - splits[dist.get_rank(group)]) * row_bytes


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
