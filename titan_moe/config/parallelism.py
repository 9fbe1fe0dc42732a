"""`[parallelism]` of a recipe TOML. Names follow torchtitan v0.2.2 where they mean the same."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator

from titan_moe.config.base import FilePath, Section


class Parallelism(Section):
    """`[parallelism]`: how the work is laid over processes; never what is computed."""

    data_parallel_replicate_degree: PositiveInt = Field(1, description="HSDP replicas")
    data_parallel_shard_degree: int = Field(
        -1, description="FSDP shards; -1: what the world leaves"
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = Field(
        "default",
        description="free gathered weights after forward; default: always, never in a pipeline",
    )
    tensor_parallel_degree: PositiveInt = Field(
        1, description="ranks that split attention, dense and shared MLPs and the vocabulary"
    )
    sequence_parallel: bool = Field(
        True, description="between tensor-parallel layers each rank keeps its own tokens only"
    )
    disable_loss_parallel: bool = Field(
        False, description="gather whole logits before the loss, vocabulary and all"
    )
    expert_parallel_degree: PositiveInt = Field(
        1, description="ranks that split the routed experts; folded into dp_shard, cp and tp"
    )
    expert_parallel_comm_backend: Literal["flat", "two_tier"] = Field(
        "flat", description="two_tier: a token crosses between fast domains once per domain"
    )
    max_expert_tokens: PositiveInt | None = Field(
        None,
        description="above so many rows at once an expert layer works in chunks and recomputes "
        "them in backward; nothing is dropped",
    )
    context_parallel_degree: PositiveInt = Field(1, description="ranks that split each sequence")
    context_parallel_load_balancer: Literal["headtail", "none"] = Field(
        "headtail", description="headtail: a rank has an early and a late part, of equal work"
    )
    pipeline_parallel_degree: PositiveInt = Field(1, description="ranks that split the layers")
    pipeline_parallel_schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = Field("1F1B", description="order of forward and backward over micro-batches")
    pipeline_parallel_schedule_csv: FilePath | None = Field(
        None,
        description="file with an order of one's own, in torch's format: a line per rank, cells "
        "like 0F0 (stage, action, micro-batch)",
    )
    pipeline_parallel_microbatch_size: PositiveInt = Field(
        1, description="sequences that a stage computes at once"
    )
    pipeline_parallel_stages_per_rank: PositiveInt | None = Field(
        None, description="absent: as the schedule has it, 1 or 2"
    )
    pipeline_parallel_layers: tuple[PositiveInt, ...] = Field(
        (), strict=False, description="blocks of each stage, in order; empty: balanced by cost"
    )
    pipeline_parallel_first_stage_less_layers: NonNegativeFloat = Field(
        1.0, description="cost of the embedding, in blocks, when stages are balanced"
    )
    pipeline_parallel_last_stage_less_layers: NonNegativeFloat | None = Field(
        None,
        description="cost of the head, in blocks, when stages are balanced; absent: by its FLOPs",
    )
    scale_up_size: PositiveInt | None = Field(
        None, description="neighbouring ranks joined by a fast network (one domain, one rack)"
    )
    tensor_parallel_across_domains: bool = Field(
        False, description="allow tensor parallelism beyond scale_up_size"
    )

    @field_validator("data_parallel_shard_degree")
    @classmethod
    def _is_a_degree(cls, degree: int) -> int:
        if degree < 1 and degree != -1:
            raise ValueError("expected 1 or more, or -1: what the world leaves")
        return degree
