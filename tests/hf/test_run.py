"""A run that leaves a Hugging Face folder, and runs that start from one."""

import json
from pathlib import Path

import pytest
import torch

from tests.train.runs import lines_of, train_here, write_recipe
from titan_moe.check.pool import Pool
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.config import load_config
from titan_moe.hf.importing import save_weights
from titan_moe.parallel.initialise import initialise
from titan_moe.recipe import load_recipe


def metrics(recipe: Path, name: str) -> list[float]:
    return [line["loss"] for line in lines_of(recipe.parent / "runs" / name / "metrics.jsonl")]


def test_from_the_end_of_a_run_to_the_start_of_others(pool: Pool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    ending = [
        "--job.name=first",
        "--training.steps=2",
        "--lr_scheduler.total_steps=20",
        "--checkpoint.last_save_in_hf=true",
        "--checkpoint.export_dtype=float32",
        "--parallelism.expert_parallel_degree=2",
    ]
    pool.run(2, train_here, recipe, *ending)
    folder = tmp_path / "runs/first/hf/step-2"
    assert (folder / "tokenizer.json").is_file()
    config = load_config(recipe).model
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == config.hidden_size
    pool.run(2, train_here, recipe, *ending)  # relaunched: nothing left to do, and nothing wrong

    # Weights alone, through our own format and through theirs, are the same weights.
    starting = ["--training.steps=1", "--lr_scheduler.total_steps=20"]
    ours = f"--checkpoint.initial_load_path={tmp_path / 'runs/first/checkpoint/step-2'}"
    theirs = f"--checkpoint.initial_load_path={folder}"
    in_hf = "--checkpoint.initial_load_in_hf=true"
    pool.run(1, train_here, recipe, "--job.name=ours", *starting, ours)
    pool.run(1, train_here, recipe, "--job.name=theirs", *starting, theirs, in_hf)
    assert metrics(recipe, "theirs") == metrics(recipe, "ours")
    pool.run(1, train_here, recipe, "--job.name=fresh", *starting)
    assert metrics(recipe, "fresh") != metrics(recipe, "ours")


def weights(recipe: Path, target: Path) -> None:
    """Save a model's weights as an import does, and try to resume from them."""
    config = load_config(recipe)
    model_class = load_recipe(config.model.recipe).load_model_class()
    blocks = range(config.model.num_layers)
    model = model_class(config.model, layers=blocks, has_embedding=True, has_head=True)
    initialise(model, 0)
    save_weights([model], target, config)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="step-0: holds weights alone, from which no run resumes"):
        Checkpointer(target.parent, config.checkpoint, [model], optimizer).load()


def test_weights_alone_are_no_state_to_resume_from(pool: Pool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    target = tmp_path / "weights/step-0"
    pool.run(1, weights, recipe, target)
    start = [f"--checkpoint.initial_load_path={target}", "--training.steps=1"]
    pool.run(1, train_here, recipe, "--lr_scheduler.total_steps=20", *start)
