"""The gradient norm: each parameter of the whole model once, whatever its mesh and its replicas."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.parity.cases import Case
from tests.parity.reference import Reference
from tests.parity.run import build
from tests.tolerances import NORM_RTOL
from titan_moe.check.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.mesh import Meshes
from titan_moe.parallel.norm import clip_grads, grad_norm

CPU = torch.device("cpu")


LAYOUTS = [
    Case(),
    Case(shards=2),
    Case(shards=4),
    Case(replicas=2, shards=2),
    Case(replicas=4),
    Case(tp=2, shards=2),
    Case(tp=4, sequence_parallel=False),
    Case(shards=4, ep=2),
    Case(replicas=2, shards=2, ep=2),
    Case(tp=2, shards=2, ep=4),
    Case(cp=2, tp=2, ep=2),
    Case(pp=2, shards=2, ep=2),
    Case(pp=4, layers=(1, 1, 1, 1)),
    Case("grouped_query", tp=4, ep=4),
    Case("grouped_query", pp=2, shards=2),
    Case("grouped_query", pp=2, tp=2, schedule="ZBVZeroBubble"),
]


def norms_of_ones(case: Case) -> tuple[float, float]:
    engine, _ = build(case)
    for parameter in engine.parameters():
        parameter.grad = torch.ones_like(parameter)
    return engine.grad_norm().item(), engine.grad_norm(math.inf).item()


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_all_gradients_one_give_root_of_n(pool: Pool, case: Case) -> None:
    """N: every weight of the whole model, tied ones once."""
    elements = sum(p.numel() for p in Reference(case.family).model.parameters())
    for norm, largest in pool.run(case.world, norms_of_ones, case):
        assert norm == pytest.approx(math.sqrt(elements), rel=NORM_RTOL)
        assert largest == 1.0


def norms_with(case: Case, value: float, rank: int, weight: str) -> tuple[float, float]:
    """All gradients 1, but for one element that one rank holds."""
    engine, meshes = build(case)
    for part in engine.parts:
        for name, parameter in part.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            if meshes.dense.get_rank() == rank and name == weight:
                parameter.grad.to_local().view(-1)[-1] = value
    return engine.grad_norm().item(), engine.grad_norm(math.inf).item()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("case", "rank", "weight"),
    [
        (Case(pp=2, shards=2, ep=2), 3, "layers.3.moe.experts.down"),
        (Case(pp=2, shards=2, ep=2), 1, "embedding.weight"),
        (
            Case("grouped_query", pp=2, tp=2, schedule="ZBVZeroBubble"),
            2,
            "layers.1.attention.q.weight",
        ),
    ],
    ids=str,
)
def test_one_stage_that_is_not_finite_shows_on_all(
    pool: Pool, case: Case, rank: int, weight: str, value: float
) -> None:
    for norms in pool.run(case.world, norms_with, case, value, rank, weight):
        assert not any(map(math.isfinite, norms))


@dataclass(frozen=True)
class Fault:
    """A value to put into one gradient before the norm is taken."""

    value: float
    rank: int


def gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"dense": (7, 3), "norm": (5,), "experts": (3, 4, 5), "wide": (2, 4, 6)}
    return {name: torch.randn(s, generator=generator) for name, s in shapes.items()}


def folded(fault: Fault | None) -> tuple[float, float, float]:
    """2 shards × 2 tensor-parallel ranks, which are 4 expert-parallel ranks to the experts.

    Dense weights know nothing of tp, whose ranks hold them twice; 3 experts leave one rank without.
    """
    meshes = Meshes.build(Layout(dp_shard=2, tp=2, ep=4), "cpu")
    parameters = []
    for name, gradient in gradients().items():
        mesh, dim = {
            "dense": (meshes.fsdp("dense"), 0),
            "norm": (meshes.fsdp("dense"), 0),
            "experts": (meshes.sparse["ep"], 0),
            "wide": (meshes.sparse["ep"], 2),
        }[name]
        sharded = distribute_tensor(gradient, mesh, [Shard(dim)])
        parameter = nn.Parameter(torch.zeros_like(sharded))
        parameter.grad = sharded
        parameters.append(parameter)
    if fault and meshes.dense.get_rank() == fault.rank:
        parameters[0].grad.to_local()[0] = fault.value
    p2, p3, largest = (grad_norm(parameters, 4, CPU, p).item() for p in (2.0, 3.0, math.inf))
    return p2, p3, largest


def test_meshes_that_differ_between_parameters(pool: Pool) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients().values()]).double()
    for answers in pool.run(4, folded, None):
        for answer, p in zip(answers, (2.0, 3.0, math.inf), strict=True):
            assert answer == pytest.approx(flat.norm(p).item(), rel=NORM_RTOL)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_on_every_rank(pool: Pool, value: float) -> None:
    for answers in pool.run(4, folded, Fault(value, rank=3)):
        assert not any(map(math.isfinite, answers))


def stage_without_parameters() -> tuple[float, float]:
    meshes = Meshes.build(Layout(pp=2, dp_shard=2), "cpu")
    parameters = []
    if meshes.dense.get_local_rank("pp") == 0:
        ones = distribute_tensor(torch.ones(5, 5), meshes.fsdp("dense"), [Shard(0)])
        parameters.append(nn.Parameter(torch.zeros_like(ones)))
        parameters[0].grad = ones
    return tuple(grad_norm(parameters, 2, CPU, p).item() for p in (2.0, math.inf))


def test_a_stage_without_parameters(pool: Pool) -> None:
    assert pool.run(4, stage_without_parameters) == [(5.0, 1.0)] * 4


def clipped(max_norm: float) -> tuple[float, bool]:
    mesh = Meshes.build(Layout(dp_shard=2), "cpu").fsdp("dense")
    threes = distribute_tensor(torch.full((3, 3), 3.0), mesh, [Shard(0)])
    parameter = nn.Parameter(torch.zeros_like(threes))
    parameter.grad = threes
    clip_grads([parameter], grad_norm([parameter], 2, CPU), max_norm)
    untouched = torch.equal(parameter.grad.full_tensor(), torch.full((3, 3), 3.0))
    return grad_norm([parameter], 2, CPU).item(), untouched


def test_clipping(pool: Pool) -> None:
    for norm, untouched in pool.run(2, clipped, 0.5):
        assert norm == pytest.approx(0.5, rel=1e-6)  # CLIP_EPS of 9, and a factor in fp32
        assert not untouched
    for _, untouched in pool.run(2, clipped, 10.0):
        assert untouched
