"""Which weights decay, and that each way of running the step is AdamW over two meshes at once."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from titan_moe.check.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.config.sections import Optimizer
from titan_moe.layers.experts import Experts
from titan_moe.layers.grouped_query import GroupedQueryAttention
from titan_moe.layers.norm import RMSNorm
from titan_moe.layers.router import Router
from titan_moe.mesh import Meshes
from titan_moe.optim import build_optimizer

Implementation = Literal["fused", "foreach", "for-loop"]

# Of four implementations of one formula in fp32, after three steps.
IMPLEMENTATION_RTOL = 1e-6


class Part(nn.Module):
    """A matrix, stacked experts, a norm, and a buffer that looks like a weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding.from_pretrained(torch.randn(6, 4, generator=generator), False)
        self.experts = nn.Parameter(torch.randn(4, 3, 5, generator=generator))
        self.norm = nn.Parameter(torch.randn(4, generator=generator))
        self.register_buffer("selection_bias", torch.zeros(4))


def gradients(part: Part, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in part.parameters()]


def section(implementation: Implementation) -> Optimizer:
    return Optimizer(lr=0.01, weight_decay=0.5, eps=1e-5, implementation=implementation)


def test_groups_and_names() -> None:
    decayed, others = build_optimizer([Part()], section("fused")).param_groups
    assert decayed["param_names"] == ["experts", "embedding.weight"]
    assert decayed["weight_decay"] == 0.5
    assert others["param_names"] == ["norm"]
    assert others["weight_decay"] == 0.0


def test_no_bias_and_no_sink_decays() -> None:
    """Biases of experts have two dimensions, as matrices do."""
    block = nn.ModuleDict(
        {
            "experts": Experts(4, 6, 3, std=0.1, bias=True),
            "router": Router(
                6,
                4,
                2,
                score_function="softmax",
                normalize_weights=True,
                route_scale=1.0,
                std=0.1,
                bias=True,
            ),
            "attention": GroupedQueryAttention(
                6, 2, 1, 4, std=0.1, bias=True, out_bias=True, sinks=True
            ),
            "norm": RMSNorm(6, eps=1e-6),
        }
    )
    decayed, others = build_optimizer([block], section("fused")).param_groups
    assert set(decayed["param_names"]) == {
        *(f"experts.{name}" for name in ("gate", "up", "down")),
        *(f"attention.{name}.weight" for name in ("q", "k", "v", "out")),
        "router.weight",
    }
    assert set(others["param_names"]) == {
        *(f"experts.{name}_bias" for name in ("gate", "up", "down")),
        *(f"attention.{name}.bias" for name in ("q", "k", "v", "out")),
        "attention.sinks_H",
        "router.bias",
        "norm.weight",
    }


def test_parts_share_one_optimizer() -> None:
    parts = [nn.ModuleDict({name: Part()}) for name in "01"]
    optimizer = build_optimizer(parts, section("fused"))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_a_weight_that_two_parts_hold_stays_one(implementation: Implementation) -> None:
    """Both copies move, by the same bits, and as one alone would."""
    first, second, alone = Part(), Part(), Part()
    both = build_optimizer([first, second], section(implementation))
    single = build_optimizer([alone], section(implementation))
    before = alone.experts.detach().clone()
    for step in range(3):
        for part in (first, second, alone):
            for parameter, gradient in zip(part.parameters(), gradients(part, step), strict=True):
                parameter.grad = gradient
        both.step()
        single.step()
    assert not torch.equal(alone.experts, before)
    for copy in (first, second):
        for name, parameter in alone.named_parameters():
            assert torch.equal(copy.get_parameter(name), parameter), name


def sharded_steps(implementation: Implementation) -> dict[str, Tensor]:
    meshes = Meshes.build(Layout(dp_shard=4, ep=2), "cpu")
    ep, dense = meshes.sparse["ep"], meshes.fsdp("dense")
    part = Part()
    mesh_of = {"experts": ep, "embedding.weight": dense, "norm": dense}
    for name, parameter in list(part.named_parameters()):
        owner = part.get_submodule(name.rpartition(".")[0])
        shard = nn.Parameter(distribute_tensor(parameter.data, mesh_of[name], [Shard(0)]))
        setattr(owner, name.rpartition(".")[2], shard)
    optimizer = build_optimizer([part], section(implementation))
    for step in range(3):
        for parameter, gradient in zip(part.parameters(), gradients(part, step), strict=True):
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, [Shard(0)])
        optimizer.step()
    return {name: p.full_tensor().detach() for name, p in part.named_parameters()}


def by_hand() -> dict[str, Tensor]:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) written out in fp64."""
    part, adam = Part().double(), section("fused")
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in part.parameters()]
    for step in range(1, 4):
        rows = zip(part.parameters(), gradients(part, step - 1), moments, strict=True)
        for parameter, gradient, (m, v) in rows:
            gradient = gradient.double()
            m.mul_(adam.beta1).add_(gradient * (1 - adam.beta1))
            v.mul_(adam.beta2).add_(gradient**2 * (1 - adam.beta2))
            update = (m / (1 - adam.beta1**step)) / ((v / (1 - adam.beta2**step)).sqrt() + adam.eps)
            decay = adam.weight_decay if parameter.ndim >= 2 else 0.0
            parameter.data -= adam.lr * (update + decay * parameter.data)
    return {name: p.detach().float() for name, p in part.named_parameters()}


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_three_steps_over_two_meshes(pool: Pool, implementation: Implementation) -> None:
    expected = by_hand()
    for answer in pool.run(4, sharded_steps, implementation):
        torch.testing.assert_close(answer, expected, rtol=IMPLEMENTATION_RTOL, atol=1e-7)
