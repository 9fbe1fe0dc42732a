"""config.json of published models, as far as it bears on the architecture, against the TOMLs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.against_transformers import their_config
from tests.recipes.softmax_families import OWN, config
from tests.recipes.test_published_softmax import PUBLISHED
from titan_moe.hf.config_json import model_config
from titan_moe.recipe import load_recipe

SHARED: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "output_router_logits": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN: dict[str, Any] = SHARED | {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL: dict[str, Any] = SHARED | {
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}
FILES: dict[str, dict[str, Any]] = {
    "qwen3_moe/30b-a3b.toml": QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,  # of dense blocks, which it has none of
        "max_window_layers": 48,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
    },
    "qwen3_moe/235b-a22b.toml": QWEN
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 94,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
    },
    "mixtral/8x7b.toml": MIXTRAL
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "router_aux_loss_coef": 0.02,
    },
    "mixtral/8x22b.toml": MIXTRAL
    | {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "max_position_embeddings": 65536,
        "num_attention_heads": 48,
        "num_hidden_layers": 56,
        "router_aux_loss_coef": 0.001,
    },
    "olmoe/1b-7b.toml": SHARED
    | {
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "vocab_size": 50304,
    },
}
OF_TRAINING = {"balance_loss_weight", "balance_loss_scope", "z_loss_weight", "bias_update_rate"}


def sizes(cfg: Any) -> dict[str, Any]:
    return {key: value for key, value in cfg.model_dump().items() if key not in OF_TRAINING}


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_a_published_model_is_what_its_toml_says(published: Any) -> None:
    cfg = published.cfg
    read = model_config(load_recipe(cfg.recipe), cfg.recipe, FILES[published.toml], "config.json")
    assert sizes(read) == sizes(cfg)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_balance_has_the_published_weight_in_our_scale(published: Any) -> None:
    """Of equal loads, theirs (a mean over layers of top_k) and ours (a sum of ones) are equal."""
    theirs = FILES[published.toml]["router_aux_loss_coef"] * published.cfg.top_k
    if published.cfg.recipe == "recipes.olmoe":  # its own code divides by top_k, as we do
        theirs /= published.cfg.top_k
    ours = published.cfg.balance_loss_weight * published.cfg.num_layers
    assert ours == pytest.approx(theirs, rel=5e-3)


@pytest.mark.parametrize("family", OWN)
def test_what_transformers_saves_is_read_again(family: str, tmp_path: Path) -> None:
    cfg = config(family)
    their_config(cfg).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert model_config(load_recipe(cfg.recipe), cfg.recipe, saved, "config.json") == cfg


@pytest.mark.parametrize(
    ("toml", "key", "value"),
    [
        ("qwen3_moe/30b-a3b.toml", "mlp_only_layers", [0]),
        ("qwen3_moe/30b-a3b.toml", "decoder_sparse_step", 2),
        ("qwen3_moe/30b-a3b.toml", "use_sliding_window", True),
        ("qwen3_moe/30b-a3b.toml", "attention_bias", True),
        ("mixtral/8x7b.toml", "router_jitter_noise", 0.1),
        ("mixtral/8x7b.toml", "tie_word_embeddings", True),
        ("mixtral/8x7b.toml", "hidden_act", "gelu"),
        ("olmoe/1b-7b.toml", "clip_qkv", 8.0),
        ("olmoe/1b-7b.toml", "attention_bias", True),
    ],
)
def test_another_computation_is_refused_by_name(toml: str, key: str, value: Any) -> None:
    recipe = f"recipes.{toml.partition('/')[0]}"
    with pytest.raises(ValueError, match=f"{key} = .*: the recipe computes"):
        model_config(load_recipe(recipe), recipe, FILES[toml] | {key: value}, "config.json")
