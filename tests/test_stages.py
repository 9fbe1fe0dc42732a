"""Blocks per stage against every split there is, and which stages a rank holds."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from tests.metrics.configs import run_config
from tests.parity.tiny import MODEL, MTP
from titan_moe.config.sections import RunConfig
from titan_moe.stages import Stage, balanced, split_stages, stages_line, stages_of_rank


def all_splits(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(end - begin for begin, end in pairwise((0, *cuts, blocks)))
        for cuts in combinations(range(1, blocks), stages - 1)
    ]


def costs_of(split: tuple[int, ...], costs_L: list[int], first: int, last: int) -> list[int]:
    taken, of_stages = list(costs_L), []
    for size in split:
        of_stages.append(sum(taken[:size]))
        taken = taken[size:]
    of_stages[0] += first
    of_stages[-1] += last
    return of_stages


@pytest.mark.parametrize("seed", range(30))
def test_no_split_has_a_cheaper_dearest_stage(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    blocks = draw(3, 9)
    stages = draw(2, blocks + 1)
    costs_L = [draw(1, 20) for _ in range(blocks)]
    first, last = draw(0, 30), draw(0, 30)
    split = balanced(costs_L, stages, first, last)

    def rank(split: tuple[int, ...]) -> tuple[int, int]:
        costs = costs_of(split, costs_L, first, last)
        return max(costs), sum(cost * cost for cost in costs)

    assert rank(split) == min(map(rank, all_splits(blocks, stages)))


def config_of(blocks: int, stages: int, vocab_size: int = 11, **keys: Any) -> RunConfig:
    """Blocks that cost the same, one stage per rank unless told otherwise."""
    section = {"pipeline_parallel_degree": stages, "pipeline_parallel_schedule": "GPipe"}
    return run_config(
        model={"num_layers": blocks, "vocab_size": vocab_size},
        parallelism=section | keys,
    )


def sizes(config: RunConfig) -> list[int]:
    return [len(stage.layers) for stage in split_stages(config)]


def test_embedding_and_head_are_counted() -> None:
    ends = {
        "pipeline_parallel_first_stage_less_layers": 2.0,
        "pipeline_parallel_last_stage_less_layers": 3.0,
    }
    assert sizes(config_of(13, 3, **ends)) == [4, 6, 3]
    none = dict.fromkeys(ends, 0.0)
    assert sizes(config_of(12, 3, **none)) == [4, 4, 4]
    # By its FLOPs: of hidden size 4, next to nothing, or more than all the blocks together.
    by_flops = {"pipeline_parallel_first_stage_less_layers": 0.0}
    assert sizes(config_of(12, 2, vocab_size=1, **by_flops)) == [6, 6]
    assert sizes(config_of(12, 2, vocab_size=100_000, **by_flops)) == [11, 1]


def test_layers_that_predict_ahead_cost_the_last_stage() -> None:
    """Each more than a block, and the logits once more."""
    config = config_of(4, 2, pipeline_parallel_first_stage_less_layers=0.0)
    for model, split in ((MODEL, [2, 2]), (MTP, [3, 1])):
        assert sizes(config.model_copy(update={"model": model})) == split


def test_stages_are_the_whole_model_in_order() -> None:
    stages = split_stages(config_of(5, 3, pipeline_parallel_layers=(1, 3, 1)))
    assert stages == (
        Stage(0, range(1), has_embedding=True, has_head=False),
        Stage(1, range(1, 4), has_embedding=False, has_head=False),
        Stage(2, range(4, 5), has_embedding=False, has_head=True),
    )
    assert split_stages(config_of(5, 1)) == (Stage(0, range(5), has_embedding=True, has_head=True),)


@pytest.mark.parametrize(
    ("schedule", "held"),
    [("LoopedBFS", [[0, 2, 4], [1, 3, 5]]), ("Interleaved1F1B", [[0, 2], [1, 3]])],
)
def test_stages_of_a_rank_go_round(schedule: str, held: list[list[int]]) -> None:
    keys = {
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_stages_per_rank": len(held[0]),
    }
    config = config_of(7, 2, **keys)
    assert [[s.index for s in stages_of_rank(config, rank)] for rank in (0, 1)] == held


def test_a_v_has_both_ends_on_the_first_rank() -> None:
    config = config_of(7, 3, pipeline_parallel_schedule="ZBVZeroBubble")
    held = [stages_of_rank(config, rank) for rank in range(3)]
    assert [[stage.index for stage in of_rank] for of_rank in held] == [[0, 5], [1, 4], [2, 3]]
    assert held[0][0].has_embedding
    assert held[0][1].has_head


def test_stages_on_one_line() -> None:
    few = split_stages(config_of(5, 3, pipeline_parallel_layers=(2, 1, 2)))
    assert stages_line(few) == "3 stages, blocks 0 to 1 | 2 | 3 to 4"
    many = split_stages(config_of(10, 9, pipeline_parallel_layers=(1,) * 8 + (2,)))
    assert stages_line(many) == "9 stages of [1, 1, 1, 1, 1, 1, 1, 1, 2] blocks"


def test_what_cannot_be_split() -> None:
    with pytest.raises(ValueError, match=r"4 pipeline stages are more than model\.num_layers = 3"):
        split_stages(config_of(3, 4))
    for listed in ((1, 2), (1, 2, 3)):
        with pytest.raises(ValueError, match=f"{len(listed)} numbers, in all {sum(listed)}"):
            split_stages(config_of(5, 3, pipeline_parallel_layers=listed))
