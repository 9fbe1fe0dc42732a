"""A fork whose sharding forgets something is told so in its first step, by the parameter's name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recipes.deepseek_v3.model as recipe_model
from recipes.deepseek_v3 import RECIPE
from recipes.deepseek_v3.sharding import SHARDING
from tests.parity.cases import Case, config_of, layout_of
from tests.parity.run import rows_of
from tests.parity.tiny import batch_of_step
from titan_moe.check.pool import Pool
from titan_moe.layers.linear import Linear
from titan_moe.layers.norm import RMSNorm
from titan_moe.mesh import Meshes
from titan_moe.parallelize import parallelize
from titan_moe.recipe import Recipe, Sharding

Attention = Callable[[Any], type[nn.Module]]


def with_norm_after_the_sum(attention: Any) -> type[nn.Module]:
    class PostNorm(attention):  # type: ignore[misc]
        def __init__(self, cfg: Any, rope: Any) -> None:
            super().__init__(cfg, rope)
            self.post_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)

        def forward(self, x_BSD: Tensor, context: Any) -> Tensor:
            return self.post_norm(super().forward(x_BSD, context))

    return PostNorm


def with_gate(attention: Any) -> type[nn.Module]:
    class Gated(attention):  # type: ignore[misc]
        """A colwise linear that reads what attention is given."""

        def __init__(self, cfg: Any, rope: Any) -> None:
            super().__init__(cfg, rope)
            width = cfg.num_heads * cfg.v_head_dim
            self.gate = Linear(cfg.hidden_size, width, std=cfg.initializer_range)
            self.back = Linear(width, cfg.hidden_size, std=cfg.initializer_range)

        def forward(self, x_BSD: Tensor, context: Any) -> Tensor:
            return super().forward(x_BSD, context) + self.back(self.gate(x_BSD).sigmoid())

    return Gated


POST_NORM = "layers.*.attention.post_norm"
GATE, BACK = "layers.*.attention.gate", "layers.*.attention.back"
SPLIT_GATE = replace(SHARDING, colwise=(*SHARDING.colwise, GATE), rowwise=(*SHARDING.rowwise, BACK))


def norms(case: Case, change: Attention, sharding: Sharding) -> list[float]:
    """The gradient's norm of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_model, "LatentAttention", change(recipe_model.LatentAttention))
        patch.setattr(Recipe, "load_sharding", lambda self: sharding)
        meshes = Meshes.build(layout_of(case), "cpu")
        engine = parallelize(config_of(case), RECIPE, meshes, torch.device("cpu"))
        found = []
        for step in range(2):
            for parameter in engine.parameters():
                parameter.grad = None
            engine.forward_backward(rows_of(batch_of_step(step), meshes))
            found.append(engine.grad_norm().item())
        return found


@pytest.mark.parametrize("case", [Case(tp=2), Case(tp=2, sequence_parallel=False)], ids=str)
@pytest.mark.parametrize(
    ("change", "sharding"),
    [
        (with_norm_after_the_sum, replace(SHARDING, residual=(POST_NORM,))),
        (with_gate, replace(SPLIT_GATE, gather_inputs=(*SHARDING.gather_inputs, GATE))),
    ],
)
def test_a_fork_that_says_all(
    pool: Pool, case: Case, change: Attention, sharding: Sharding
) -> None:
    (expected,) = pool.run(1, norms, Case(), change, sharding)
    for found in pool.run(2, norms, case, change, sharding):
        assert found == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(
    ("case", "change", "sharding", "message"),
    [
        (
            Case(tp=2, sequence_parallel=False),
            with_norm_after_the_sum,
            SHARDING,
            r"same gradient of layers.\d.attention.post_norm.weight, .* sharding.residual",
        ),
        (
            Case(tp=2, shards=2, sequence_parallel=False),
            with_gate,
            SPLIT_GATE,
            r"different gradients of layers.\d.attention_norm.weight, .* sharding.gather_inputs",
        ),
        (
            Case(tp=2, pp=2, sequence_parallel=False),
            with_gate,
            SPLIT_GATE,
            r"different gradients of layers.\d.attention_norm.weight, .* sharding.gather_inputs",
        ),
    ],
)
def test_a_fork_that_forgets_is_told(
    pool: Pool, case: Case, change: Attention, sharding: Sharding, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(case.world, norms, case, change, sharding)
