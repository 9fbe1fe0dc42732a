"""What is special to a family, over layouts: norms over all heads, windows over split sequences.

Three steps of training against one process: losses, counts, and the gradient of every parameter.
That one process computes the right thing is for tests/recipes, which have transformers to compare.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from recipes.mixtral.config import MixtralConfig
from recipes.olmoe.config import OlmoeConfig
from recipes.qwen3_moe.config import Qwen3MoeConfig
from tests.parity.cases import Case
from tests.parity.compare import compare
from tests.parity.run import Trace, train
from tests.parity.tiny import SEQ_LEN, VOCAB, Family
from titan_moe.check.pool import Pool
from titan_moe.config.model import ModelConfig

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
MODELS: dict[str, ModelConfig] = {
    "olmoe": OlmoeConfig(
        recipe="recipes.olmoe", normalize_weights=False, z_loss_weight=0.02, **SIZES
    ),
    "mixtral": MixtralConfig(recipe="recipes.mixtral", sliding_window=5, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        recipe="recipes.qwen3_moe", head_dim=6, normalize_weights=True, **SIZES
    ),
}


@dataclass(frozen=True)
class FamilyCase(Case):
    """A case of a family that is none of tests/parity's."""

    @property
    def of_family(self) -> Family:
        return Family(
            MODELS[self.family],
            seed=5,
            score_function="softmax",
            groups=1,
            limited_groups=1,
            balance=(0.1,) * 2,
            z_loss=(0.02 if self.family == "olmoe" else 0.0,) * 2,
            bias_rate=(0.0,) * 2,
        )


def of(family: str, **layout: Any) -> FamilyCase:
    return FamilyCase(family=family, **layout)


# The norm over all heads, whose sum of squares is over ranks; and the window, over ranks' slices.
LAYOUTS = [
    of("olmoe", tp=2),
    of("olmoe", tp=4),
    of("olmoe", tp=2, sequence_parallel=False),
    of("olmoe", tp=4, sequence_parallel=False),
    of("olmoe", tp=2, shards=2),
    of("olmoe", tp=2, shards=2, sequence_parallel=False, recompute="full"),
    of("olmoe", tp=2, shards=2, ep=4),
    of("mixtral", cp=2),
    of("mixtral", cp=4),
    of("mixtral", cp=2, balancer="none"),
    of("mixtral", tp=2),
    of("mixtral", tp=2, cp=2),
    of("mixtral", cp=2, shards=2, ep=2),
    of("qwen3_moe", tp=2, cp=2),
    of("qwen3_moe", shards=4, ep=4, accumulation=2),
]


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> Any:
    """family -> the trace of one process."""

    @cache
    def trace(family: str) -> Trace:
        return pool.run(1, train, of(family))[0]

    return trace


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_three_steps_equal_one_process(pool: Pool, one_process: Any, case: FamilyCase) -> None:
    expected = one_process(case.family)
    of_ranks = [compare(trace, expected) for trace in pool.run(case.world, train, case)]
    assert [comparison.faults for comparison in of_ranks] == [()] * case.world
