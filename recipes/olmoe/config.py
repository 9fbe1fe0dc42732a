"""`[model]` of the OLMoE architecture. Torch-free."""

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from titan_moe.config.model import AttentionShape, ModelConfig


class OlmoeConfig(ModelConfig):
    """Attention with queries and keys normed whole, softmax routing, experts in every block."""

    num_kv_heads: PositiveInt = Field(description="heads of keys and values")
    normalize_weights: bool = Field(description="a token's expert weights sum to 1")

    @model_validator(mode="after")
    def _family_fits(self) -> Self:
        for key in ("num_dense_layers", "num_shared_experts", "intermediate_size"):
            if getattr(self, key):
                raise ValueError(
                    f"{key} = {getattr(self, key)}: OLMoE has experts in every block and "
                    "nothing beside them; leave it out"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not divisible by 2 * num_heads = "
                f"{2 * self.num_heads}: a head's width is their quotient, and even"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

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
