"""Tiny models of the families that route by a softmax, with nothing left trivial."""

from typing import Any

from titan_moe.config.model import ModelConfig
from titan_moe.recipe import load_recipe

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "top_k": 3,
    "max_seq_len": 64,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "initializer_range": 0.2,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 12, "normalize_weights": True},  # 6 x 12 is not 48
    "mixtral": {"sliding_window": 7},
    "olmoe": {"normalize_weights": False},
}


def config(family: str, **changes: Any) -> ModelConfig:
    values = {"recipe": f"recipes.{family}", **SIZES, **OWN[family], **changes}
    return load_recipe(values["recipe"]).config.model_validate(values)
