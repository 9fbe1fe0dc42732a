"""`[model]` of the OLMoE architecture. Torch-free."""

from pydantic import Field

from titan_moe.config.families import HeadsOfHiddenSize, OnlyExperts
from titan_moe.config.model import AttentionShape


class OlmoeConfig(OnlyExperts, HeadsOfHiddenSize):
    """Queries and keys normed over all heads together, softmax routing, experts in every block."""

    normalize_weights: bool = Field(description="a token's expert weights sum to 1")

    def attention_shape(self, layer: int) -> AttentionShape:
        return self.grouped_query(self.head_dim)
