"""Where memory ends as experts fill unevenly, against curves whose crossing is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan_moe.config import load_config
from titan_moe.planner.case import Case
from titan_moe.planner.cluster import load_cluster
from titan_moe.planner.figures import Memory, RankMemory, StepTime
from titan_moe.planner.imbalance import CLOSE_ENOUGH, ImbalanceTable, highest_load, imbalance_table

CONFIGS = Path(__file__).parents[2] / "train_configs"
USABLE = 1_000_000


def case_of(ep: int, world: int, **model: int) -> Case:
    options = [f"--model.{name}={value}" for name, value in model.items()]
    options += [f"--parallelism.expert_parallel_degree={ep}"]
    config = load_config(CONFIGS / "debug.toml", options)
    stack: Any = None  # nothing here asks it
    return Case(config, world, load_cluster(CONFIGS / "clusters" / "h100.toml"), stack)


CASE = case_of(ep=8, world=8, num_experts=64, top_k=4)


def table_of(bytes_at: Callable[[float], float], case: Case = CASE) -> tuple[ImbalanceTable, int]:
    """The table, and how often it asked for memory. Seconds of a step are the load."""
    asked = []

    def memory_of(case: Case) -> Memory:
        asked.append(case.imbalance)
        ranks = (0, int(bytes_at(case.imbalance)))
        return Memory(tuple(RankMemory(0, 0, 0, 0, peak, 0) for peak in ranks), USABLE, "traced")

    def time_of(case: Case) -> StepTime:
        return StepTime(case.imbalance, {}, 0.0, 0.0, 0.0, 0.0)

    return imbalance_table(case, memory_of, time_of), len(asked)


@pytest.mark.parametrize(
    ("bytes_at", "end"),
    [
        (lambda load: 300_000 + 200_000 * load, 3.5),
        (lambda load: 860_000 + 100_000 * load, 1.4),
        (lambda load: 1_000_000 + 1e9 * (load - 1.003), 1.003),
        (lambda load: max(600_000, 110_000 * load), 1000 / 110),  # past any load there can be
        (lambda load: max(600_000, 600_000 + 500_000 * (load - 4)), 4.8),
        (lambda load: 100_000 * load**2, 10**0.5),
        (lambda load: 2_000_000 if load > 7.9 else 1, 7.9),
        (lambda load: 1e12 if load > 6 else 999_999, 6.0),  # where lines alone creep
    ],
)
def test_the_load_at_which_memory_ends(bytes_at: Callable[[float], float], end: float) -> None:
    table, asked = table_of(bytes_at)
    if end > 8:
        assert table.limit is None
        assert table.limit_text.startswith("Memory never runs out")
    else:
        assert table.limit is not None
        assert end - CLOSE_ENOUGH <= table.limit <= end
        assert f"gets {table.limit:.2f} times the mean" in table.limit_text
    assert asked <= 24  # 4, and 10 halvings in every other of 20


def test_a_straight_line_takes_three_tries() -> None:
    assert table_of(lambda load: 300_000 + 200_000 * load)[1] <= 3 + 1 + 3


def test_rows() -> None:
    table, _ = table_of(lambda load: 300_000 + 300_000 * load)
    assert [row.imbalance for row in table.rows] == [1.0, 1.5, 3.0]
    assert [row.time.seconds for row in table.rows] == [1.0, 1.5, 3.0]
    assert [row.memory.worst.peak for row in table.rows] == [600_000, 750_000, 1_200_000]
    assert [row.fits for row in table.rows] == [True, True, False]


def test_nothing_fits() -> None:
    table, asked = table_of(lambda load: 2_000_000 + load)
    assert (table.limit, asked) == (None, 3)
    assert table.limit_text == "It does not fit even with balanced experts."


@pytest.mark.parametrize(
    ("ep", "experts", "top_k", "highest"),
    [(1, 64, 4, 1.0), (8, 64, 4, 8.0), (8, 64, 16, 4.0), (8, 8, 3, 8 / 3), (2, 64, 4, 2.0)],
)
def test_no_load_is_higher_than_all_tokens_on_one_rank(
    ep: int, experts: int, top_k: int, highest: float
) -> None:
    """A token's top_k experts differ: a rank can have them all only if it has so many."""
    case = case_of(ep=ep, world=8, num_experts=experts, top_k=top_k)
    most = min(top_k, experts // ep)  # of a token's copies
    assert most / (top_k / ep) == pytest.approx(highest)
    assert highest_load(case) == pytest.approx(highest)
    table, _ = table_of(lambda load: load, case)
    assert table.bound == highest_load(case)
    assert table.rows[-1].imbalance == min(3.0, table.bound)
    assert table.limit is None
    assert ("Every rank has all experts" in table.limit_text) == (ep == 1)
