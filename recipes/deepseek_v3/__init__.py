"""DeepSeek-V3 (arXiv 2412.19437) and the models that share its architecture."""

from recipes.deepseek_v3.config import DeepseekV3Config
from titan_moe.recipe import Recipe

RECIPE = Recipe(
    config=DeepseekV3Config,
    model="recipes.deepseek_v3.model.Model",
    sharding="recipes.deepseek_v3.sharding.SHARDING",
)
