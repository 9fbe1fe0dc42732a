"""Experts with biases, split and sharded with the weights they belong to, against one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from recipes.deepseek_v3 import RECIPE
from recipes.deepseek_v3.model import Model
from tests.layers.helpers import error
from tests.parallel.test_expert import FEW, MOE_LAYERS, ODD, Step, first_step
from tests.parity.cases import Case
from tests.tolerances import PARITY_GRADIENT_ERROR
from titan_moe.check.pool import Pool
from titan_moe.layers.experts import ClampedSwiGLU, Experts
from titan_moe.layers.init import Normal
from titan_moe.layers.moe import MoE

BIASES = ("gate_bias", "up_bias", "down_bias")
NAMES = ("gate", "up", "down", *BIASES)


class Biased(Model):
    """A model whose experts have biases, not zero at first, and are clamped."""

    def __init__(self, cfg: Any, **part: Any) -> None:
        super().__init__(cfg, **part)
        for moe in [module for module in self.modules() if isinstance(module, MoE)]:
            moe.experts = Experts(
                cfg.num_experts,
                cfg.hidden_size,
                cfg.moe_intermediate_size,
                std=cfg.initializer_range,
                bias=True,
                activation=ClampedSwiGLU(alpha=1.702, limit=0.6),
            )
            moe.experts.inits |= dict.fromkeys(BIASES, Normal(0.2))


BIASED = replace(RECIPE, model=f"{__name__}.Biased")
SIZES: dict[str, dict[str, int]] = {"tiny": {}, "few": FEW, "odd": ODD}


def step_of(case: Case, sizes: str) -> Step:
    return first_step(case, SIZES[sizes], BIASED)


def in_all_sizes() -> dict[str, Step]:
    return {name: step_of(Case(), name) for name in SIZES}


@pytest.fixture(scope="module")
def in_one_process(pool: Pool) -> Any:
    return pool.run(1, in_all_sizes)[0]


BY_EXPERT = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
ONE_SHARD = "(_StridedShard(dim=0, sf=4), Shard(dim=0))"


@pytest.mark.parametrize(
    ("case", "sizes", "placements"),
    [
        (Case(shards=4, ep=2), "tiny", BY_EXPERT),
        (Case(shards=4, ep=4, backend="two_tier", scale_up=2), "tiny", ONE_SHARD),
        (Case(shards=4, ep=2, max_expert_tokens=5, recompute="full"), "tiny", BY_EXPERT),
        (Case(shards=2, tp=2), "tiny", "(Shard(dim=0),)"),
        (Case(shards=8, ep=2), "few", "(Shard(dim=1), Shard(dim=0))"),
        (Case(shards=8, ep=2), "odd", BY_EXPERT),
    ],
    ids=str,
)
def test_split_as_their_weights_are(
    pool: Pool, in_one_process: Any, case: Case, sizes: str, placements: str
) -> None:
    """Initial weights bit for bit, gradients to rounding; dimension 1 where ranks outnumber."""
    expected: Step = in_one_process[sizes]
    biases = [name for name in expected.gradients if name.endswith(BIASES)]
    assert len(biases) == MOE_LAYERS * len(BIASES)
    assert all(expected.gradients[name].any() for name in biases)
    for step in pool.run(case.world, step_of, case, sizes):
        assert step.placements == dict.fromkeys(NAMES, placements)
        assert step.reads >= (MOE_LAYERS if case.ep > 1 else 0)
        assert step.weights.keys() == step.gradients.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            assert torch.equal(step.weights[name], weight), name
            assert error(step.gradients[name], expected.gradients[name]) < PARITY_GRADIENT_ERROR, (
                name
            )
