"""What a recipe's config says of tensor parallelism, against the weights that are split."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.tiny import GROUPED_QUERY, MODEL
from titan_moe.config.model import ModelConfig
from titan_moe.layers.head import Head
from titan_moe.layers.linear import Embedding
from titan_moe.recipe import Sharding, fits, load_recipe

CHANGES: dict[str, tuple[ModelConfig, dict[str, tuple[int, ...]]]] = {
    "deepseek_v3": (
        MODEL,
        {
            "num_heads": (4, 6),
            "vocab_size": (48, 50),
            "intermediate_size": (24, 20),
            "moe_intermediate_size": (12, 3),
            "num_shared_experts": (0, 1, 2),
            "num_dense_layers": (0, 1),
        },
    ),
    "grouped_query": (
        GROUPED_QUERY,
        {"num_heads": (12, 24), "num_kv_heads": (4, 6, 12), "vocab_size": (48, 51)},
    ),
}


def split_sizes(model: nn.Module, sharding: Sharding) -> Iterator[int]:
    """Of every dimension that is cut: outputs, inputs, rows of the vocabulary."""
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if fits(name, sharding.colwise) or isinstance(module, Embedding):
            yield weight.shape[0]
        elif fits(name, sharding.rowwise):
            yield weight.shape[1]
        elif isinstance(module, Head):
            yield module.output.weight.shape[0]


@pytest.mark.parametrize("family", CHANGES)
def test_degrees_that_divide_these_sizes_divide_every_weight_and_whole_heads(family: str) -> None:
    base, changes = CHANGES[family]
    recipe = load_recipe(base.recipe)
    seen = set()
    for values in product(*changes.values()):
        change = dict(zip(changes, values, strict=True))
        config = type(base)(**(base.model_dump(exclude_none=True) | one_per_layer(base) | change))
        with torch.device("meta"):
            model = recipe.load_model_class()(
                config, layers=range(config.num_layers), has_embedding=True, has_head=True
            )
        sizes = list(split_sizes(model, recipe.load_sharding()))
        heads = [config.num_heads, getattr(config, "num_kv_heads", config.num_heads)]
        for degree in range(1, 13):
            allowed = not any(size % degree for size in config.tensor_parallel_sizes().values())
            possible = not any(size % degree for size in (*sizes, *heads))
            assert allowed == possible, (degree, change)
            seen.add((degree, allowed))
    assert {(2, True), (2, False), (3, True), (3, False), (4, True), (4, False)} <= seen


def one_per_layer(base: ModelConfig) -> dict[str, float]:
    """A number for each that the tiny model gives as a list, which would fix its layers."""
    keys = ("balance_loss_weight", "z_loss_weight", "bias_update_rate")
    return {key: 0.1 for key in keys if hasattr(base, key)}
