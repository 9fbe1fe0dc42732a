"""`titan-moe fork recipes.OLD recipes.NEW`: a recipe under a new name, ready to edit."""

import os.path
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_moe.cli.check import debug_config_of, package_folder
from titan_moe.config.errors import ConfigError
from titan_moe.config.recipe_config import model_config_of

HELP = """\
usage: titan-moe fork OLD NEW

Copy the recipe OLD, a dotted name as in recipes.qwen3_moe, under the name NEW: the folder, classes
that bear its name, and its debugging sizes as train_configs/NEW/debug.toml. NEW lies beside OLD if
it begins as OLD does (recipes.NEW), and else in the current folder (a name without dots). Nothing
that exists is touched.

exit code: 0, or 2 where a name is wrong, OLD is not there or NEW is.
"""


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return 0
    if len(arguments) != 2:
        raise ConfigError(
            ["command line: expected two names, as in: titan-moe fork recipes.a recipes.b"]
        )
    old, new = arguments
    config = fork(old, new)
    print(
        f"{new} is a copy of {old}, of its own from now on: edit its files and {config}, then\n"
        f"  titan-moe check {new}\n"
        f"  titan-moe train {config}"
    )
    return 0


def fork(old: str, new: str) -> Path:
    """Copy recipe and TOML; returns the TOML's path.

    Raises ConfigError: a bad name, no recipe `old`, no debugging sizes for it, or
    something that is there already under the new name.
    """
    try:
        model_config_of(old)
    except ValueError as error:
        raise ConfigError([f"command line: {old}: {error}"]) from error
    source = package_folder(old)
    old_config = debug_config_of(old, source)
    target, root = _place_of(new, old, source)
    config = root / "train_configs" / target.name / "debug.toml"
    if there := [str(path) for path in (target, config) if path.exists()]:
        raise ConfigError([f"command line: {new}: already there: {', '.join(there)}"])
    text = _renamed_config(old_config.read_text("utf-8"), new, old_config, config)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    codes = {file: file.read_text("utf-8") for file in target.rglob("*.py")}
    classes = {name for code in codes.values() for name in re.findall(r"^class (\w+)", code, re.M)}
    for file, code in codes.items():
        file.write_text(_renamed(code, old, new, classes), encoding="utf-8")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text, encoding="utf-8")
    return _shown(config)


def _place_of(new: str, old: str, source: Path) -> tuple[Path, Path]:
    """The new recipe's folder, and that which holds train_configs."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*", new):
        raise ConfigError(
            [f"command line: {new}: expected a module's name in lower case, as in recipes.my_moe"]
        )
    parent, _, name = new.rpartition(".")
    if not parent:
        if name in sys.stdlib_module_names or name in sys.modules:
            raise ConfigError([f"command line: {new}: another module has this name"])
        return Path(name), Path()
    if parent != old.rpartition(".")[0]:
        raise ConfigError(
            [
                f"command line: {new}: expected a name beside {old}, or one without dots, which "
                "is made in the current folder"
            ]
        )
    root = source.parents[old.count(".")]
    if "site-packages" in root.parts:
        raise ConfigError(
            [
                f"command line: {new}: {source.parent} belongs to an installed package; give a "
                f"name without dots, as in {name}, to have it in the current folder"
            ]
        )
    return source.with_name(name), root


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _renamed(text: str, old: str, new: str, classes: set[str]) -> str:
    """Dotted names of the family's modules, and its own classes that are named after it; what is
    said of the family it comes from stays as true as it was."""
    text = re.sub(rf"\b{re.escape(old)}\b", new, text)
    old_class, new_class = (_camel(name.rpartition(".")[2]) for name in (old, new))
    for name in classes:
        if name.startswith(old_class):
            text = re.sub(rf"\b{name}\b", new_class + name.removeprefix(old_class), text)
    return text


def _renamed_config(text: str, new: str, old_file: Path, new_file: Path) -> str:
    """Recipe and job by the new name; what it extends as seen from the new place."""
    family = new.rpartition(".")[2]
    for table, key, value in (("model", "recipe", new), ("job", "name", f"{family}-debug")):
        pattern = rf"(^\[{table}\]\n(?:(?!\[).*\n)*?{key}\s*=\s*)\"[^\"]*\""
        text, count = re.subn(pattern, rf'\g<1>"{value}"', text, count=1, flags=re.MULTILINE)
        if not count:
            raise ConfigError([f'{old_file}: no line `{key} = "..."` below [{table}] to rename'])

    def seen_from_here(match: re.Match[str]) -> str:
        place = os.path.relpath(old_file.parent / match[1], new_file.parent)
        return f'"{Path(place).as_posix()}"'

    return re.sub(
        r"^extends\s*=.*(?:\n(?!\[[a-z]).*\])?",
        lambda line: re.sub(r'"([^"]*)"', seen_from_here, line[0]),
        text,
        flags=re.MULTILINE,
    )


def _shown(path: Path) -> Path:
    absolute = path.resolve()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
