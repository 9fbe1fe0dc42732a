"""A copied recipe is a recipe of its own: it runs its own parts, not those it was copied from."""

import shutil
from pathlib import Path

import pytest

from titan_moe.config import load_config
from titan_moe.recipe import load_recipe

ROOT = Path(__file__).parents[2]
FAMILIES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/__init__.py"))
EMBEDDED_DEFAULT = "deepseek_v3"  # whose debug.toml is everybody's


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_runs_its_own_parts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = f"copy_of_{family}"
    shutil.copytree(ROOT / "recipes" / family, tmp_path / copy)
    monkeypatch.syspath_prepend(tmp_path)
    folder = "." if family == EMBEDDED_DEFAULT else family
    toml = ROOT / "train_configs" / folder / "debug.toml"
    config = load_config(toml, [f"--model.recipe={copy}"])
    recipe = load_recipe(copy)
    parts = [type(config.model), recipe.config, recipe.load_model_class()]
    assert {part.__module__.partition(".")[0] for part in parts} == {copy}
    assert recipe.hf is not None
    for part in (recipe.model, recipe.sharding, recipe.hf):
        assert part.startswith(f"{copy}.")
    assert recipe.load_hf().weights == load_recipe(f"recipes.{family}").load_hf().weights
    text = "".join(path.read_text() for path in (tmp_path / copy).glob("*.py"))
    assert f"recipes.{family}" not in text
