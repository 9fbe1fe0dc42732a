"""`[model]` of the Qwen3-MoE architecture. Torch-free."""

from pydantic import Field, PositiveInt

from titan_moe.config.families import GroupedQuery, OnlyExperts
from titan_moe.config.model import AttentionShape


class Qwen3MoeConfig(OnlyExperts, GroupedQuery):
    """Grouped-query attention with normed heads, softmax routing, experts in every block."""

    head_dim: PositiveInt = Field(multiple_of=2, description="width of a head, all of it rotary")
    normalize_weights: bool = Field(description="a token's expert weights sum to 1")

    def attention_shape(self, layer: int) -> AttentionShape:
        return self.grouped_query(self.head_dim)
