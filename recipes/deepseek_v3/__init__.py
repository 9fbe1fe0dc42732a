"""DeepSeek-V3 (arXiv 2412.19437) and the models that share its architecture."""

from titan_moe.recipe import Recipe

from .config import DeepseekV3Config

RECIPE = Recipe(
    config=DeepseekV3Config,
    model=f"{__name__}.model.Model",
    sharding=f"{__name__}.sharding.SHARDING",
    hf=f"{__name__}.hf.HF",
)
