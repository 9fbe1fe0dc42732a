"""What ranks send each other, one kind of message at a time. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from titan_moe.planner.figures import Dimension

Operation = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce", "send"]
When = Literal["forward", "backward", "micro-batch", "step"]


@dataclass(frozen=True)
class Message:
    """bytes: what one rank sends to others in one of them. Over n ranks, of N bytes that all have
    in the end or began with: an all-gather or reduce-scatter N·(n-1)/n, an all-reduce twice that;
    an all-to-all what leaves the rank, if routing is uniform.

    count: how many there are, in whatever time the whole is of (a micro-batch, a step).
    when: of which part of a step they are; "step": once in each, however many micro-batches.
    tier: of a dispatcher that sends over one tier at a time; None: follows from the placement.
    """

    dimension: Dimension
    operation: Operation
    bytes: int
    count: int
    when: When
    what: str
    tier: Literal["inside", "across"] | None = None
