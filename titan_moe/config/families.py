"""What the configs of several families have in common; a family's own extends what fits it."""

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from titan_moe.config.model import AttentionShape, ModelConfig


class OnlyExperts(ModelConfig):
    """Every block has experts, and nothing beside them."""

    @model_validator(mode="after")
    def _nothing_else_is_there(self) -> Self:
        for key in ("num_dense_layers", "num_shared_experts", "intermediate_size"):
            if getattr(self, key):
                raise ValueError(
                    f"{key} = {getattr(self, key)}: this family has experts in every block and "
                    "nothing beside them; leave it out"
                )
        return self


class GroupedQuery(ModelConfig):
    """Several query heads read one key head (arXiv 2305.13245)."""

    num_kv_heads: PositiveInt = Field(description="heads of keys and values")

    @model_validator(mode="after")
    def _key_heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        return self

    def grouped_query(
        self, head_dim: int, *, window: int | None = None, sinks: bool = False
    ) -> AttentionShape:
        """Of a block whose heads, of queries, keys and values alike, are so wide."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # queries and output, keys and values
        return AttentionShape(
            projection_params=self.hidden_size * head_dim * heads,
            num_heads=self.num_heads,
            qk_head_dim=head_dim,
            v_head_dim=head_dim,
            window=window,
            sinks=sinks,
        )

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {**super().tensor_parallel_sizes(), "num_kv_heads": self.num_kv_heads}


class HeadsOfHiddenSize(GroupedQuery):
    """A head's width is no key: it is hidden_size / num_heads."""

    @model_validator(mode="after")
    def _width_is_even(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not divisible by 2 * num_heads = "
                f"{2 * self.num_heads}: a head's width is their quotient, and even"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads
