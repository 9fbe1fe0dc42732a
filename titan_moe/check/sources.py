"""House rules of a recipe, read from its source: what it imports, how large it is."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from titan_moe.check.report import WrongError
from titan_moe.check.subject import Subject

RECIPE_LINES = 450
SEEN_BY_RECIPES = {"config", "hf_table", "recipe", "layers"}
ENVIRONMENT = ("environ", "getenv")


def house_rules(subject: Subject) -> str:
    """Torch-free config, no processes in the model, nothing of other recipes."""
    files = sorted(subject.folder.rglob("*.py"))
    for file in files:
        for line, fault in _faults(file, subject.name):
            name = str(file.relative_to(subject.folder))
            raise WrongError(fault, f"{subject.file(name)}:{line}")
    _refuse_torch(subject)
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    over = f": warning, more than {RECIPE_LINES}" if lines > RECIPE_LINES else ""
    return f"no torch in __init__.py and config.py; {lines} lines{over}"


def _refuse_torch(subject: Subject) -> None:
    """In a process of its own: here torch is loaded."""
    script = f"import sys, {subject.name}.config; sys.exit('torch' in sys.modules)"
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stderr:
        raise WrongError(
            f"{subject.name}.config cannot be imported: {done.stderr.strip().splitlines()[-1]}",
            subject.file("config.py"),
        )
    if done.returncode:
        raise WrongError(
            "torch is imported with the config, which makes every command slow to start",
            f"the imports of {subject.file('__init__.py')} and {subject.file('config.py')}",
        )


def _faults(file: Path, recipe: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            yield node.lineno, "reads an environment variable: what differs is a key of the config"
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in names:
                if fault := _misplaced(name, recipe):
                    yield node.lineno, f"imports {name}: {fault}"


def _misplaced(name: str, recipe: str) -> str | None:
    top, *rest = name.split(".")
    family, _, _ = recipe.rpartition(".")
    if name.startswith("torch.distributed"):
        return "a model knows no processes"
    if top == "titan_moe" and rest and rest[0] not in SEEN_BY_RECIPES:
        return f"a recipe may not know titan_moe.{rest[0]}"
    if family and name.startswith(f"{family}.") and not _inside(name, recipe):
        return "another recipe: copy what you need of it"
    return None


def _inside(name: str, recipe: str) -> bool:
    return name == recipe or name.startswith(f"{recipe}.")
