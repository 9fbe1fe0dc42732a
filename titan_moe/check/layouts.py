"""One step of the tiny run under some layout, and what must not depend on the layout.

Cases run in the pool's processes.
"""

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.check.values import stir
from titan_moe.config.layout import Layout
from titan_moe.config.parallelism import Parallelism
from titan_moe.config.sections import RunConfig
from titan_moe.mesh import Meshes
from titan_moe.parallel.engine import Engine
from titan_moe.parallel.initialise import unwrapped
from titan_moe.parallel.whole import Batch
from titan_moe.parallelize import parallelize
from titan_moe.recipe import load_recipe
from titan_moe.world import gather

# It warns that gathering a weight that two meshes split takes two messages. A check may.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp 4, ep 2": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
    "tp 2": {"tensor_parallel_degree": 2},
    "tp 2, sequence parallel off": {"tensor_parallel_degree": 2, "sequence_parallel": False},
    "cp 2": {"context_parallel_degree": 2},
    "pp 2": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
}
"""Keys of `[parallelism]`; all others are as by default."""

WORLDS = {"fsdp 4, ep 2": 4}  # the others have 2 processes


@dataclass
class Trace:
    """gradients: ‖·‖ and all, by name; scalars: loss, balance loss, norm."""

    scalars: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def laid_out(config: RunConfig, keys: dict[str, Any]) -> RunConfig:
    """`config` under that layout."""
    known = {"data_parallel_shard_degree": 1} | keys
    return config.model_copy(update={"parallelism": Parallelism(**known)})


def first_values(config: RunConfig) -> dict[str, tuple[str, bool]]:
    """A case: of every parameter and buffer a digest of its bits, and whether it holds a NaN.

    Memory is poisoned with NaN before it is initialised.
    """
    engine, _ = _engine(config, poison=True)
    values: dict[str, tuple[str, bool]] = {}
    for part in engine.parts:
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            whole = _whole(tensor)
            bits = hashlib.sha256(whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            lowest = None if whole.is_floating_point() else torch.iinfo(whole.dtype).min
            poisoned = whole.isnan().any() if lowest is None else (whole == lowest).any()
            values[unwrapped(name)] = (bits.hexdigest(), bool(poisoned))
    return values


def one_step(config: RunConfig, batch: Batch, seed: int, keep: tuple[str, ...]) -> Trace | None:
    """A case: gradients of one step of the stirred model, on rank 0; None on all others."""
    engine, meshes = _engine(config, poison=False)
    for part in engine.parts:
        stir(part, seed, keep)
    rows = len(batch["tokens"]) // meshes.dp_degree
    begin = meshes.dp_rank * rows
    output = engine.forward_backward(
        {key: value[begin : begin + rows] for key, value in batch.items()}
    )
    trace = Trace(
        {
            "loss": output.loss.item(),
            "balance loss": output.balance_loss.item(),
            "gradient norm": engine.grad_norm().item(),
        }
    )
    own = [
        (unwrapped(name), None if p.grad is None else _whole(p.grad))
        for part in engine.parts
        for name, p in part.named_parameters()
    ]
    for of_stage in gather(own, meshes.pipeline.get_group()):
        trace.gradients.update({name: grad for name, grad in of_stage if grad is not None})
    return trace if dist.get_rank() == 0 else None


def _engine(config: RunConfig, poison: bool) -> tuple[Engine, Meshes]:
    meshes = Meshes.build(Layout.of(config.parallelism, dist.get_world_size()), "cpu")
    recipe = load_recipe(config.model.recipe)
    device = torch.device("cpu")
    return parallelize(config, recipe, meshes, device, poison=poison), meshes


def _whole(tensor: Tensor | nn.Parameter) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()
