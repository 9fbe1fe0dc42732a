"""OLMoE (arXiv 2409.02060) and the models that share its architecture."""

from titan_moe.recipe import Recipe

from .config import OlmoeConfig

RECIPE = Recipe(
    config=OlmoeConfig,
    model=f"{__name__}.model.Model",
    sharding=f"{__name__}.sharding.SHARDING",
    hf=f"{__name__}.hf.HF",
)
