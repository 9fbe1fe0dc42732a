"""Families that route by a softmax against transformers' models, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.recipes.against_transformers import (
    check_logits_and_gradients,
    check_names,
    check_packed_documents,
    inputs_of,
    pair,
    tiny,
)
from tests.recipes.softmax_families import OWN, config
from titan_moe.layers.moe import MoE

YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 16}
TEMPERATURES = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}  # scale angles here, never scores
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"normalize_weights": False}),
    ("qwen3_moe", {"rope_scaling": YARN}),
    ("qwen3_moe", {"rope_scaling": TEMPERATURES}),
    ("qwen3_moe", {"num_kv_heads": 6, "top_k": 2}),
    ("mixtral", {}),
    ("mixtral", {"sliding_window": None}),
    ("mixtral", {"sliding_window": 1}),
    ("mixtral", {"num_kv_heads": 6}),
    ("olmoe", {}),
    ("olmoe", {"normalize_weights": True}),
    ("olmoe", {"num_kv_heads": 6}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_logits_and_gradients_equal_transformers(family: str, changes: dict[str, Any]) -> None:
    check_logits_and_gradients(pair(config(family, **changes)))


@pytest.mark.parametrize("family", OWN)
def test_packed_documents_equal_each_document_alone(family: str) -> None:
    check_packed_documents(pair(config(family)))


@pytest.mark.parametrize("family", OWN)
def test_names_are_those_that_transformers_saves(family: str, tmp_path: Path) -> None:
    check_names(pair(config(family)), tmp_path)


@pytest.mark.parametrize("family", OWN)
def test_balance_loss_is_transformers_per_layer_over_top_k(family: str) -> None:
    """Of one sequence; theirs counts a token once per choice. Its gradient reaches the router."""
    cfg = config(family, balance_loss_weight=0.3, z_loss_weight=0.0)
    model = tiny(cfg)
    tokens_BS = torch.arange(40)[None] % cfg.vocab_size
    moes = [module for module in model.modules() if isinstance(module, MoE)]
    logits: list[torch.Tensor] = []
    for moe in moes:
        moe.router.register_forward_hook(lambda _, __, out: logits.append(out))
    model(tokens_BS, **inputs_of(tokens_BS))
    for moe, logits_TE in zip(moes, logits, strict=True):
        theirs = load_balancing_loss_func((logits_TE.detach(),), cfg.num_experts, cfg.top_k)
        assert moe.balance_loss_sum.item() == pytest.approx(
            0.3 * float(theirs) / cfg.top_k, rel=1e-5
        )


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("key", ["balance_loss_weight", "z_loss_weight"])
def test_auxiliary_losses_reach_each_router_and_padding_does_not(family: str, key: str) -> None:
    """Tokens that are padding change no gradient of a loss of routing alone."""
    gradients = []
    for last in (1, 2):
        model = tiny(config(family, **{key: [0.5, 0.0, 0.5]}))
        tokens_BS = torch.arange(20)[None].clone()
        tokens_BS[:, 15:] = last
        inputs = inputs_of(tokens_BS)
        inputs["document_ids_BS"][:, 15:] = -1
        (model(tokens_BS, **inputs) * 0.0).sum().backward()
        gradients.append([b.moe.router.weight.grad.clone() for b in model.layers.values()])
        sums = [b.moe.balance_loss_sum.item() for b in model.layers.values()]
        assert [value > 0 for value in sums] == [True, False, True]
        assert model.layers["0"].moe.counts.sum() == 15 * model.layers["0"].moe.router.top_k
    assert gradients[0][0].norm() > 1e-4
    assert gradients[0][2].norm() > 1e-4
    for first, second in zip(*gradients, strict=True):
        assert torch.allclose(first, second, atol=1e-7)


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "num_heads = 6 is not divisible by num_kv_heads = 4"),
        ({"num_shared_experts": 1}, "num_shared_experts = 1: "),
        ({"num_dense_layers": 1, "intermediate_size": 8}, "num_dense_layers = 1: "),
        ({"intermediate_size": 8}, "intermediate_size = 8: "),
        ({"num_dense_layers": 1}, "num_dense_layers = 1 needs intermediate_size"),
        ({"top_k": 9}, "top_k = 9 is more than num_experts = 8"),
        ({"q_lora_rank": 8}, "q_lora_rank"),
    ],
)
def test_what_a_family_cannot_be_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"head_dim": 7}, "multiple of 2"),
        ("mixtral", {"sliding_window": 0}, "greater than 0"),
        ("mixtral", {"hidden_size": 54}, "hidden_size = 54 is not divisible by 2 [*] num_heads"),
        ("olmoe", {"hidden_size": 54}, "hidden_size = 54 is not divisible by 2 [*] num_heads"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_sizes_of_its_own_are_refused_by_name(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(family, **changes)
