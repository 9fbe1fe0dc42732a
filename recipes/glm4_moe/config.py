"""`[model]` of the GLM-4.5 architecture. Torch-free."""

from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from titan_moe.config.model import AttentionShape
from titan_moe.config.mtp import MultiTokenPrediction


class Glm4MoeConfig(MultiTokenPrediction):
    """Grouped-query attention turned in part, sigmoid routing, balance without auxiliary loss."""

    num_kv_heads: PositiveInt = Field(description="heads of keys and values")
    head_dim: PositiveInt = Field(description="width of a head")
    partial_rotary_factor: float = Field(
        gt=0.0, le=1.0, description="part of a head's width that has position, its first dimensions"
    )
    qk_norm: bool = Field(description="each head's queries and keys are normed before they turn")
    num_shared_experts: PositiveInt = Field(description="experts that every token visits")
    route_scale: PositiveFloat = Field(description="sum of a token's expert weights")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = "
                f"{self.num_kv_heads}"
            )
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
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return AttentionShape(
            projection_params=self.hidden_size * self.head_dim * heads,
            num_heads=self.num_heads,
            qk_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
        )

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {**super().tensor_parallel_sizes(), "num_kv_heads": self.num_kv_heads}
