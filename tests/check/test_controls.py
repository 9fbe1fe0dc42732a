"""What the check is worth: a recipe broken in one place turns it red, at the step that says why."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.check.forks import Edit, forked
from titan_moe.check import against_transformers
from titan_moe.check.pool import Pool
from titan_moe.check.report import outcome_of
from titan_moe.check.run import check_all, subject_of
from titan_moe.check.steps import STEPS
from titan_moe.cli.check import wanted

NORM = "        self.mlp_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)\n"
BY_NAME = {step.name: step for step in STEPS}


@dataclass(frozen=True)
class Control:
    """red: the step that must fail, and words of its message. green: steps that must not."""

    name: str
    family: str
    edits: tuple[Edit, ...]
    red: str
    words: str
    green: tuple[str, ...] = ("house", "meta", "flops")


def with_shape(change: str) -> tuple[str, str]:
    """An edit of what a family states of its attention."""
    right = "return self.grouped_query(self.head_dim)"
    wrong = f"replace(self.grouped_query(self.head_dim), {change})"
    return right, f"from dataclasses import replace\n        return {wrong}"


CONTROLS = [
    Control(
        "rotary_layout_swapped",
        "qwen3_moe",
        (("model.py", 'layout="halves"', 'layout="interleaved"'),),
        "logits",
        "rotary positions",
    ),
    Control(
        "router_weights_not_normalised",
        "qwen3_moe",
        (
            (
                "model.py",
                "normalize_weights=cfg.normalize_weights",
                "normalize_weights=not cfg.normalize_weights",
            ),
        ),
        "logits",
        "logits differ by up to",
    ),
    Control(
        "key_unmapped",
        "qwen3_moe",
        (
            (
                "hf.py",
                '        Weight(f"{OURS}.attention.q_norm.weight", '
                'f"{THEIRS}.self_attn.q_norm.weight"),\n',
                "",
            ),
        ),
        "roundtrip",
        "layers.0.attention.q_norm.weight",
    ),
    Control(
        "key_misnamed",
        "qwen3_moe",
        (("hf.py", "post_attention_layernorm", "post_attention_norm"),),
        "roundtrip",
        "post_attention_layernorm",
    ),
    Control(
        "expert_bias_dropped",
        "gpt_oss",
        (
            (
                "model.py",
                "    return MoE(router, experts",
                "    experts.has_bias = False\n    return MoE(router, experts",
            ),
        ),
        "logits",
        "logits differ by up to",
    ),
    Control(
        "expert_bias_not_there",
        "gpt_oss",
        (("model.py", "        bias=True,\n        activation=", "        activation="),),
        "roundtrip",
        "bias",
    ),
    Control(
        "colwise_forgotten",
        "qwen3_moe",
        (("sharding.py", '        "layers.*.attention.k",\n', ""),),
        "layouts",
        "no pattern names layers.*.attention.k,",
        ("house", "meta", "flops", "logits"),
    ),
    Control(
        "colwise_misspelt",
        "qwen3_moe",
        (("sharding.py", '"layers.*.attention.k"', '"layers.*.attention.kk"'),),
        "layouts",
        "colwise 'layers.*.attention.kk' matches no module of this model",
        ("house", "meta", "flops", "logits"),
    ),
    Control(
        "flop_shape_wrong",
        "qwen3_moe",
        (("config.py", *with_shape("v_head_dim=2 * self.head_dim")),),
        "flops",
        "attention_scores",
        ("house", "meta", "logits"),
    ),
    Control(
        "kv_heads_not_counted",
        "qwen3_moe",
        (
            (
                "config.py",
                *with_shape(
                    "projection_params=self.hidden_size * self.head_dim * 4 * self.num_heads"
                ),
            ),
        ),
        "flops",
        "attention_projections",
        ("house", "meta"),
    ),
    Control(
        "torch_in_config",
        "qwen3_moe",
        (("config.py", "from pydantic import", "import torch\nfrom pydantic import"),),
        "house",
        "torch is imported with the config",
        ("meta",),
    ),
    Control(
        "parameter_without_init",
        "qwen3_moe",
        (("model.py", NORM, NORM + "        self.more = nn.Linear(4, 4)\n"),),
        "init",
        "no entry in .inits for bias, weight",
        ("house", "meta"),
    ),
    Control(
        "weight_in_memory",
        "qwen3_moe",
        (("model.py", NORM, NORM + '        self.more = nn.Linear(4, 4, device="cpu")\n'),),
        "meta",
        "not on meta when built there: layers.0.more.weight",
        ("house",),
    ),
    Control(
        "gradient_cut",
        "qwen3_moe",
        (("model.py", "self.mlp_norm(x_BSD)", "self.mlp_norm(x_BSD.detach())"),),
        "gradients",
        "gradients are off",
        ("logits",),
    ),
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_broken_recipe_is_seen(
    control: Control, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{control.name}"
    forked(control.family, name, tmp_path, monkeypatch, *control.edits)
    subject = subject_of(wanted(name), pool)
    for step in control.green:
        outcome = outcome_of(BY_NAME[step], subject)
        assert outcome.verdict == "ok", outcome.said
    outcome = outcome_of(BY_NAME[control.red], subject)
    assert outcome.verdict == "FAILED", outcome.said
    assert control.words in outcome.said
    assert f"{name}/" in outcome.said, "it says where to look"


def test_a_broken_recipe_ends_with_code_1(
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit = ("model.py", NORM, "")
    forked("qwen3_moe", "without_norm", tmp_path, monkeypatch, edit)
    assert check_all([wanted("without_norm")], pool) == 1
    said = capsys.readouterr().out
    assert "has no attribute 'mlp_norm'" in said
    assert "without_norm/model.py:" in said, "the line of the recipe where it broke"


def test_without_transformers_it_says_how_to_get_it(
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forked("qwen3_moe", "alone", tmp_path, monkeypatch)
    monkeypatch.setattr(against_transformers, "find_spec", lambda name: None)
    assert check_all([wanted("alone")], pool) == 3
    said = capsys.readouterr().out
    assert said.count("not checked") == 4  # three steps, and the sum
    assert "transformers is not installed: pip install 'titan-moe[dev]' brings it" in said
