"""Rotary positions against complex numbers, and YaRN against another implementation of it."""

import math

import pytest
import torch
from transformers import DeepseekV3Config as HfConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

from tests.layers.helpers import error
from tests.tolerances import FP32_REORDERED
from titan_moe.config.model import RopeScaling
from titan_moe.layers.rope import Rope

CPU = torch.device("cpu")


def yarn(**changes: float) -> RopeScaling:
    keys = {"factor": 40.0, "original_max_seq_len": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    return RopeScaling.model_validate({"type": "yarn", **keys, **changes})


def test_pairs_of_neighbours_turn_as_complex_numbers() -> None:
    rope = Rope(dim=8, theta=100.0, max_seq_len=64)
    x = torch.randn(2, 5, 3, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 9, 27, 62, 63]])
    turned = rope(positions)(x)
    for b in range(2):
        for s in range(5):
            for f in range(4):
                angle = positions[b, s].item() * 100.0 ** (-2 * f / 8)
                for h in range(3):
                    pair = complex(*x[b, s, h, 2 * f : 2 * f + 2].tolist())
                    expected = pair * complex(math.cos(angle), math.sin(angle))
                    got = complex(*turned[b, s, h, 2 * f : 2 * f + 2].tolist())
                    assert abs(got - expected) < 1e-5


def test_layout_is_the_one_of_published_weights() -> None:
    rope = Rope(dim=8, theta=100.0, max_seq_len=64)
    q, k = torch.randn(2, 2, 5, 3, 8).unbind()
    rotation = rope(torch.arange(5).expand(2, 5))
    cos, sin = (torch.cat([x, x], dim=-1) for x in (rotation.cos_BSF, rotation.sin_BSF))
    q_theirs, k_theirs = apply_rotary_pos_emb_interleave(q, k, cos, sin, unsqueeze_dim=2)
    # They write the turned pairs as halves; ours stay neighbours.
    to_halves = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    assert torch.allclose(rotation(q)[..., to_halves], q_theirs, atol=1e-6)
    assert torch.allclose(rotation(k)[..., to_halves], k_theirs, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 4.0, "original_max_seq_len": 128},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"mscale": 0.707, "mscale_all_dim": 0.9},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"beta_fast": 1.0, "beta_slow": 1.0},
        {"truncate": False},
        {"truncate": False, "factor": 4.0, "original_max_seq_len": 128},
        {"truncate": False, "beta_fast": 1.0, "beta_slow": 1.0},
        {"factor": 1.0},
    ],
)
def test_yarn_equals_transformers(changes: dict[str, float]) -> None:
    scaling = yarn(**changes)
    rope = Rope(dim=64, theta=10000.0, max_seq_len=4096, scaling=scaling)
    theirs = HfConfig(
        qk_rope_head_dim=64,
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": scaling.original_max_seq_len,
            **{k: getattr(scaling, k) for k in ("factor", "mscale", "mscale_all_dim")},
            **{k: getattr(scaling, k) for k in ("beta_fast", "beta_slow", "truncate")},
        },
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, CPU)
    assert error(rope.frequencies(CPU), frequencies) < FP32_REORDERED
    assert rope.magnitude() == pytest.approx(magnitude)


def test_yarn_temperature_of_the_published_model() -> None:
    rope = Rope(dim=64, theta=10000.0, max_seq_len=163840, scaling=yarn())
    assert rope.magnitude() == 1.0
    mscale = 0.1 * math.log(40) + 1
    assert rope.attention_scale(192) == pytest.approx(192**-0.5 * mscale**2)
    assert Rope(64, 10000.0, 4096).attention_scale(192) == 192**-0.5


def test_angles_are_fp32_and_results_round_once() -> None:
    rope = Rope(dim=8, theta=10000.0, max_seq_len=5000)
    positions = torch.full((1, 1), 4999)
    x = torch.randn(1, 1, 2, 8).bfloat16()
    assert rope(positions).cos_BSF.dtype == torch.float32
    assert torch.equal(rope(positions)(x), rope(positions)(x.float()).bfloat16())


def test_positions_beyond_the_limit_raise() -> None:
    rope = Rope(dim=8, theta=10000.0, max_seq_len=16)
    rope(torch.arange(16)[None])
    with pytest.raises(ValueError, match=r"17 tokens is longer than model.max_seq_len = 16"):
        rope(torch.arange(17)[None])
    with pytest.raises(RuntimeError, match=r"beyond model.max_seq_len = 16"):
        rope(torch.tensor([[0, 16]]))
