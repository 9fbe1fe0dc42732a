"""A small sharded model with all that a real one asks of a checkpoint, and gradients by formula.

A parameter's gradient depends on its values and the step alone, so that training it gives the same
bits on every layout, and any two runs can be compared exactly.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.config.sections import Checkpoint

EXPERTS, HIDDEN, INNER, VOCAB = 3, 5, 7, 11  # no layout of 2 or 4 divides any of them


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, dtype=torch.float32))
        self.register_buffer("selection_bias", torch.zeros(EXPERTS, dtype=torch.float32))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.norm = nn.RMSNorm(HIDDEN)
        self.register_buffer("previous_counts", torch.zeros(EXPERTS, dtype=torch.int64))


class Model(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(layer): Block() for layer in range(num_layers)})


def build(mesh_shape: tuple[int, ...], seed: int) -> Model:
    """The model with values from `seed`, sharded over a mesh: (n,) FSDP, (r, n) HSDP, () not."""
    torch.manual_seed(seed)
    model = Model()
    if mesh_shape:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for block in model.layers.values():
            fully_shard(block.router, mesh=mesh)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


class Run:
    """What a trainer holds, as far as a checkpoint is concerned."""

    def __init__(
        self, folder: Path, mesh_shape: tuple[int, ...] = (), seed: int = 0, **section: Any
    ) -> None:
        self.model = build(mesh_shape, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)
        self.checkpointer = Checkpointer(
            folder, Checkpoint(**section), [self.model], self.optimizer
        )
        self.step = 0

    def train(self, steps: int = 1) -> "Run":
        for _ in range(steps):
            self.step += 1
            for parameter in self.model.parameters():
                parameter.grad = torch.sin(3 * parameter.detach() + self.step)
            self.optimizer.step()
            for layer, block in self.model.layers.items():
                block.router.selection_bias += torch.tensor([0.123456, -0.1, 0.2]) * self.step
                block.previous_counts.copy_(torch.tensor([40839, 40840, int(layer)]) + self.step)
        return self

    def save(self) -> "Run":
        self.checkpointer.save(self.step, {"tokens_seen": 100 * self.step})
        return self

    def load(self) -> dict[str, Any] | None:
        state = self.checkpointer.load()
        self.step = state["step"] if state else 0
        return state

    def values(self) -> dict[str, Tensor]:
        """Everything that a checkpoint should carry, whole, by a name made here."""
        everything = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            for entry, value in self.optimizer.state[parameter].items():
                everything[f"{entry} of {name}"] = value
        return {name: _whole(value) for name, value in everything.items()}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """The same names, types and bits."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name
