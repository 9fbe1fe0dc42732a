"""Balance losses of sequences whose tokens are spread over ranks, be it by cp, by tp, or both."""

from functools import partial

from torch import nn

from titan_moe.config.sections import Parallelism
from titan_moe.layers.moe import MoE
from titan_moe.mesh import Meshes
from titan_moe.parallel.collectives import summed
from titan_moe.recipe import Sharding


def apply_sequence_balance(
    model: nn.Module, meshes: Meshes, sharding: Sharding, section: Parallelism
) -> None:
    """Let every MoE layer see how whole sequences were routed, in place.

    A few numbers per sequence, layer and micro-batch are added up; no gradient has to travel. A
    part of a pipeline without an MoE layer has nothing to add up.
    """
    group = meshes.sequence.get_group()
    for module in model.modules():
        if isinstance(module, MoE):
            module.sum_over_sequence = partial(summed, group=group)
