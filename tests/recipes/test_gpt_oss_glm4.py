"""GPT-OSS and GLM-4.5 against transformers' models, their published sizes, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.recipes.against_transformers import (
    check_logits_and_gradients,
    check_names,
    check_packed_documents,
    inputs_of,
    pair,
    their_config,
    tiny,
)
from tests.recipes.published import (
    Published,
    check_attention_shape,
    check_fsdp_units,
    check_one_layer_traces,
    check_params,
    on_meta,
    params_of,
)
from titan_moe.config.model import ModelConfig
from titan_moe.recipe import load_recipe

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 12,  # 6 x 12 is not 48
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "top_k": 3,
    "max_seq_len": 64,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "initializer_range": 0.2,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 16}
UNTRUNCATED = {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5}
OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 7, "swiglu_limit": 0.8, "rope_scaling": UNTRUNCATED},
    "glm4_moe": {
        "num_dense_layers": 1,
        "intermediate_size": 64,
        "partial_rotary_factor": 0.5,
        "qk_norm": True,
        "num_shared_experts": 2,
        "route_scale": 2.5,
    },
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt_oss", {}),
    ("gpt_oss", {"rope_scaling": None}),
    ("gpt_oss", {"rope_scaling": YARN}),
    ("gpt_oss", {"rope_scaling": UNTRUNCATED | {"truncate": True, "mscale_all_dim": 0.5}}),
    ("gpt_oss", {"sliding_window": 1, "num_kv_heads": 6}),
    ("gpt_oss", {"full_attention_every": 3, "swiglu_limit": 7.0, "swiglu_alpha": 1.1}),
    ("glm4_moe", {}),
    ("glm4_moe", {"qk_norm": False}),
    ("glm4_moe", {"partial_rotary_factor": 1.0, "num_dense_layers": 0, "intermediate_size": 0}),
    ("glm4_moe", {"rope_scaling": UNTRUNCATED, "num_shared_experts": 1}),
]


def config(family: str, **changes: Any) -> ModelConfig:
    values = {"recipe": f"recipes.{family}", **SIZES, **OWN[family], **changes}
    return load_recipe(values["recipe"]).config.model_validate(values)


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_logits_and_gradients_equal_transformers(family: str, changes: dict[str, Any]) -> None:
    check_logits_and_gradients(pair(config(family, **changes)))


@pytest.mark.parametrize("family", OWN)
def test_packed_documents_equal_each_document_alone(family: str) -> None:
    check_packed_documents(pair(config(family)))


@pytest.mark.parametrize("family", OWN)
def test_names_are_those_that_transformers_saves(family: str, tmp_path: Path) -> None:
    check_names(pair(config(family)), tmp_path)


def test_the_clamp_and_its_slope_are_felt() -> None:
    """So that the comparison above has something to say about them."""
    tokens_BS = torch.arange(40)[None]
    hidden = [
        tiny(config("gpt_oss", **changes))(tokens_BS, **inputs_of(tokens_BS))
        for changes in ({}, {"swiglu_limit": 7.0}, {"swiglu_alpha": 1.0})
    ]
    for other in hidden[1:]:
        assert (hidden[0] - other).abs().max() > 0.1


def test_windows_take_turns_as_in_the_published_config() -> None:
    cfg = PUBLISHED[0].cfg
    wanted = ["sliding_attention", "full_attention"] * 18
    assert their_config(cfg).layer_types == wanted
    assert [block.attention.window for block in on_meta(cfg).layers.values()] == [128, None] * 18


def gpt_oss(c: dict[str, Any]) -> int:
    """Every matrix with its bias, the sinks, the norms."""
    d, f, n = c["hidden_size"], c["moe_intermediate_size"], c["head_dim"]
    h, g = c["num_heads"], c["num_kv_heads"]
    attention = (d + 1) * n * (h + 2 * g) + (h * n + 1) * d + h
    experts = c["num_experts"] * (2 * (d + 1) * f + (f + 1) * d + d + 1)  # and the router's row
    return c["num_layers"] * (attention + experts + 2 * d) + 2 * c["vocab_size"] * d + d


def glm4_moe(c: dict[str, Any]) -> int:
    """The same; biases are of queries, keys and values alone."""
    d, f, n = c["hidden_size"], c["moe_intermediate_size"], c["head_dim"]
    h, g = c["num_heads"], c["num_kv_heads"]
    attention = (d + 1) * n * (h + 2 * g) + h * n * d + 2 * n * c["qk_norm"]
    experts = (c["num_experts"] + c["num_shared_experts"]) * 3 * d * f + c["num_experts"] * d
    dense = c["num_dense_layers"]
    blocks = c["num_layers"] * (attention + 2 * d) + dense * 3 * d * c["intermediate_size"]
    return blocks + (c["num_layers"] - dense) * experts + 2 * c["vocab_size"] * d + d


PUBLISHED = [
    Published("gpt_oss/120b.toml", 116_829_156_672, gpt_oss),
    Published("gpt_oss/20b.toml", 20_914_757_184, gpt_oss),
    Published("glm4_moe/4.5-air.toml", 106_852_245_504, glm4_moe),
    Published("glm4_moe/4.5.toml", 352_797_814_784, glm4_moe),
]


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_parameters(published: Published) -> None:
    check_params(published)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_attention_shape(published: Published) -> None:
    check_attention_shape(published)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_fsdp_units(published: Published) -> None:
    check_fsdp_units(published)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_layer_traces(published: Published, dtype: torch.dtype) -> None:
    check_one_layer_traces(published, dtype)


@pytest.mark.parametrize("published", PUBLISHED[2:], ids=str)
def test_a_layer_of_multi_token_prediction_is_a_block_and_its_own(published: Published) -> None:
    cfg = published.cfg.model_copy(update={"num_mtp_layers": 1})
    d = cfg.hidden_size
    sizes = cfg.model_dump()
    block = glm4_moe(sizes | {"num_layers": cfg.num_layers + 1}) - published.params
    assert params_of(on_meta(cfg)) == published.params + block + 2 * d * d + 3 * d


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt_oss", {"num_kv_heads": 4}, "num_heads = 6 is not divisible by num_kv_heads = 4"),
        ("gpt_oss", {"num_shared_experts": 1}, "num_shared_experts = 1: "),
        ("gpt_oss", {"num_dense_layers": 1, "intermediate_size": 8}, "num_dense_layers = 1: "),
        ("gpt_oss", {"intermediate_size": 8}, "intermediate_size = 8: "),
        ("gpt_oss", {"sliding_window": None}, "sliding_window"),
        ("gpt_oss", {"full_attention_every": 1}, "greater than or equal to 2"),
        ("gpt_oss", {"head_dim": 7}, "multiple of 2"),
        ("glm4_moe", {"num_kv_heads": 4}, "num_heads = 6 is not divisible by num_kv_heads = 4"),
        ("glm4_moe", {"num_shared_experts": 0}, "greater than 0"),
        ("glm4_moe", {"partial_rotary_factor": 0.25}, "is 3.0, and has to be an even number"),
        ("glm4_moe", {"partial_rotary_factor": 0.3}, "has to be an even number"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "less than or equal to 1"),
        ("glm4_moe", {"sliding_window": 8}, "sliding_window"),
    ],
)
def test_what_a_family_cannot_be_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(family, **changes)
