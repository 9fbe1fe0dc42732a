"""`titan-moe import`: a Hugging Face folder becomes a checkpoint, by as many processes as asked."""

from pathlib import Path

import pytest
import torch

from tests.launch.test_cli import titan_moe
from titan_moe.checkpoint.folder import read_train_state
from titan_moe.cli.import_ import main
from titan_moe.config import ConfigError, load_config
from titan_moe.hf.export import export_model
from titan_moe.hf.names import names_of
from titan_moe.hf.values import CheckpointValues
from titan_moe.parallel.initialise import initialise
from titan_moe.recipe import load_recipe

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "train_configs/qwen3_moe/debug.toml"


def test_two_processes_write_the_folders_numbers(tmp_path: Path) -> None:
    cfg = load_config(CONFIG).model
    recipe = load_recipe(cfg.recipe)
    blocks = range(cfg.num_layers)
    model = recipe.load_model_class()(cfg, layers=blocks, has_embedding=True, has_head=True)
    initialise(model, seed=7)  # other values than the config's own seed gives
    export_model(model, recipe, cfg, tmp_path / "theirs")
    arguments = ["import", tmp_path / "theirs", tmp_path / "ours", f"--config={CONFIG}"]
    arguments += ["--parallelism.expert_parallel_degree=2", f"--job.dump_folder={tmp_path}/runs"]

    done = titan_moe(ROOT, *map(str, arguments), NGPU="2")
    assert done.returncode == 0, done.stderr
    assert read_train_state(tmp_path / "ours")["weights_only"]
    stored = CheckpointValues(tmp_path / "ours")
    stored.check(names_of(recipe, cfg))
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored.tensor(name), tensor), name

    done = titan_moe(ROOT, *map(str, arguments), NGPU="2")
    assert done.returncode != 0
    assert "ours: there is something already; name a new or empty folder" in done.stderr


@pytest.mark.parametrize("arguments", [["a", "b"], ["a", "--config=x.toml"], ["--config", "x"]])
def test_what_is_missing_is_told(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected HF_DIR CHECKPOINT --config TOML"):
        main(arguments)
