"""Every applier, in order, on one page: from a recipe to a model that trains on these processes.

    meta -> slots -> tensor -> expert -> chunks of experts -> context -> balance of sequences
    -> recomputation -> FSDP2 or HSDP -> materialise -> initialise -> pipeline schedule

Each edits one part of the model in place. Appliers of parallelism take (model, meshes, sharding,
section); FSDP a second section, for its precision; passes, which know no ranks, the model and
theirs. The parts are built on meta as what they are, stages of a pipeline or the whole, so that no
process ever holds more than its own share.
"""

import logging
from collections.abc import Container

import torch
from torch import nn

from titan_moe.config.schedules import num_stages, splits_backward
from titan_moe.config.sections import RunConfig
from titan_moe.config.words import counted
from titan_moe.layers.mask import plain_causal
from titan_moe.layers.moe import MoE
from titan_moe.mesh import Meshes
from titan_moe.parallel.balance import apply_sequence_balance
from titan_moe.parallel.context import apply_context_parallel
from titan_moe.parallel.engine import Engine, Runner
from titan_moe.parallel.expert import apply_expert_parallel
from titan_moe.parallel.fsdp import apply_fsdp
from titan_moe.parallel.initialise import initialise, materialise
from titan_moe.parallel.pipeline import Pipeline
from titan_moe.parallel.tensor import apply_tensor_parallel
from titan_moe.parallel.whole import WholeModel
from titan_moe.passes.expert_chunks import apply_expert_chunks
from titan_moe.passes.recompute import apply_activation_checkpoint
from titan_moe.recipe import Recipe
from titan_moe.stages import Stage, stages_of_rank

logger = logging.getLogger(__name__)


def parallelize(
    config: RunConfig,
    recipe: Recipe,
    meshes: Meshes,
    device: torch.device,
    *,
    loaded: Container[str] = (),
    poison: bool = False,
) -> Engine:
    """Build this rank's parts of the model and everything that it takes to train them. Collective.

    loaded: names of tensors that the caller reads from somewhere, which are not initialised.
    poison: fill memory with NaN before it is initialised, for tests.
    """
    parts = shard_on_meta(config, recipe, meshes)
    return assemble(parts, config, meshes, device, loaded=loaded, poison=poison)


def shard_on_meta(config: RunConfig, recipe: Recipe, meshes: Meshes) -> list[nn.Module]:
    """This rank's parts of the model with every applier's mark, before there is memory for any."""
    layout, section, sharding = meshes.layout, config.parallelism, recipe.load_sharding()
    count = num_stages(section)
    stages = stages_of_rank(config, meshes.pipeline.get_local_rank())
    parts = [build_on_meta(config, recipe, stage) for stage in stages]
    for part, stage in zip(parts, stages, strict=True):
        if layout.pp > 1:
            blocks = counted(len(stage.layers), "block")
            logger.info("here stage %d of %d: %s, %s", stage.index, count, blocks, stage.span)
        fill_slots(part, config)
        if layout.tp > 1:
            apply_tensor_parallel(part, meshes, sharding, section)
        if layout.ep > 1:
            apply_expert_parallel(part, meshes, sharding, section)
        if section.max_expert_tokens:
            apply_expert_chunks(part, section)
        if layout.cp > 1:
            apply_context_parallel(part, meshes, sharding, section)
        if layout.cp * layout.tp > 1:
            apply_sequence_balance(part, meshes, sharding, section)
        apply_activation_checkpoint(
            part, config.activation_checkpoint, splits_backward=splits_backward(section)
        )
        apply_fsdp(part, meshes, sharding, config.training, section)
    return parts


def assemble(
    parts: list[nn.Module],
    config: RunConfig,
    meshes: Meshes,
    device: torch.device,
    *,
    loaded: Container[str] = (),
    poison: bool = False,
) -> Engine:
    """What `shard_on_meta` gives, with memory and values, and what takes rows through it."""
    for part in parts:
        materialise(part, device, poison=poison)
        initialise(part, config.debug.seed, loaded)
        part.train()
    stages = stages_of_rank(config, meshes.pipeline.get_local_rank())
    runner: Runner = (
        Pipeline(parts, stages, config, meshes, device)
        if meshes.layout.pp > 1
        else WholeModel(parts[0])
    )
    return Engine(parts, runner, config, meshes, device)


def build_on_meta(config: RunConfig, recipe: Recipe, stage: Stage) -> nn.Module:
    """That part of the model, its weights in training.dtype, without memory for any of them."""
    model_class = recipe.load_model_class()
    stored = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.training.dtype))
    try:
        with torch.device("meta"):
            model: nn.Module = model_class(
                config.model,
                layers=stage.layers,
                has_embedding=stage.has_embedding,
                has_head=stage.has_head,
            )
    finally:
        torch.set_default_dtype(stored)
    return model


def fill_slots(model: nn.Module, config: RunConfig) -> None:
    """What layers leave to the run: attention's kernel and mask, and forced balance."""
    if not config.training.document_mask:
        setattr(model, "make_mask", plain_causal)  # noqa: B010 (a slot, not a submodule)
    for module in model.modules():
        if hasattr(module, "gather_kv"):  # attention, of whatever kind
            setattr(module, "backend", config.training.attention_backend)  # noqa: B010
        if isinstance(module, MoE):
            module.force_balance = config.debug.moe_force_load_balance
