"""Every TOML that is shipped loads, so that none has dead keys."""

from pathlib import Path

import pytest

from titan_moe.config import load_config, save_config

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    path for path in (ROOT / "train_configs").rglob("*.toml") if path.parent.name != "clusters"
)
LARGEST_DEBUG_RUN = 8


def test_all_are_found() -> None:
    assert [str(path.relative_to(ROOT / "train_configs")) for path in SHIPPED] == [
        "debug.toml",
        "deepseek_v3/16b.toml",
        "deepseek_v3/671b.toml",
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_loads_and_loads_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


def test_the_default_runs_on_any_small_number_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    for world in (1, 2, 4, LARGEST_DEBUG_RUN):
        load_config("train_configs/debug.toml", world=world)
