"""What a user can get wrong, as a launch tells it: which file, key and value, and what to do."""

import json
from pathlib import Path

import pytest

from tests.train.runs import train_here, write_recipe
from titan_moe.check.pool import Pool


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def complaint(pool: Pool, recipe: Path, *overrides: str) -> str:
    """The message of the ValueError that the launch ends with."""
    with pytest.raises(ValueError, match=r"\S") as caught:
        pool.run(1, train_here, recipe, *overrides)
    return str(caught.value)


def test_wrong_keys_types_and_sizes(pool: Pool, recipe: Path) -> None:
    said = complaint(
        pool,
        recipe,
        "--training.stpes=3",
        "--training.seq_len=2.5",
        "--model.num_experts=lots",
    )
    assert "unknown key training.stpes; did you mean training.steps?" in said
    assert "training.seq_len = 2.5" in said
    assert "model.num_experts" in said
    assert "lots" in said


def test_a_sequence_longer_than_the_rotary_limit(pool: Pool, recipe: Path) -> None:
    said = complaint(pool, recipe, "--training.seq_len=65")
    assert "training.seq_len = 65" in said
    assert "64" in said


def test_experts_that_do_not_divide(pool: Pool, recipe: Path) -> None:
    said = complaint(pool, recipe, "--model.num_experts=6")
    assert "num_experts = 6 is not divisible by num_expert_groups = 4" in said


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere"])
def test_a_path_that_is_not_there(pool: Pool, recipe: Path, name: str) -> None:
    assert name in complaint(pool, recipe, f"--data.sources.0.path={name}")


def test_a_data_set_without_a_document(pool: Pool, recipe: Path) -> None:
    empty = recipe.parent / "empty.jsonl"
    empty.touch()
    assert str(empty) in complaint(pool, recipe, f"--data.sources.0.path={empty}")


def test_documents_without_the_text_field(pool: Pool, recipe: Path) -> None:
    data = recipe.parent / "other.jsonl"
    data.write_text("".join(json.dumps({"body": "words"}) + "\n" for _ in range(50)))
    said = complaint(pool, recipe, f"--data.sources.0.path={data}")
    assert str(data) in said
    assert "'text'" in said or '"text"' in said
    assert "body" in said


def test_checkpoints_that_are_not_there(pool: Pool, recipe: Path) -> None:
    said = complaint(pool, recipe, "--checkpoint.load_step=12")
    assert "checkpoint.load_step = 12" in said
    nowhere = recipe.parent / "nowhere"
    assert str(nowhere) in complaint(
        pool, recipe, "--job.name=other", f"--checkpoint.initial_load_path={nowhere}"
    )


def test_the_folder_of_another_models_run(pool: Pool, recipe: Path) -> None:
    pool.run(1, train_here, recipe)
    metrics = recipe.parent / "runs/run/metrics.jsonl"
    before = metrics.read_bytes()
    said = complaint(pool, recipe, "--model.moe_intermediate_size=24")
    assert "model.moe_intermediate_size: 16 there, 24 here" in said
    assert str(recipe.parent / "runs/run") in said
    assert metrics.read_bytes() == before
