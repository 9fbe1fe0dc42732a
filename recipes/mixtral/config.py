"""`[model]` of the Mixtral architecture. Torch-free."""

from pydantic import Field, PositiveInt

from titan_moe.config.families import HeadsOfHiddenSize, OnlyExperts
from titan_moe.config.model import AttentionShape


class MixtralConfig(OnlyExperts, HeadsOfHiddenSize):
    """Grouped-query attention, windowed or not, and softmax over the chosen experts."""

    sliding_window: PositiveInt | None = Field(
        None, description="keys that a query sees at most, itself among them; absent: all before it"
    )

    def attention_shape(self, layer: int) -> AttentionShape:
        return self.grouped_query(self.head_dim, window=self.sliding_window)
