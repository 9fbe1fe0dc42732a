"""`[model]` of the GLM-4.5 architecture. Torch-free."""

from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from titan_moe.config.families import GroupedQuery
from titan_moe.config.model import AttentionShape
from titan_moe.config.mtp import MultiTokenPrediction


class Glm4MoeConfig(GroupedQuery, MultiTokenPrediction):
    """Grouped-query attention turned in part, sigmoid routing, balance without auxiliary loss."""

    head_dim: PositiveInt = Field(description="width of a head")
    partial_rotary_factor: float = Field(
        gt=0.0, le=1.0, description="part of a head's width that has position, its first dimensions"
    )
    qk_norm: bool = Field(description="each head's queries and keys are normed before they turn")
    num_shared_experts: PositiveInt = Field(description="experts that every token visits")
    route_scale: PositiveFloat = Field(description="sum of a token's expert weights")

    @model_validator(mode="after")
    def _part_of_a_head_turns(self) -> Self:
        width = self.head_dim * self.partial_rotary_factor
        if width != self.rotary_dim or width % 2:
            raise ValueError(
                f"head_dim = {self.head_dim} times partial_rotary_factor = "
                f"{self.partial_rotary_factor} is {width}, and has to be an even number"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Width of a head that has position."""
        return int(self.head_dim * self.partial_rotary_factor)

    def attention_shape(self, layer: int) -> AttentionShape:
        return self.grouped_query(self.head_dim)
