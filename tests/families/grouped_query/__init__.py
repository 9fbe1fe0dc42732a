"""A family for tests: grouped-query attention, tied embeddings, softmax routing, experts only."""

from titan_moe.recipe import Recipe

from .config import GroupedQueryConfig

RECIPE = Recipe(
    config=GroupedQueryConfig,
    model=f"{__name__}.model.Model",
    sharding=f"{__name__}.sharding.SHARDING",
)
