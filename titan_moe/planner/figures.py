"""What a plan says, as data: memory, traffic, time. Bytes, seconds; a GB is 10^9 bytes."""

from dataclasses import dataclass, field
from typing import Literal

Dimension = Literal["dp_replicate", "dp_shard", "efsdp", "cp", "tp", "ep", "pp"]
Tier = Literal["scale-up", "scale-out"]
Doing = Literal["forward", "backward", "weight", "communication"]

# What a step's seconds are spent on, as its slowest pipeline rank sees them. Of messages only what
# no compute hides.
SPENT_ON = (
    "attention",
    "dense matmuls",
    "experts",
    "memory-bound",
    "launches",
    "expert all-to-all",
    "gradients and weights",
    "tensor and context",
    "pipeline transfers",
    "bubble",
    "optimizer",
)


@dataclass(frozen=True)
class RankMemory:
    """What lives at once on one rank of a pipeline stage, at the moment it is most. Bytes.

    buffers: of communication: gathered weights, gradients about to be reduced, tokens under way.
    when: of that moment, for people: "backward of micro-batch 3".
    """

    pipeline_rank: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    when: str = ""

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class Memory:
    """ranks: one per pipeline rank, in order. usable: bytes of a GPU that tensors can have."""

    ranks: tuple[RankMemory, ...]
    usable: int
    source: Literal["traced", "closed form"]

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        return self.worst.peak <= self.usable


@dataclass(frozen=True)
class Lane:
    """Traffic of one mesh dimension, as the pipeline rank that sends most of it sends it.

    across: bytes that leave the scale-up domain; inside: all others. Both count what one rank sends
    to others, without its own share. seconds: on the wire per step, hidden behind compute or not;
    None, as what of them is exposed: times are not planned.
    """

    dimension: Dimension
    ranks: int
    tier: Tier
    inside_bytes_per_step: int
    across_bytes_per_step: int
    bytes_per_micro_batch: int
    seconds: float | None = None
    exposed_seconds: float | None = None

    @property
    def hidden_seconds(self) -> float | None:
        if self.seconds is None or self.exposed_seconds is None:
            return None
        return self.seconds - self.exposed_seconds


@dataclass(frozen=True)
class Span:
    """One bar of the pipeline's timeline; begin and end in seconds since the step began."""

    pipeline_rank: int
    stage: int
    micro_batch: int
    doing: Doing
    begin: float
    end: float


@dataclass(frozen=True)
class StepTime:
    """spent: seconds by SPENT_ON; their sum is `seconds`.

    tflops_per_gpu: the model's own FLOPs (flops.py), so that recomputation does not count.
    mfu: that over the cluster's dense peak at the case's precision.
    error_band: relative, half width: published figures of this stack were this far off or less in
        nine of ten cases; what the stack file says of itself.
    """

    seconds: float
    spent: dict[str, float]
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    error_band: float
    spans: tuple[Span, ...] = field(default=(), repr=False)
