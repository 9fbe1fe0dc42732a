"""What the applier leaves behind, what it refuses, and FSDP on top of it, whichever dimension."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.deepseek_v3 import RECIPE
from recipes.deepseek_v3.model import Model
from recipes.deepseek_v3.sharding import SHARDING
from tests.layers.helpers import error
from tests.parity.cases import Case, config_of, layout_of, parallelism_of
from tests.parity.run import gradients_of, rows_of, whole
from tests.parity.tiny import MODEL, batch_of_step
from tests.tolerances import PARITY_GRADIENT_ERROR
from titan_moe.check.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.config.sections import Parallelism
from titan_moe.layers.moe import MoE
from titan_moe.mesh import Meshes
from titan_moe.parallel.dispatch.flat import FlatDispatcher
from titan_moe.parallel.dispatch.host_reads import read_on_host
from titan_moe.parallel.dispatch.two_tier import TwoTierDispatcher
from titan_moe.parallel.expert import apply_expert_parallel
from titan_moe.parallelize import parallelize
from titan_moe.recipe import Recipe

MOE_LAYERS = 3
WEIGHTS = {"gate", "up", "down"}


def model_on_meta(layers: range = range(MODEL.num_layers), **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = Model(
            MODEL.model_copy(update=sizes), layers=layers, has_embedding=True, has_head=True
        )
    return model


def apply(model: nn.Module, layout: Layout, section: Parallelism) -> list[str]:
    """What it logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("titan_moe.parallel.expert")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        apply_expert_parallel(model, Meshes.build(layout, "cpu"), SHARDING, section)
    finally:
        logger.removeHandler(handler)
    return lines


def what_is_left(case: Case, force_balance: bool) -> dict[str, Any]:
    model = model_on_meta()
    before = dict(model.named_parameters())
    moes = [module for module in model.modules() if isinstance(module, MoE)]
    for moe in moes:
        moe.force_balance = force_balance
    lines = apply(model, layout_of(case), parallelism_of(case))
    dispatchers = [moe.dispatcher for moe in moes]
    return {
        "lines": lines,
        "split": {
            name: (p.shape, p.to_local().shape, tuple(p.placements))
            for name, p in model.named_parameters()
            if isinstance(p, DTensor)
        },
        "untouched": {n for n, p in model.named_parameters() if p is before[n]},
        "seen": {moe.experts.gate.shape for moe in moes},
        "kinds": {type(d).__name__ for d in dispatchers},
        "forced": {d._forced_balance for d in dispatchers},  # type: ignore[attr-defined]
        "own counts": len({id(d.traffic) for d in dispatchers}),  # type: ignore[attr-defined]
    }


def left_either_way(case: Case) -> list[dict[str, Any]]:
    return [what_is_left(case, force_balance) for force_balance in (False, True)]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case(shards=4, ep=4), FlatDispatcher),
        (Case(shards=4, ep=2), FlatDispatcher),
        (Case(shards=4, ep=4, backend="two_tier", scale_up=2), TwoTierDispatcher),
    ],
    ids=str,
)
def test_what_is_left(pool: Pool, case: Case, kind: type) -> None:
    held = MODEL.num_experts // case.ep
    names = {f"layers.{n}.moe.experts.{weight}" for n in (1, 2, 3) for weight in WEIGHTS}
    of_ranks = pool.run(4, left_either_way, case)
    for force_balance, left in [pair for either in of_ranks for pair in enumerate(either)]:
        assert left["lines"] == [
            f"expert parallel: 3 layers, 9 weights over {case.ep} ranks, {case.backend}"
        ]
        assert left["split"].keys() == names
        for shape, local, placements in left["split"].values():
            assert local == (held, *shape[1:])
            assert shape[0] == MODEL.num_experts
            assert placements[0].dim == 0
        assert left["untouched"].isdisjoint(names)
        assert len(left["untouched"]) + len(names) == len(list(model_on_meta().parameters()))
        assert left["seen"] == {(held, MODEL.hidden_size, MODEL.moe_intermediate_size)}
        assert (left["kinds"], left["forced"]) == ({kind.__name__}, {bool(force_balance)})
        assert left["own counts"] == MOE_LAYERS


