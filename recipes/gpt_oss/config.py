"""`[model]` of the GPT-OSS architecture. Torch-free."""

from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from titan_moe.config.model import AttentionShape, ModelConfig


class GptOssConfig(ModelConfig):
    """Attention with sinks, windowed in most blocks; softmax over the chosen experts; biases."""

    num_kv_heads: PositiveInt = Field(description="heads of keys and values")
    head_dim: PositiveInt = Field(multiple_of=2, description="width of a head, all of it rotary")
    sliding_window: PositiveInt = Field(
        description="keys that a query sees at most, itself among them, in most blocks"
    )
    full_attention_every: int = Field(
        2, ge=2, description="the last of so many blocks in turn has no window"
    )
    swiglu_limit: PositiveFloat = Field(7.0, description="where experts clamp gate and up")
    swiglu_alpha: PositiveFloat = Field(1.702, description="slope of the gate's sigmoid")

    @model_validator(mode="after")
    def _family_fits(self) -> Self:
        for key in ("num_dense_layers", "num_shared_experts", "intermediate_size"):
            if getattr(self, key):
                raise ValueError(
                    f"{key} = {getattr(self, key)}: GPT-OSS has experts in every block and "
                    "nothing beside them; leave it out"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        return self

    def window(self, layer: int) -> int | None:
        """Keys that a query of block `layer` sees at most; None: all before it."""
        is_full = (layer + 1) % self.full_attention_every == 0
        return None if is_full else self.sliding_window

    def attention_shape(self, layer: int) -> AttentionShape:
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return AttentionShape(
            projection_params=self.hidden_size * self.head_dim * heads,
            num_heads=self.num_heads,
            qk_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            window=self.window(layer),
            sinks=True,
        )

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {**super().tensor_parallel_sizes(), "num_kv_heads": self.num_kv_heads}
