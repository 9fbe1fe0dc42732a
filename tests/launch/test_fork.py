"""`titan-moe fork`: a copy that is its own recipe, and never anything overwritten."""

import shutil
from pathlib import Path

import pytest

from tests.launch.test_cli import titan_moe
from titan_moe.cli.fork import fork
from titan_moe.cli.main import main
from titan_moe.config import load_config
from titan_moe.recipe import load_recipe

ROOT = Path(__file__).parents[2]
FAMILIES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/__init__.py"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a person stands, outside the tree."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_is_a_recipe_of_its_own(family: str, folder: Path) -> None:
    name = f"own_{family}"
    file = fork(f"recipes.{family}", name)
    assert file == Path("train_configs") / name / "debug.toml"
    config = load_config(file)
    assert (config.model.recipe, config.job.name) == (name, f"{name}-debug")
    original = load_config(ROOT / _debug(family))
    same = config.model.model_dump() | {"recipe": original.model.recipe}
    assert same == original.model.model_dump()
    assert config.training == original.training
    recipe = load_recipe(name)
    parts = [type(config.model), recipe.config, recipe.load_model_class()]
    assert {part.__module__.partition(".")[0] for part in parts} == {name}
    old_class = "".join(word.capitalize() for word in family.split("_"))
    for source in (folder / name).rglob("*.py"):
        text = source.read_text("utf-8")
        assert f"recipes.{family}" not in text
        assert f"class {old_class}" not in text
    assert type(config.model).__name__.startswith("Own")
    # What it still is on the other side, and where it comes from, stays true.
    copied, first = recipe.load_hf(), load_recipe(f"recipes.{family}").load_hf()
    assert (copied.architecture, copied.weights) == (first.architecture, first.weights)


def _debug(family: str) -> Path:
    own = Path("train_configs") / family / "debug.toml"
    return own if (ROOT / own).is_file() else Path("train_configs/debug.toml")


def test_a_fork_of_a_fork_beside_it_and_what_it_extends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Source and target out of the tree, in a package of several recipes; `extends` still leads."""
    (folder / "mine").mkdir()
    (folder / "mine/__init__.py").write_text("")
    shutil.copytree(ROOT / "recipes/qwen3_moe", folder / "mine/first")
    (folder / "train_configs/first").mkdir(parents=True)
    shutil.copy(ROOT / "train_configs/qwen3_moe/debug.toml", folder / "train_configs/base.toml")
    (folder / "train_configs/first/debug.toml").write_text(
        'extends = ["../base.toml"]\n[job]\nname = "x"\n[model]\ntop_k = 3\nrecipe = "mine.first"\n'
    )
    assert main(["fork", "mine.first", "mine.second"]) == 0
    config = load_config(folder / "train_configs/second/debug.toml")
    assert (config.model.recipe, config.model.top_k) == ("mine.second", 3)
    said = capsys.readouterr().out
    assert "titan-moe check mine.second" in said
    assert "train_configs/second/debug.toml" in said
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert load_config(fork("mine.first", "third")).model.top_k == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("recipes.qwen3_moo", "mine", "no such module; did you mean recipes.qwen3_moe?"),
        ("recipes.qwen3_moe", "Mine", "expected a module's name in lower case"),
        ("recipes.qwen3_moe", "my-moe", "expected a module's name in lower case"),
        ("recipes.qwen3_moe", "../mine", "expected a module's name in lower case"),
        ("recipes.qwen3_moe", "other.mine", "expected a name beside recipes.qwen3_moe"),
        ("recipes.qwen3_moe", "random", "another module has this name"),
        ("recipes.qwen3_moe", "recipes.mixtral", "already there"),
        ("recipes.qwen3_moe", "here", "already there: here"),
        ("recipes.qwen3_moe", "sized", "already there: train_configs/sized/debug.toml"),
    ],
)
def test_what_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    (folder / "here").mkdir()
    (folder / "train_configs/sized").mkdir(parents=True)
    (folder / "train_configs/sized/debug.toml").write_text("mine")
    assert main(["fork", old, new]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["here", "train_configs"]
    assert (folder / "train_configs/sized/debug.toml").read_text() == "mine"


def test_bad_usage_of_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "recipes.qwen3_moo"]) == 2
    assert main(["check"]) == 2
    assert main(["check", "recipes.qwen3_moe", "--confg=x"]) == 2
    assert main(["check", "recipes.qwen3_moe", "recipes.mixtral", "--config", "x.toml"]) == 2
    assert main(["check", "recipes.qwen3_moe", "--config", "x.toml"]) == 2
    said = capsys.readouterr().err
    for words in ("did you mean", "unknown option", "one recipe alone", "no such file"):
        assert words in said
    shutil.copytree(ROOT / "recipes/qwen3_moe", folder / "unsized")
    assert main(["check", "unsized"]) == 2
    assert "name one by --config" in capsys.readouterr().err


def test_nothing_of_it_needs_torch(folder: Path) -> None:
    """Nor do the help texts of check and generate, or their complaints about usage."""
    done = titan_moe(folder, "fork", "recipes.qwen3_moe", "mine")
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("check", "fork", "generate"):
        assert f"usage: titan-moe {command}" in titan_moe(folder, command, "--help").stdout
    for command in (["check", "mine", "--x"], ["generate", "x"], ["fork", "mine"]):
        done = titan_moe(folder, *command)
        assert done.returncode == 2
        assert "torch was imported" not in done.stderr
