"""GLM-4.5 (arXiv 2508.06471) and the models that share its architecture."""

from titan_moe.recipe import Recipe

from .config import Glm4MoeConfig

RECIPE = Recipe(
    config=Glm4MoeConfig,
    model=f"{__name__}.model.Model",
    sharding=f"{__name__}.sharding.SHARDING",
    hf=f"{__name__}.hf.HF",
)
