"""Mixtral (arXiv 2401.04088) and the models that share its architecture."""

from titan_moe.recipe import Recipe

from .config import MixtralConfig

RECIPE = Recipe(
    config=MixtralConfig,
    model=f"{__name__}.model.Model",
    sharding=f"{__name__}.sharding.SHARDING",
    hf=f"{__name__}.hf.HF",
)
