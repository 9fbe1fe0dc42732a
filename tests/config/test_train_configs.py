"""Every TOML that is shipped loads, so that none has dead keys."""

from pathlib import Path

import pytest

from titan_moe.config import load_config, save_config
from titan_moe.config.layout import Layout

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    path for path in (ROOT / "train_configs").rglob("*.toml") if path.parent.name != "clusters"
)
DEBUG = [path for path in SHIPPED if path.name == "debug.toml"]
LARGEST_DEBUG_RUN = 8

# Published models laid over a machine: `<size>_<machine>_<GPUs>.toml`, and what each extends.
READY = {
    "deepseek_v3/671b_b200_256.toml": "671b.toml",
    "deepseek_v3/671b_gb300_256.toml": "671b.toml",
    "deepseek_v3/671b_h100_1024.toml": "671b.toml",
    "qwen3_moe/235b_gb200_256.toml": "235b-a22b.toml",
    "qwen3_moe/30b_h200_8.toml": "30b-a3b.toml",
}


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def test_all_are_found() -> None:
    assert [str(path.relative_to(ROOT / "train_configs")) for path in SHIPPED] == [
        "debug.toml",
        "deepseek_v3/16b.toml",
        "deepseek_v3/671b.toml",
        "deepseek_v3/671b_b200_256.toml",
        "deepseek_v3/671b_gb300_256.toml",
        "deepseek_v3/671b_h100_1024.toml",
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
        "qwen3_moe/235b_gb200_256.toml",
        "qwen3_moe/30b-a3b.toml",
        "qwen3_moe/30b_h200_8.toml",
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


@pytest.mark.parametrize("name", READY)
def test_a_ready_recipe_changes_how_a_model_is_trained_and_not_which(name: str) -> None:
    """So that its parameters and its loss are those of the published model's TOML."""
    path = ROOT / "train_configs" / name
    ready, published = load_config(path), load_config(path.with_name(READY[name]))
    world = int(path.stem.rpartition("_")[2])
    assert Layout.world_of(ready.parallelism) == world
    load_config(path, world=world)
    how = {"job", "parallelism", "activation_checkpoint", "plan"}
    of_ready, of_published = ready.model_dump(exclude=how), published.model_dump(exclude=how)
    for tree in (of_ready, of_published):
        del tree["training"]["local_batch_size"]
    assert of_ready == of_published
    assert ready.job.name != published.job.name
    assert ready.plan.cluster is not None
    assert (ROOT / ready.plan.cluster).is_file()
