"""The published sizes of the families that route by a softmax."""

from typing import Any

import pytest
import torch

from tests.recipes.published import (
    Published,
    check_attention_shape,
    check_fsdp_units,
    check_one_layer_traces,
    check_params,
)


def without_norms(c: dict[str, Any], head_dim: int) -> int:
    """Every matrix, and the two norms of each block and the last."""
    d = c["hidden_size"]
    attention = 2 * d * head_dim * (c["num_heads"] + c["num_kv_heads"])
    experts = c["num_experts"] * (3 * d * c["moe_intermediate_size"] + d)  # and the router's row
    return c["num_layers"] * (attention + experts + 2 * d) + 2 * c["vocab_size"] * d + d


def qwen3_moe(c: dict[str, Any]) -> int:
    return without_norms(c, c["head_dim"]) + c["num_layers"] * 2 * c["head_dim"]


def mixtral(c: dict[str, Any]) -> int:
    return without_norms(c, c["hidden_size"] // c["num_heads"])


def olmoe(c: dict[str, Any]) -> int:
    head_dim = c["hidden_size"] // c["num_heads"]
    norms = head_dim * (c["num_heads"] + c["num_kv_heads"])
    return without_norms(c, head_dim) + c["num_layers"] * norms


PUBLISHED = [
    Published("qwen3_moe/30b-a3b.toml", 30_532_122_624, qwen3_moe),
    Published("qwen3_moe/235b-a22b.toml", 235_093_634_560, qwen3_moe),
    Published("mixtral/8x7b.toml", 46_702_792_704, mixtral),
    Published("mixtral/8x22b.toml", 140_620_634_112, mixtral),
    Published("olmoe/1b-7b.toml", 6_919_161_856, olmoe),
]
# Not published, but with all that a family can have: a window, heads of keys fewer than queries'.
DEBUG = [
    Published("qwen3_moe/debug.toml", 528_064, qwen3_moe),
    Published("mixtral/debug.toml", 478_784, mixtral),
    Published("olmoe/debug.toml", 479_168, olmoe),
]


@pytest.mark.parametrize("published", PUBLISHED + DEBUG, ids=str)
def test_parameters(published: Published) -> None:
    check_params(published)


@pytest.mark.parametrize("published", PUBLISHED + DEBUG, ids=str)
def test_attention_shape(published: Published) -> None:
    check_attention_shape(published)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_fsdp_units(published: Published) -> None:
    check_fsdp_units(published)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_layer_traces(published: Published, dtype: torch.dtype) -> None:
    check_one_layer_traces(published, dtype)


def test_the_instruct_model_of_8x22b_has_a_few_more_rows() -> None:
    sizes = PUBLISHED[3].cfg.model_dump()
    assert mixtral(sizes | {"vocab_size": 32768}) == 140_630_071_296
