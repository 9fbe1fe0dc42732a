"""The example of docs/balance.md is a config, and its keys mean what the page says."""

import re
import tomllib
from pathlib import Path

import pytest

from titan_moe.config import load_config

ROOT = Path(__file__).parents[2]


def test_the_example_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/balance.md").read_text("utf-8")
    (block,) = re.findall(r"^    \[model\]\n(?:    .+\n)+", page, re.MULTILINE)
    keys = tomllib.loads(block)["model"]
    monkeypatch.chdir(ROOT)
    overrides = [f"--model.{key}={value}" for key, value in keys.items()]
    balance = load_config("train_configs/debug.toml", overrides, world=4).model.balance(1)
    assert {key: getattr(balance, key) for key in keys} == keys


def test_every_key_of_balance_is_on_the_page() -> None:
    page = (ROOT / "docs/balance.md").read_text("utf-8")
    config = load_config(ROOT / "train_configs/debug.toml")
    assert [key for key in vars(config.model.balance(1)) if f"`{key}" not in page] == []
