"""`[model]` of the grouped-query family. Torch-free."""

from pydantic import Field, PositiveInt

from titan_moe.config.families import GroupedQuery, OnlyExperts
from titan_moe.config.model import AttentionShape


class GroupedQueryConfig(OnlyExperts, GroupedQuery):
    """Several query heads read one key head; every block has experts and nothing beside them."""

    head_dim: PositiveInt = Field(multiple_of=2, description="width of a head, all of it rotary")

    def attention_shape(self, layer: int) -> AttentionShape:
        return self.grouped_query(self.head_dim)