LAYERS = range(MODEL.num_layers)
REFUSED: list[tuple[range, dict[str, int], dict[str, Any], str]] = [
    (LAYERS, {"num_experts": 6}, {}, "degree = 4 does not divide the 6 experts of layers.1.moe: "),
    (range(1), {}, {}, "degree = 4, but no layer of the model has experts"),
    (LAYERS, {}, {"expert_parallel_comm_backend": "two_tier"}, "scale_up_size is None, must "),
    (
        LAYERS,
        {},
        {"expert_parallel_comm_backend": "two_tier", "scale_up_size": 3},
        "scale_up_size is 3, must divide expert_parallel_degree 4",
    ),
]


def all_refused() -> list[str]:
    messages = []
    for layers, sizes, keys, _ in REFUSED:
        with pytest.raises(ValueError) as raised:  # noqa: PT011 (the messages are compared)
            apply(model_on_meta(layers, **sizes), Layout(dp_shard=4, ep=4), Parallelism(**keys))
        messages.append(str(raised.value))
    return messages


def test_what_is_refused(pool: Pool) -> None:
    for messages in pool.run(4, all_refused):
        for message, (*_, expected) in zip(messages, REFUSED, strict=True):
            assert expected in message


def stage_without_experts() -> list[str]:
    return apply(model_on_meta(range(1)), Layout(pp=2, dp_shard=2, ep=2), Parallelism())


def test_a_stage_may_be_without_experts(pool: Pool) -> None:
    line = "expert parallel: 0 layers, 0 weights over 2 ranks, flat"
    assert pool.run(4, stage_without_experts) == [[line]] * 4


@dataclass
class Step:
    """One step's traces: weights as initialised and gradients, whole, by name; how weights lie."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    placements: dict[str, str]
    reads: int


def first_step(case: Case, sizes: dict[str, int], recipe: Recipe = RECIPE) -> Step:
    config = config_of(case)
    config = config.model_copy(update={"model": config.model.model_copy(update=sizes)})
    meshes = Meshes.build(layout_of(case), "cpu")
    engine = parallelize(config, recipe, meshes, torch.device("cpu"), poison=True)
    [model] = engine.parts
    weights = {name: whole(p) for name, p in model.named_parameters()}
    placements = {
        name.rpartition(".")[2]: str(p.placements)
        for name, p in model.named_parameters()
        if "experts" in name
    }
    before = read_on_host.count
    engine.forward_backward(rows_of(batch_of_step(0), meshes))
    return Step(weights, gradients_of(model), placements, read_on_host.count - before)


FEW = {"num_experts": 4, "num_expert_groups": 2, "num_limited_groups": 2}
TWO = {"num_experts": 2, "top_k": 1, "num_expert_groups": 1, "num_limited_groups": 1}
ODD = FEW | {"hidden_size": 30, "moe_intermediate_size": 14}  # no multiple of four ranks
SIZES: dict[str, dict[str, int]] = {"tiny": {}, "few": FEW, "two": TWO, "odd": ODD}


def all_sizes() -> dict[str, Step]:
    return {name: first_step(Case(), sizes) for name, sizes in SIZES.items()}


@pytest.fixture(scope="module")
def in_one_process(pool: Pool) -> Any:
    return pool.run(1, all_sizes)[0]


@pytest.mark.parametrize(
    ("case", "sizes", "placements"),
    [
        (Case(shards=4, ep=2), "tiny", "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        (Case(shards=8, ep=2), "few", "(Shard(dim=1), Shard(dim=0))"),
        (Case(replicas=2, shards=4, ep=2), "two", "(Replicate(), Shard(dim=1), Shard(dim=0))"),
        (Case(shards=8, ep=2), "odd", "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        (Case(shards=4), "two", "(Shard(dim=1),)"),
    ],
)
def test_fsdp_on_top(
    pool: Pool, in_one_process: Any, case: Case, sizes: str, placements: str
) -> None:
    """Initial weights bit for bit, gradients to rounding; dimension 1 where ranks outnumber."""
    expected = in_one_process[sizes]
    for step in pool.run(case.world, first_step, case, SIZES[sizes]):
        assert step.placements == dict.fromkeys(WEIGHTS, placements)
        assert step.reads == (MOE_LAYERS if case.ep > 1 else 0)
        assert step.weights.keys() == step.gradients.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            assert torch.equal(step.weights[name], weight), name
            assert error(step.gradients[name], expected.gradients[name]) < PARITY_GRADIENT_ERROR
