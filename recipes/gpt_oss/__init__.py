"""GPT-OSS (arXiv 2508.10925) and the models that share its architecture."""

from titan_moe.recipe import Recipe

from .config import GptOssConfig

RECIPE = Recipe(
    config=GptOssConfig,
    model=f"{__name__}.model.Model",
    sharding=f"{__name__}.sharding.SHARDING",
    hf=f"{__name__}.hf.HF",
)
