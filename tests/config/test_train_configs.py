"""Every TOML that is shipped loads, so that none has dead keys."""

from pathlib import Path

import pytest

from titan_moe.config import load_config, save_config

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    path for path in (ROOT / "train_configs").rglob("*.toml") if path.parent.name != "clusters"
)
DEBUG = [path for path in SHIPPED if path.name == "debug.toml"]
LARGEST_DEBUG_RUN = 8


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def test_all_are_found() -> None:
    assert [str(path.relative_to(ROOT / "train_configs")) for path in SHIPPED] == [
        "debug.toml",
        "deepseek_v3/16b.toml",
        "deepseek_v3/671b.toml",
        "deepseek_v3/debug.toml",
        "deepseek_v3/kimi-k2.toml",
        "glm4_moe/4.5-air.toml",
        "glm4_moe/4.5.toml",
        "glm4_moe/debug.toml",
        "gpt_oss/120b.toml",
        "gpt_oss/20b.toml",
        "gpt_oss/debug.toml",
        "mixtral/8x22b.toml",
        "mixtral/8x7b.toml",
        "mixtral/debug.toml",
        "olmoe/1b-7b.toml",
        "olmoe/debug.toml",
        "qwen3_moe/235b-a22b.toml",
        "qwen3_moe/30b-a3b.toml",
        "qwen3_moe/debug.toml",
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_it_loads_and_loads_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize("path", DEBUG, ids=name_of)
def test_debug_runs_on_any_small_number_of_processes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for world in (1, 2, 4, LARGEST_DEBUG_RUN):
        load_config(path, world=world)
    for degree in ("tensor", "context", "pipeline"):
        load_config(path, [f"--parallelism.{degree}_parallel_degree=2"], world=2)
    expert = ["--parallelism.data_parallel_shard_degree=4"]
    load_config(path, [*expert, "--parallelism.expert_parallel_degree=4"], world=4)
