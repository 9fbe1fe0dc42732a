"""`[model]` of the GPT-OSS architecture. Torch-free."""

from pydantic import Field, PositiveFloat, PositiveInt

from titan_moe.config.families import GroupedQuery, OnlyExperts
from titan_moe.config.model import AttentionShape


class GptOssConfig(OnlyExperts, GroupedQuery):
    """Attention with sinks, windowed in most blocks; softmax over the chosen experts; biases."""

    head_dim: PositiveInt = Field(multiple_of=2, description="width of a head, all of it rotary")
    sliding_window: PositiveInt = Field(
        description="keys that a query sees at most, itself among them, in most blocks"
    )
    full_attention_every: int = Field(
        2, ge=2, description="the last of so many blocks in turn has no window"
    )
    swiglu_limit: PositiveFloat = Field(7.0, description="where experts clamp gate and up")
    swiglu_alpha: PositiveFloat = Field(1.702, description="slope of the gate's sigmoid")

    def window(self, layer: int) -> int | None:
        """Keys that a query of block `layer` sees at most; None: all before it."""
        is_full = (layer + 1) % self.full_attention_every == 0
        return None if is_full else self.sliding_window

    def attention_shape(self, layer: int) -> AttentionShape:
        return self.grouped_query(self.head_dim, window=self.window(layer), sinks=True)
