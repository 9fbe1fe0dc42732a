"""Layouts: the arithmetic of the two views."""

import re
import subprocess
import sys
from itertools import product
from math import prod
from typing import Any

import pytest

from titan_moe.config.layout import Layout
from titan_moe.config.sections import Parallelism

KEYS = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "expert_parallel_degree",
)


def section(*degrees: int) -> Parallelism:
    """Of pp, dp_replicate, dp_shard, cp, tp, ep, in this order."""
    keys: dict[str, Any] = dict(zip(KEYS, degrees, strict=False))
    return Parallelism(**keys)


def test_views_multiply_to_one_world() -> None:
    layout = Layout(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=4, ep=8)
    assert layout.dense == {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "cp": 2, "tp": 4}
    assert layout.sparse == {"pp": 2, "dp_replicate": 3, "efsdp": 2, "ep": 8}
    assert layout.world == 96
    assert layout.stage_ranks == 48
    assert layout.dp_degree == 6


@pytest.mark.parametrize(
    ("degrees", "world", "dp_shard"),
    [
        ((1, 1, -1), 1, 1),
        ((1, 1, -1), 4, 4),
        ((1, 2, -1), 4, 2),
        ((1, 4, -1), 4, 1),
        ((1, 2, 2), 4, 2),
        ((2, 3, -1, 5, 7), 420, 2),
        ((2, 3, 2, 5, 7, 35), 420, 2),
    ],
)
def test_degrees_from_the_section(degrees: tuple[int, ...], world: int, dp_shard: int) -> None:
    layout = Layout.of(section(*degrees), world)
    pp, replicate, _, cp, tp, ep = (*degrees, 1, 1, 1)[:6]
    assert layout == Layout(pp, replicate, dp_shard, cp, tp, ep)
    assert layout.world == world


def test_degrees_that_all_are_given_need_one_world() -> None:
    for degrees in product((1, 2, 3), repeat=5):
        assert Layout.world_of(section(*degrees)) == prod(degrees)
    assert Layout.world_of(section(2, 2, -1, 2, 2)) is None


@pytest.mark.parametrize(
    ("degrees", "world", "message"),
    [
        (
            (1, 3, -1),
            4,
            "pp 1 × dp_replicate 3 × cp 1 × tp 1 = 3 does not divide the world of 4 processes",
        ),
        (
            (2, 1, -1, 2, 2),
            4,
            "pp 2 × dp_replicate 1 × cp 2 × tp 2 = 8 does not divide the world of 4 processes",
        ),
        (
            (1, 2, 4),
            4,
            "pp 1 × dp_replicate 2 × dp_shard 4 × cp 1 × tp 1 = 8, but the world has 4 processes; "
            "data_parallel_shard_degree = -1 takes what the others leave",
        ),
        (
            (1, 1, 2),
            4,
            "pp 1 × dp_replicate 1 × dp_shard 2 × cp 1 × tp 1 = 2, but the world has 4 processes; "
            "data_parallel_shard_degree = -1 takes what the others leave",
        ),
    ],
)
def test_impossible_degrees_show_their_arithmetic(
    degrees: tuple[int, ...], world: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Layout.of(section(*degrees), world)


def test_degrees_below_one_and_experts_that_do_not_fold() -> None:
    with pytest.raises(ValueError, match=r"dp_shard is 0, must be 1 or more"):
        Layout(dp_shard=0)
    with pytest.raises(ValueError, match=r"ep is -1"):
        Layout(ep=-1)
    with pytest.raises(ValueError, match=r"dp_shard 2 × cp 1 × tp 2 = 4 ranks .* ep 3"):
        Layout(dp_shard=2, tp=2, ep=3)


def test_a_layout_needs_no_torch() -> None:
    code = (
        "import sys; from titan_moe.config.layout import Layout; import titan_moe.mesh;"
        "import titan_moe.optim.schedule;"
        "from titan_moe.config.sections import Parallelism; Layout.of(Parallelism(), 8);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
