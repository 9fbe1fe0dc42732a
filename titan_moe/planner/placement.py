"""Which ranks share a fast domain, and so which part of their traffic leaves it. Torch-free.

n ranks of a group, c of them in one domain.
"""

from collections import Counter
from functools import cache
from math import prod

from titan_moe.config.layout import Layout
from titan_moe.planner.case import Case
from titan_moe.planner.figures import Dimension
from titan_moe.planner.message import Operation


def domain_ranks(case: Case) -> int:
    """How many neighbouring ranks share a fast domain.

    What `parallelism.scale_up_size` says, if the machine has so many; else the most that divide the
    world, so that all domains hold equally many (schedulers place jobs that way: 256 ranks on racks
    of 72 are four times 64), in whole hosts where that can be.
    """
    said, there = case.config.parallelism.scale_up_size, case.cluster.scale_up.gpus
    if said is not None and said <= there:
        return min(said, case.world)
    return _even_share(case.world, there, case.cluster.machine.gpus_per_host)


@cache
def _even_share(world: int, most: int, host: int) -> int:
    if world <= most:
        return world
    shares = [ranks for ranks in range(1, most + 1) if world % ranks == 0]
    return max(shares, key=lambda ranks: (ranks % host == 0, ranks))


def group_of(layout: Layout, dimension: Dimension) -> tuple[int, int]:
    """Ranks of a dimension's groups, and how far apart in rank two neighbours are.

    dp_shard is taken with cp: over both of them FSDP shards dense weights.
    """
    sizes = layout.sparse if dimension in layout.sparse else layout.dense
    inner = list(sizes)[list(sizes).index(dimension) + 1 :]
    if dimension == "dp_shard":
        return layout.dp_shard * layout.cp, layout.tp
    return sizes[dimension], prod(sizes[name] for name in inner)


@cache
def ranks_together(layout: Layout, dimension: Dimension, domain: int) -> int:
    """The fewest ranks of any of the dimension's groups that one domain holds, of those it touches.

    The rank with the fewest neighbours sends most abroad, and all others wait for it. All n: every
    group stays inside.
    """
    ranks, stride = group_of(layout, dimension)
    block = ranks * stride
    if domain % block == 0:
        return ranks
    if stride % domain == 0:
        return 1
    if domain % stride == 0 and block % domain == 0:
        return domain // stride
    held = Counter((rank // block, rank % stride, rank // domain) for rank in range(layout.world))
    return min(held.values())


def across_share(operation: Operation, ranks: int, together: int) -> float:
    """Of what a rank sends to the others of its group, the part that leaves its domain.

    together: ranks of the group in its domain. All to all: n - c of n - 1 receivers are abroad.
    Collectives go round a ring, or several, that leave a domain once, for c ranks. A stage of a
    pipeline sends to the next, which is abroad for the last of c.
    """
    if together == ranks:
        return 0.0
    if operation == "all_to_all":
        return (ranks - together) / (ranks - 1)
    return 1.0 / together
