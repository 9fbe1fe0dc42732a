"""`[model]` of the Qwen3-MoE architecture. Torch-free."""

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from titan_moe.config.model import AttentionShape, ModelConfig


class Qwen3MoeConfig(ModelConfig):
    """Grouped-query attention with normed heads, softmax routing, experts in every block."""

    num_kv_heads: PositiveInt = Field(description="heads of keys and values")
    head_dim: PositiveInt = Field(multiple_of=2, description="width of a head, all of it rotary")
    normalize_weights: bool = Field(description="a token's expert weights sum to 1")

    @model_validator(mode="after")
    def _family_fits(self) -> Self:
        for key in ("num_dense_layers", "num_shared_experts", "intermediate_size"):
            if getattr(self, key):
                raise ValueError(
                    f"{key} = {getattr(self, key)}: Qwen3-MoE has experts in every block and "
                    "nothing beside them; leave it out"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        return self

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
