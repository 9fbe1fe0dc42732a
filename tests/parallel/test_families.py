"""What is special to a family, over layouts: norms over all heads, windows and sinks over split
sequences, biases of everything, blocks of two kinds.

Three steps of training against one process: losses, counts, and the gradient of every parameter.
That one process computes the right thing is for tests/recipes, which have transformers to compare.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from recipes.glm4_moe.config import Glm4MoeConfig
from recipes.gpt_oss.config import GptOssConfig
from recipes.mixtral.config import MixtralConfig
from recipes.olmoe.config import OlmoeConfig
from recipes.qwen3_moe.config import Qwen3MoeConfig
from tests.parity.cases import Case
from tests.parity.compare import compare
from tests.parity.run import Trace, train
from tests.parity.tiny import SEQ_LEN, VOCAB, Family
from titan_moe.check.pool import Pool
from titan_moe.config.model import ModelConfig
from titan_moe.layers import experts, grouped_query, linear, router
from titan_moe.layers.init import Normal

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "top_k": 2,
    "balance_loss_weight": 0.1,
    "max_seq_len": SEQ_LEN,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "initializer_range": 0.2,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 8, "truncate": False}
MODELS: dict[str, ModelConfig] = {
    "olmoe": OlmoeConfig(
        recipe="recipes.olmoe", normalize_weights=False, z_loss_weight=0.02, **SIZES
    ),
    "mixtral": MixtralConfig(recipe="recipes.mixtral", sliding_window=5, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        recipe="recipes.qwen3_moe", head_dim=6, normalize_weights=True, **SIZES
    ),
    "gpt_oss": GptOssConfig.model_validate(
        {
            **SIZES,
            "recipe": "recipes.gpt_oss",
            "head_dim": 8,
            "sliding_window": 5,
            "swiglu_limit": 0.5,
            "rope_scaling": YARN,
        }
    ),
    "glm4_moe": Glm4MoeConfig(
        recipe="recipes.glm4_moe",
        head_dim=8,
        num_dense_layers=1,
        intermediate_size=40,
        partial_rotary_factor=0.5,
        qk_norm=True,
        num_shared_experts=1,
        route_scale=1.5,
        bias_update_rate=0.003,
        num_mtp_layers=1,
        **SIZES,
    ),
}


@dataclass(frozen=True)
class FamilyCase(Case):
    """A case of a family that is none of tests/parity's."""

    @property
    def of_family(self) -> Family:
        """What of it a run reads; the rest would be for a reference by the book."""
        return Family(
            MODELS[self.family],
            seed=5,
            score_function="",
            groups=0,
            limited_groups=0,
            balance=(),
            z_loss=(),
            bias_rate=(),
        )


def noise(value: float) -> Normal:
    """In the place of `Constant`, for what it starts at 0."""
    return Normal(0.2)


def off_zero(patch: pytest.MonkeyPatch) -> None:
    """Biases and sinks start from noise: they matter from the first step, and after three their
    rounding is no longer that of three updates alone.
    """
    for module in (experts, grouped_query, linear, router):
        patch.setattr(module, "Constant", noise)


def run(case: FamilyCase) -> Trace:
    return train(case, control=off_zero)


def of(family: str, **layout: Any) -> FamilyCase:
    return FamilyCase(family=family, **layout)


# The norm over all heads, whose sum of squares is over ranks; the window, over ranks' slices; sinks
# and biases, of which each rank has some heads', and that of the way out whole; experts' biases;
# blocks of both kinds in stages of their own.
LAYOUTS = [
    of("olmoe", tp=4),
    of("olmoe", tp=2, sequence_parallel=False),
    of("olmoe", tp=2, shards=2, ep=4),
    of("mixtral", cp=4),
    of("mixtral", tp=2, cp=2),
    of("qwen3_moe", shards=4, ep=4, accumulation=2),
    of("gpt_oss", tp=4),
    of("gpt_oss", tp=2, sequence_parallel=False),
    of("gpt_oss", shards=4, ep=2, max_expert_tokens=8),
    of("gpt_oss", cp=2, tp=2, ep=2),
    of("gpt_oss", pp=2),
    of("glm4_moe", tp=2, cp=2),
    of("glm4_moe", pp=2, shards=2, ep=2),
]
# The same things, each in more company or in less.
MORE_LAYOUTS = [
    of("olmoe", tp=2),
    of("olmoe", tp=4, sequence_parallel=False),
    of("olmoe", tp=2, shards=2),
    of("olmoe", tp=2, shards=2, sequence_parallel=False, recompute="full"),
    of("mixtral", cp=2),
    of("mixtral", cp=2, balancer="none"),
    of("mixtral", tp=2),
    of("mixtral", cp=2, shards=2, ep=2),
    of("qwen3_moe", tp=2, cp=2),
    of("gpt_oss", tp=2),
    of("gpt_oss", tp=4, sequence_parallel=False),
    of("gpt_oss", tp=2, shards=2),
    of("gpt_oss", tp=2, shards=2, sequence_parallel=False, recompute="full"),
    of("gpt_oss", shards=2, ep=2),
    of("gpt_oss", shards=4, ep=4),
    of("gpt_oss", tp=2, shards=2, ep=4),
    of("gpt_oss", cp=2),
    of("gpt_oss", cp=4),
    of("gpt_oss", cp=2, balancer="none"),
    of("glm4_moe", tp=4, sequence_parallel=False),
    of("glm4_moe", tp=2, shards=2, ep=4),
]


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> Any:
    """family -> the trace of one process."""

    @cache
    def trace(family: str) -> Trace:
        return pool.run(1, run, of(family))[0]

    return trace


@pytest.mark.parametrize(
    "case",
    [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.nightly) for case in MORE_LAYOUTS)],
    ids=str,
)
def test_three_steps_equal_one_process(pool: Pool, one_process: Any, case: FamilyCase) -> None:
    expected = one_process(case.family)
    of_ranks = [compare(trace, expected) for trace in pool.run(case.world, run, case)]
    assert [comparison.faults for comparison in of_ranks] == [()] * case.world
