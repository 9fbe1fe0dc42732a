"""Which blocks each pipeline stage has, and which stages each rank. Torch-free.

L blocks, N stages.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from titan_moe.config.schedules import num_stages, stage_ranks
from titan_moe.config.sections import RunConfig
from titan_moe.flops import block_flops_per_token, logits_flops_per_token, mtp_flops_per_token

FEW_STAGES = 8  # as many have their blocks told on one line


@dataclass(frozen=True)
class Stage:
    """A piece of the model: blocks `layers`, the embedding before them, the head after."""

    index: int
    layers: range
    has_embedding: bool
    has_head: bool

    @property
    def span(self) -> str:
        """For a log: `4 to 7`."""
        first, last = self.layers[0], self.layers[-1]
        return f"{first}" if first == last else f"{first} to {last}"


def split_stages(config: RunConfig) -> tuple[Stage, ...]:
    """All stages of the pipeline in order; without a pipeline one, the whole model.

    Blocks are given out by pipeline_parallel_layers, or else so that the most expensive stage costs
    as little as it can, and among such splits the costs differ least (in squares).

    Raises:
        ValueError: more stages than blocks, or a list that is not of these stages and blocks.
    """
    section, blocks = config.parallelism, config.model.num_layers
    stages, listed = num_stages(section), section.pipeline_parallel_layers
    if stages > blocks:
        raise ValueError(
            f"parallelism: {stages} pipeline stages are more than model.num_layers = {blocks}; "
            f"each has at least one block"
        )
    if listed and (len(listed) != stages or sum(listed) != blocks):
        raise ValueError(
            f"parallelism.pipeline_parallel_layers = {list(listed)}: {len(listed)} numbers, in "
            f"all {sum(listed)}, for {stages} stages and model.num_layers = {blocks}"
        )
    embedding, blocks_L, head = _costs(config)
    sizes = listed or balanced(blocks_L, stages, embedding, head)
    bounds = pairwise(accumulate(sizes, initial=0))
    return tuple(
        Stage(index, range(begin, end), has_embedding=begin == 0, has_head=end == blocks)
        for index, (begin, end) in enumerate(bounds)
    )


def stages_line(stages: Sequence[Stage]) -> str:
    """Of all stages in order, for a log: `2 stages, blocks 0 to 4 | 5 to 8`.

    Of many the numbers of blocks alone, as pipeline_parallel_layers would list them.
    """
    if len(stages) > FEW_STAGES:
        return f"{len(stages)} stages of {[len(stage.layers) for stage in stages]} blocks"
    return f"{len(stages)} stages, blocks {' | '.join(stage.span for stage in stages)}"


def stages_of_rank(config: RunConfig, rank: int) -> tuple[Stage, ...]:
    """Those that pipeline rank `rank` holds, in order."""
    holders = stage_ranks(config.parallelism)
    return tuple(stage for stage in split_stages(config) if holders[stage.index] == rank)


def balanced(costs_L: Sequence[float], stages: int, first: float, last: float) -> tuple[int, ...]:
    """Blocks per stage. first, last: what its first and last stage cost besides their blocks."""
    sums = list(accumulate(costs_L, initial=0.0))

    def cost(begin: int, end: int) -> float:
        ends = (first if begin == 0 else 0.0) + (last if end == len(costs_L) else 0.0)
        return sums[end] - sums[begin] + ends

    highest, _ = _cheapest(len(costs_L), stages, cost, max)

    def square(begin: int, end: int) -> float:
        return cost(begin, end) ** 2 if cost(begin, end) <= highest else math.inf

    _, sizes = _cheapest(len(costs_L), stages, square, operator.add)
    return sizes


def _cheapest(
    blocks: int,
    stages: int,
    cost: Callable[[int, int], float],
    together: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The best split of blocks into stages of at least one, and what it costs `together`.

    cost: of one stage that has blocks begin to end - 1.
    """
    # By the number of blocks given out so far, one stage after the other.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(1, stages + 1):
        ends = range(stage, blocks - (stages - stage) + 1)
        best = {
            end: min(
                (together(so_far, cost(begin, end)), (*sizes, end - begin))
                for begin, (so_far, sizes) in best.items()
                if begin < end
            )
            for end in ends
        }
    return best[blocks]


def _costs(config: RunConfig) -> tuple[float, list[float], float]:
    """Of the embedding, each block, and the head with what predicts ahead, in FLOPs per token."""
    section, model, seq_len = config.parallelism, config.model, config.training.seq_len
    blocks = [
        block_flops_per_token(model, layer, seq_len).total for layer in range(model.num_layers)
    ]
    mean = sum(blocks) / len(blocks)
    head = logits_flops_per_token(model) + mtp_flops_per_token(model, seq_len)
    if section.pipeline_parallel_last_stage_less_layers is not None:
        head = section.pipeline_parallel_last_stage_less_layers * mean
    return section.pipeline_parallel_first_stage_less_layers * mean, blocks, head
