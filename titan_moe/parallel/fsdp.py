"""FSDP2 and HSDP: weights sharded over the data-parallel ranks, gradients summed over them."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titan_moe.config.sections import Parallelism, Training
from titan_moe.config.words import counted
from titan_moe.layers.moe import MoE
from titan_moe.mesh import Meshes
from titan_moe.recipe import FsdpUnit, Sharding, fits

logger = logging.getLogger(__name__)


def apply_fsdp(
    model: nn.Module,
    meshes: Meshes,
    sharding: Sharding,
    training: Training,
    parallelism: Parallelism,
) -> None:
    """Shard `model` in place: the sharding's units in their order, then the root with what is left.

    The same at any world size, 1 included. With dp_replicate above 1 this is HSDP. Gradients come
    out as plain sums over ranks, formed in `mixed_precision_reduce`, whoever holds how many tokens:
    the loss is already divided by the global count.

    Raises:
        ValueError: a unit's pattern matches no module, or one that an earlier unit has.
    """
    reshard = _reshards(parallelism)
    wrapped: set[str] = set()
    for unit in sharding.fsdp_units:
        for names in _matches(model, unit, wrapped):
            mesh = meshes.fsdp(unit.mesh)
            fully_shard(
                [model.get_submodule(name) for name in names],
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=replace(
                    _precision(unit.precision, training),
                    # Rows come in the activations' dtype, and their fp32 weights must stay fp32.
                    cast_forward_inputs=unit.mesh == "dense",
                ),
                shard_placement_fn=(
                    partial(_dimension, mesh.size(-1)) if unit.mesh == "sparse" else None
                ),
            )
            wrapped |= set(names)
    fully_shard(
        model,
        mesh=meshes.fsdp("dense"),
        reshard_after_forward=reshard,
        mp_policy=_precision("policy", training),
    )
    modules = fsdp_modules(model)
    for module in modules:
        # Neither call reaches nested modules. Unless told to sum, FSDP averages over its own ranks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    logger.info(
        "fsdp: %s and the root, %s, %s",
        counted(len(wrapped), "unit"),
        counted(len(list(model.parameters())), "weight tensor"),
        f"replicas {meshes.layout.dp_replicate} × shards {meshes.fsdp('dense').size(-1)}",
    )


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every module that FSDP gathers, root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshards(section: Parallelism) -> bool:
    """In a pipeline weights are kept by default, as each micro-batch would gather them anew."""
    if section.fsdp_reshard_after_forward == "default":
        return section.pipeline_parallel_degree == 1
    return section.fsdp_reshard_after_forward == "always"


def _dimension(ranks: int, weight: nn.Parameter) -> Shard | None:
    """Shard a stack of fewer experts than ranks by another dimension, if that divides evenly.

    weight: of experts, [E, ...].
    """
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if local.shape[0] < ranks and local.shape[1] % ranks == 0:
        return Shard(1)
    return None  # the first


def _matches(model: nn.Module, unit: FsdpUnit, wrapped: set[str]) -> Iterator[list[str]]:
    """The names of each unit that the pattern makes: of one module, or of all that several fit."""
    together = isinstance(unit.pattern, tuple)
    patterns = unit.pattern if isinstance(unit.pattern, tuple) else (unit.pattern,)
    names = [name for name, _ in model.named_modules() if fits(name, patterns)]
    if not names and not any(_may_lack(model, pattern) for pattern in patterns):
        raise ValueError(f"sharding: the FSDP unit {unit.pattern!r} matches no module of the model")
    for name in names:
        if any(f"{name}.".startswith(f"{earlier}.") for earlier in wrapped):
            raise ValueError(
                f"sharding: {name}, matched by {unit.pattern!r}, is in an FSDP unit already; "
                f"list inner units first, each once"
            )
    if together and names:
        yield names
    elif not together:
        yield from ([name] for name in names)


def _may_lack(model: nn.Module, pattern: str) -> bool:
    """Whether it may match nothing: in a stage without embedding or head, or of one kind of block.

    A pattern for the layers has to match in a stage that has both kinds, dense ones and experts.
    """
    top = pattern.partition(".")[0]
    if not hasattr(model, top):
        return False
    return getattr(model, top) is None or not any(isinstance(m, MoE) for m in model.modules())


def _precision(unit: Literal["policy", "float32"], training: Training) -> MixedPrecisionPolicy:
    if unit == "float32":
        return MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
    )
