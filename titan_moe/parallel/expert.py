"""Expert parallelism: each rank of an ep group holds some experts, whole, and tokens travel."""

import logging

from torch import nn

from titan_moe.config.sections import Parallelism
from titan_moe.layers.dispatcher import Dispatcher, LocalDispatcher
from titan_moe.layers.moe import MoE
from titan_moe.mesh import Meshes
from titan_moe.parallel.dispatch.flat import FlatDispatcher
from titan_moe.parallel.dispatch.two_tier import TwoTierDispatcher, tiers
from titan_moe.parallel.dispatch.wire import CountsBytes, Traffic, Wire
from titan_moe.parallel.local import Splitter
from titan_moe.recipe import Sharding

logger = logging.getLogger(__name__)


def apply_expert_parallel(
    model: nn.Module, meshes: Meshes, sharding: Sharding, section: Parallelism
) -> None:
    """Split the experts of every MoE layer, in place, on meta, and let its tokens travel.

    Experts need no pattern in `sharding`. A stage of a pipeline may be without them.

    Raises:
        ValueError: experts that the ranks do not divide, or a model without any; ranks of a group
            that domains do not divide, where the backend has two tiers.
    """
    splitter = Splitter(meshes.expert)
    moes = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not moes and meshes.layout.pp == 1:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {meshes.layout.ep}, but no layer of the model "
            f"has experts"
        )
    split = 0
    for name, moe in moes.items():
        split += _split(splitter, moe, name)
        moe.dispatcher = _dispatcher(moe, meshes, section)
    logger.info(
        "expert parallel: %d layers, %d weights over %d ranks, %s",
        len(moes),
        split,
        meshes.layout.ep,
        section.expert_parallel_comm_backend,
    )


def traffic_of(parts: list[nn.Module]) -> Traffic | None:
    """Bytes that this rank's dispatchers sent to other ranks since their counts were reset.

    None if there is a dispatcher among them that does not count.
    """
    total = Traffic()
    for traffic in _traffic(parts):
        if traffic is None:
            return None
        total.inside += traffic.inside
        total.across += traffic.across
    return total


def reset_traffic(parts: list[nn.Module]) -> None:
    for traffic in _traffic(parts):
        if traffic is not None:
            traffic.reset()


def _traffic(parts: list[nn.Module]) -> list[Traffic | None]:
    """Of each dispatcher; None of one that does not count. The local one sends nothing."""
    dispatchers = [m.dispatcher for part in parts for m in part.modules() if isinstance(m, MoE)]
    return [
        d.traffic if isinstance(d, CountsBytes) else None
        for d in dispatchers
        if not isinstance(d, LocalDispatcher)
    ]


def _split(splitter: Splitter, moe: MoE, name: str) -> int:
    """How many weights there were to split: all that `Experts` owns is [E, ...]."""
    experts, ranks = moe.router.num_experts, splitter.mesh.size()
    if experts % ranks:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {ranks} does not divide the {experts} experts "
            f"of {name}: every rank holds as many as the others"
        )
    weights = [weight for weight, _ in moe.experts.named_parameters(recurse=False)]
    for weight in weights:
        splitter.split(moe.experts, weight, 0)
    return len(weights)


def _dispatcher(moe: MoE, meshes: Meshes, section: Parallelism) -> Dispatcher:
    group, domain, traffic = meshes.expert.get_group(), section.scale_up_size, Traffic()
    experts, forced_balance = moe.router.num_experts, moe.force_balance
    backend = section.expert_parallel_comm_backend
    if backend == "flat":
        return FlatDispatcher(Wire(group, domain, traffic), experts, forced_balance=forced_balance)
    assert backend == "two_tier", f'the backend "{backend}" has no dispatcher here'
    if domain is None or meshes.layout.ep % domain:
        raise ValueError(
            f'parallelism.expert_parallel_comm_backend = "two_tier": scale_up_size is {domain}, '
            f"must divide expert_parallel_degree {meshes.layout.ep}"
        )
    across, inside = (Wire(tier, domain, traffic) for tier in tiers(group, domain))
    return TwoTierDispatcher(across, inside, experts, forced_balance=forced_balance)
