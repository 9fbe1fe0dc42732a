"""The rules of the house: who may import whom, what stays free of torch, how large things may grow.

Imports are read from the source, so that those inside functions and under TYPE_CHECKING count too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_moe.check.sources import RECIPE_LINES, SEEN_BY_RECIPES

ROOT = Path(__file__).parents[1]

# Leftwards only: a room imports rooms of lower rank and itself, none of its own rank.
RANKS = (
    ("config",),
    ("hf_table",),
    ("recipe", "layers", "flops"),
    ("mesh", "world", "stages"),
    ("parallel", "passes", "data", "optim", "checkpoint", "metrics"),
    ("parallelize",),
    ("planner", "hf"),
    ("check", "generate"),
    ("train", "cli"),
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}

FILE_LINES, FUNCTION_LINES = 400, 80
EXCEPTIONS: dict[str, str] = {}  # "path" or "path::function" -> why it may be larger


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no Python files in {folders}"
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file; of `from a import b`, a.b."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def misplaced_import(importer: str, imported: str) -> str | None:
    """What is wrong with module `importer` importing the dotted name `imported`."""
    top, *rest = imported.split(".")
    family = importer.split(".")
    if family[0] == "titan_moe":
        if top == "recipes":
            return "titan_moe loads recipes by name and never imports them"
        if top != "titan_moe" or len(family) == 1 or rest[0] not in RANK:
            return None
        mine, theirs = family[1], rest[0]
        if mine != theirs and RANK[theirs] >= RANK[mine]:
            return f"{mine} may not import {theirs}"
    elif family[0] == "recipes":
        if top == "titan_moe" and rest[:1] and rest[0] not in SEEN_BY_RECIPES:
            return f"a recipe may not import {rest[0]}"
        if top == "recipes" and rest[:1] != family[1:2]:
            return "a recipe may not import another"
    return None


def test_every_room_has_a_rank() -> None:
    modules = [module_of(path).split(".") for path in sources("titan_moe")]
    assert {module[1] for module in modules if len(module) > 1} <= set(RANK)


def test_imports_go_leftwards() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sources("titan_moe", "recipes")
        for line, imported in imports_of(path)
        if (fault := misplaced_import(module_of(path), imported))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("titan_moe.data.build", "titan_moe.config.sections.Data", True),
        ("titan_moe.data.build", "titan_moe.data.loader", True),
        ("titan_moe.data.build", "titan_moe.optim.adamw", False),
        ("titan_moe.config.load", "titan_moe.recipe.Recipe", False),
        ("titan_moe.layers.moe", "titan_moe.recipe", False),
        ("titan_moe.train", "titan_moe.parallelize.parallelize", True),
        ("titan_moe.cli.main", "titan_moe.train.main", False),
        ("titan_moe.cli.main", "titan_moe.__version__", True),
        ("titan_moe.train", "recipes.deepseek_v3", False),
        ("recipes.a.model", "titan_moe.layers.moe.MoE", True),
        ("recipes.a.model", "titan_moe.mesh.Meshes", False),
        ("recipes.a.model", "recipes.a.config", True),
        ("recipes.a.model", "recipes.b.config", False),
    ],
)
def test_the_import_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert (misplaced_import(importer, imported) is None) == allowed


def test_models_know_no_processes() -> None:
    """No rank, mesh, group or environment variable in recipes and layers."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources("recipes", "titan_moe/layers")
        for line, name in imports_of(path)
        if name.startswith("torch.distributed") or name.split(".")[0] == "os"
    ]
    wrong += [
        f"{path.relative_to(ROOT)}:{node.lineno}: distributed"
        for path in sources("recipes", "titan_moe/layers")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("distributed", "environ", "getenv")
    ]
    assert not wrong, "\n".join(wrong)


def test_config_and_recipes_import_no_torch() -> None:
    paths = [
        *sources("titan_moe/config", "titan_moe/cli"),
        ROOT / "titan_moe/recipe.py",
        *[path for path in sources("recipes") if path.name in ("__init__.py", "config.py")],
    ]
    modules = [module_of(path) for path in paths]
    assert "recipes.deepseek_v3.config" in modules
    check = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


def too_large(path: Path) -> Iterator[str]:
    name, text = str(path.relative_to(ROOT)), path.read_text("utf-8")
    lines = len(text.splitlines())
    if lines > FILE_LINES and name not in EXCEPTIONS:
        yield f"{name}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES and f"{name}::{node.name}" not in EXCEPTIONS:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines"


def test_files_and_functions_are_small() -> None:
    wrong = [
        fault
        for path in sources("titan_moe", "recipes", "tests", "benchmarks")
        for fault in too_large(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_recipes_are_small() -> None:
    families = [folder for folder in (ROOT / "recipes").iterdir() if list(folder.glob("*.py"))]
    assert families
    for family in families:
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in family.rglob("*.py"))
        assert lines <= RECIPE_LINES, f"{family.relative_to(ROOT)}: {lines} lines"
