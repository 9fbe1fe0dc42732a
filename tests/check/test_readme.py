"""Every command and every change of recipes/README.md, done in a copy of the tree."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "recipes" / "README.md"
WITHOUT_TABLE = 3  # exit code of a check that is right but in part

TITAN_MOE = [sys.executable, "-P", "-m", "titan_moe.cli.main"]


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fence, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def apply(diff: str, folder: Path) -> int:
    """Put the + lines in the place of the - lines; returns how many lines a person touches."""
    touched = 0
    for name, lines in re.findall(r"^--- (\S+)\n((?:[ +-].*\n)+?)(?=--- |\Z)", diff, re.MULTILINE):
        before = "".join(line[1:] + "\n" for line in lines.splitlines() if line[0] != "+")
        after = "".join(line[1:] + "\n" for line in lines.splitlines() if line[0] != "-")
        path = folder / name
        text = path.read_text("utf-8")
        assert text.count(before) == 1, f"{name} has not, or not once:\n{before}"
        path.write_text(text.replace(before, after), encoding="utf-8")
        added, removed = ([line[0] for line in lines.splitlines()].count(sign) for sign in "+-")
        touched += max(added, removed)
    return touched


def run(command: str, folder: Path) -> tuple[int, str]:
    words = shlex.split(command)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words[0] == "titan-moe", command
    done = subprocess.run(
        [*TITAN_MOE, *words[1:]],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Of the repository what the page speaks of."""
    for part in ("recipes/__init__.py", "train_configs/debug.toml"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / part, tmp_path / part)
    for part in ("recipes/qwen3_moe", "train_configs/qwen3_moe"):
        shutil.copytree(ROOT / part, tmp_path / part)
    return tmp_path


def test_the_page_works_from_top_to_bottom(tree: Path) -> None:
    """The untouched copy passes its check, the edited one all that can be checked of it."""
    text = README.read_text("utf-8")
    touched, codes = 0, []
    for language, content in blocks(text):
        if language == "diff":
            touched += apply(content, tree)
            continue
        for command in content.splitlines():
            code, said = run(command, tree)
            codes.append((command.split(" check ")[-1], code))
            right = WITHOUT_TABLE if " check " in command and touched else 0
            assert code == right, said
            if " check " in command:
                assert str(tree) not in said.splitlines()[0]
                assert said.count("\n  ok ") == (9 if right == 0 else 6), said
    assert f"in **{touched} lines**" in text
    assert [code for command, code in codes if command == "recipes.my_moe"] == [0, WITHOUT_TABLE]
