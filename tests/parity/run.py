"""The run under test: the engine, taken through three steps on the processes that are there."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.parity.cases import MAX_NORM, STEPS, Case, config_of, layout_of
from tests.parity.tiny import batch_of_step
from titan_moe.mesh import Meshes
from titan_moe.optim import build_optimizer
from titan_moe.parallel.engine import Engine
from titan_moe.parallelize import parallelize
from titan_moe.recipe import load_recipe
from titan_moe.world import gather

Values = dict[str, Tensor]
Control = Callable[[pytest.MonkeyPatch], None]

VALIDATED = 100  # the "step" of the batch that is validated

# It warns that gathering a weight that two meshes split takes two messages. A test may.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@dataclass
class Trace:
    """What a run leaves behind; layouts must agree on all of it.

    loss, balance_loss, norm, and mtp_loss of a family that predicts ahead: one per step.
    counts: [L, E] per step. gradients: per step, before clipping, by name. weights: by name, bias:
    the selection biases [L, E]; both at the end.
    validation: nats per token, measured between the first step and the second.
    drifted: weights of which two stages hold copies that differ.
    """

    loss: list[float] = field(default_factory=list)
    balance_loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    mtp_loss: list[float] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    gradients: list[Values] = field(default_factory=list)
    weights: Values = field(default_factory=dict)
    bias: Tensor = field(default_factory=lambda: torch.empty(0))
    validation: float = 0.0
    drifted: set[str] = field(default_factory=set)


def rows_of(batch: Values, meshes: Meshes) -> Values:
    """This rank's share."""
    rows = len(batch["tokens"]) // meshes.dp_degree
    begin = meshes.dp_rank * rows
    return {key: value[begin : begin + rows] for key, value in batch.items()}


def build(case: Case, **training: Any) -> tuple[Engine, Meshes]:
    """Memory is poisoned with NaN before it is initialised."""
    config = config_of(case, **training)
    meshes = Meshes.build(layout_of(case), "cpu")
    recipe = load_recipe(config.model.recipe)
    return parallelize(config, recipe, meshes, torch.device("cpu"), poison=True), meshes


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def gradients_of(model: nn.Module) -> Values:
    """Of a model that is on this rank as a whole, by name."""
    return {name: whole(_gradient(name, p)) for name, p in model.named_parameters()}


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, name
    return parameter.grad


def of_all_stages(
    engine: Engine, meshes: Meshes, value: Callable[[str, nn.Parameter], Tensor], trace: Trace
) -> Values:
    """`value` of every parameter of the whole model. Collective."""
    own = [
        (name, whole(value(name, parameter)))
        for part in engine.parts
        for name, parameter in part.named_parameters()
    ]
    merged: Values = {}
    for of_rank in gather(own, meshes.pipeline.get_group()):
        for name, tensor in of_rank:
            if not torch.equal(merged.setdefault(name, tensor), tensor):
                trace.drifted.add(name)
    return merged


def train(case: Case, steps: int = STEPS, control: Control | None = None) -> Trace:
    """Train as the loop does. control: breaks something that must make the comparison fail."""
    with pytest.MonkeyPatch.context() if control else nullcontext() as patch:
        if control and patch:
            control(patch)
        return _train(case, steps)


def _train(case: Case, steps: int) -> Trace:
    engine, meshes = build(case)
    optimizer = build_optimizer(engine.parts, config_of(case).optimizer)
    trace = Trace()
    for step in range(steps):
        optimizer.zero_grad()
        output = engine.forward_backward(rows_of(batch_of_step(step), meshes))
        trace.gradients.append(of_all_stages(engine, meshes, _gradient, trace))
        norm = engine.grad_norm()
        engine.clip_grads(norm, MAX_NORM)
        optimizer.step()
        trace.counts.append(engine.update_routers())
        trace.loss.append(output.loss.item())
        trace.balance_loss.append(output.balance_loss.item())
        trace.norm.append(norm.item())
        if output.mtp_loss is not None:
            trace.mtp_loss.append(output.mtp_loss.item())
        if step == 0:
            nats, tokens = engine.evaluate(rows_of(batch_of_step(VALIDATED), meshes))
            trace.validation = nats.item() / tokens.item()
    trace.weights = of_all_stages(engine, meshes, lambda name, parameter: parameter, trace)
    trace.bias = engine.selection_biases()
    return trace
