"""Norm, MLP, head: formulas written out, dtypes, and what a module says about its values."""

import pytest
import torch
import torch.nn.functional as F

from tests.layers.helpers import error, fill
from tests.tolerances import FP32_REORDERED
from titan_moe.layers.head import Head
from titan_moe.layers.linear import Embedding, Linear
from titan_moe.layers.mlp import SwiGLU
from titan_moe.layers.norm import RMSNorm


def test_rms_norm_is_fp32_inside_and_rounds_once() -> None:
    norm = fill(RMSNorm(64, eps=1e-5))
    norm.weight.data.uniform_(0.5, 2)
    x = torch.randn(3, 64) * 100
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert error(norm(x), truth) < FP32_REORDERED
    assert torch.equal(norm(x.bfloat16()), norm(x.bfloat16().float()).bfloat16())


def test_swiglu() -> None:
    mlp = fill(SwiGLU(16, 24, std=0.3))
    x = torch.randn(3, 16)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    assert error(mlp(x), (gate * gate.sigmoid() * up) @ mlp.down.weight.T) < FP32_REORDERED


def test_head_sums_cross_entropy_over_labels_in_fp32() -> None:
    head = fill(Head(16, 11, norm_eps=1e-6, std=0.5))
    hidden, labels = torch.randn(2, 5, 16), torch.randint(0, 11, (2, 5))
    labels[0, 2] = labels[1, 4] = -100
    logits = head.logits(hidden)
    truth = sum(
        -logits[b, s].double().log_softmax(-1)[labels[b, s]]
        for b in range(2)
        for s in range(5)
        if labels[b, s] != -100
    )
    assert head.loss(hidden, labels).item() == pytest.approx(truth.item(), rel=1e-6)
    assert head.to(torch.bfloat16).loss(hidden.bfloat16(), labels).dtype == torch.float32


def test_a_head_without_labels_to_predict_has_loss_and_gradients_of_zero() -> None:
    head = fill(Head(16, 11, norm_eps=1e-6, std=0.5))
    loss = head.loss(torch.randn(1, 4, 16), torch.full((1, 4), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in head.parameters())


def test_constructors_draw_no_random_numbers() -> None:
    before = torch.random.get_rng_state()
    layers = [Linear(8, 8, std=1.0), Embedding(8, 8, std=1.0), Head(8, 8, norm_eps=1e-6, std=1.0)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert F.linear(torch.ones(8), fill(layers[0]).weight).isfinite().all()
