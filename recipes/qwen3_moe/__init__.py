"""Qwen3-MoE (arXiv 2505.09388) and the models that share its architecture."""

from titan_moe.recipe import Recipe

from .config import Qwen3MoeConfig

RECIPE = Recipe(
    config=Qwen3MoeConfig,
    model=f"{__name__}.model.Model",
    sharding=f"{__name__}.sharding.SHARDING",
    hf=f"{__name__}.hf.HF",
)
