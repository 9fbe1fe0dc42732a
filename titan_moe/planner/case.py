"""What is planned: a run as its TOML has it, on so many GPUs of a cluster, under a software stack.

B sequences, S tokens of one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from titan_moe.config.layout import Layout
from titan_moe.config.schedules import splits_backward, stage_ranks
from titan_moe.config.sections import RunConfig
from titan_moe.planner.cluster import Cluster
from titan_moe.planner.stack import Stack
from titan_moe.recipe import Recipe, load_recipe
from titan_moe.stages import Stage, split_stages

Precision = Literal["bf16", "fp8", "mxfp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Case:
    """precision: of matmuls with weights; "bf16" is what a config runs by itself.

    imbalance: rows that reach the hottest rank's experts over the mean of all ranks; 1: balanced.
    """

    config: RunConfig
    world: int
    cluster: Cluster
    stack: Stack
    precision: Precision = "bf16"
    imbalance: float = 1.0

    @cached_property
    def layout(self) -> Layout:
        """Raises ValueError: the degrees do not multiply to the world."""
        return Layout.of(self.config.parallelism, self.world)

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.config.model.recipe)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All of the pipeline, in order. Raises as `split_stages`."""
        return split_stages(self.config)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The pipeline rank that holds each stage."""
        return stage_ranks(self.config.parallelism)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule takes gradients of inputs and of weights in two parts."""
        return splits_backward(self.config.parallelism)

    @property
    def rows_per_step(self) -> int:
        """B of a step that one data rank computes. The layout divides the batch."""
        return self.config.training.global_batch_size // self.layout.dp_degree

    @property
    def rows_per_micro_batch(self) -> int:
        """B that goes through a stage at once."""
        if self.layout.pp > 1:
            return self.config.parallelism.pipeline_parallel_microbatch_size
        return self.config.training.rows_per_pass(self.layout.dp_degree)

    @property
    def passes(self) -> int:
        """Times per step that the engine calls its runner: of a pipeline, whole schedules."""
        return self.rows_per_step // self.config.training.rows_per_pass(self.layout.dp_degree)

    @property
    def micro_batches(self) -> int:
        """Per step, of one data rank."""
        return self.rows_per_step // self.rows_per_micro_batch

    @property
    def tokens_per_micro_batch(self) -> int:
        """One rank's share of a micro-batch, before tensor parallelism splits it: B·S/cp."""
        return self.rows_per_micro_batch * self.config.training.seq_len // self.layout.cp

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.config.training.global_batch_size * self.config.training.seq_len
