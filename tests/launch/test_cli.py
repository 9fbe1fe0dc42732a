"""The command line as a person meets it: in a process of its own, that never imports torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from tests.config.conftest import RECIPE, TINY

# What the console script does, and then a look at what it took.
COMMAND = """
import sys
from titan_moe.cli.main import main
code = main(sys.argv[1:])
assert 'torch' not in sys.modules, 'torch was imported'
sys.exit(code)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a person stands who wrote a recipe package of their own, and installed nothing."""
    (tmp_path / "tiny_recipe").mkdir()
    (tmp_path / "tiny_recipe" / "__init__.py").write_text(RECIPE)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "notes.jsonl").write_text('{"text": "a note"}\n')
    return tmp_path


def titan_moe(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("CONFIG_FILE", "NGPU", "NNODES")}
    # -P: the current folder is not on the path, as it is not for a console script.
    return subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, *arguments],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_right_config(folder: Path) -> None:
    done = titan_moe(folder, "validate", "tiny.toml", "--world=4", "--training.steps=50")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "tiny.toml: valid on 4 processes\n"
        "layout: pp 1 × dp_replicate 1 × dp_shard 4 × cp 1 × tp 1; experts: efsdp 4 × ep 1\n",
        "",
    )
    done = titan_moe(folder, "validate", "tiny.toml", "--world=1", "--parallelism.scale_up_size=8")
    assert done.stdout.splitlines() == [
        "tiny.toml: valid on 1 process",
        "layout: pp 1 × dp_replicate 1 × dp_shard 1 × cp 1 × tp 1; experts: efsdp 1 × ep 1",
        "topology: domains of 8 ranks; inside: none; across: none",
    ]
    done = titan_moe(folder, "validate", CONFIG_FILE="tiny.toml")
    assert (done.returncode, done.stdout) == (0, "tiny.toml: valid\n")


def test_a_wrong_config(folder: Path) -> None:
    done = titan_moe(folder, "validate", "tiny.toml", "--training.stpes=50")
    said = "command line: unknown key training.stpes; did you mean training.steps?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_train_refuses_before_torch(folder: Path) -> None:
    done = titan_moe(folder, "train", "tiny.toml", "--model.num_groups=3", NGPU="2")
    said = "command line: [model] num_groups = 3 does not divide 4\n"
    assert (done.returncode, done.stderr) == (2, said)
    done = titan_moe(folder, "train", "tiny.toml", "--data.tokenizer=x.json", NGPU="2")
    assert "no such file" in done.stderr
    done = titan_moe(folder, "train", "tiny.toml", NGPU="two")
    said = "environment: NGPU = two: expected integer >= 1\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_train_refuses_a_folder_that_cannot_be_before_torchrun(folder: Path) -> None:
    done = titan_moe(folder, "train", "tiny.toml", "--job.dump_folder=notes.jsonl", NGPU="2")
    key = 'command line: job.dump_folder = "notes.jsonl"'
    said = f"{key}: notes.jsonl is not a folder (the run makes its own folder below it)\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_elsewhere_nothing_is_looked_for_on_this_disk(folder: Path) -> None:
    there = ["validate", "tiny.toml", "--data.tokenizer=./none/tokenizer.json", "--world=2"]
    there += ["--data.bos_token=<s>"]
    done = titan_moe(folder, *there)
    assert done.returncode == 2
    assert "no such file" in done.stderr
    done = titan_moe(folder, *there, "--elsewhere")
    assert (done.returncode, done.stderr) == (0, "")
    assert "layout: pp 1" in done.stdout


def test_world(folder: Path) -> None:
    done = titan_moe(folder, "validate", "--world", "3", CONFIG_FILE="tiny.toml")
    assert done.returncode == 2
    assert "not a multiple of 3 data-parallel ranks" in done.stderr
    done = titan_moe(folder, "validate", "tiny.toml", "--world", "0")
    assert done.stderr == "command line: --world = 0: expected integer > 0\n"
    done = titan_moe(folder, "validate", "tiny.toml", "--world", "9" * 5000)
    assert done.stderr == f"command line: --world = {'9' * 5000}: expected integer > 0\n"


def test_help_lists_the_keys_of_the_recipe_too(folder: Path) -> None:
    done = titan_moe(folder, "train", "--help", "tiny.toml")
    assert done.returncode == 0
    assert "num_groups" in done.stdout
    assert "[training.dataloader]" in done.stdout
    assert "MASTER_ADDR" in done.stdout
    assert "The step lines come from rank 0" in " ".join(done.stdout.split())
    for arguments in ([], ["help"], ["--help"]):
        assert "usage: titan-moe COMMAND" in titan_moe(folder, *arguments).stdout
    for command in ("validate", "schema"):
        assert f"usage: titan-moe {command}" in titan_moe(folder, command, "--help").stdout


def test_the_default_config_is_found_from_anywhere(folder: Path) -> None:
    done = titan_moe(folder, "validate")
    assert done.stdout == f"{Path(__file__).parents[2] / 'train_configs/debug.toml'}: valid\n"


def test_schema(folder: Path) -> None:
    done = titan_moe(folder, "schema", "tiny.toml")
    schema = json.loads(done.stdout)
    assert set(tomli.loads(TINY)) <= set(schema["properties"])


def test_version_and_mistakes(folder: Path) -> None:
    assert titan_moe(folder, "--version").stdout.startswith("titan-moe 0.")
    done = titan_moe(folder, "trian")
    assert (done.returncode, done.stderr) == (
        2,
        "titan-moe: unknown command trian; did you mean train?\n",
    )


def test_an_old_torch_free_promise_can_break(folder: Path) -> None:
    """The look at sys.modules sees torch: a recipe that imports it is caught."""
    package = folder / "tiny_recipe" / "__init__.py"
    package.write_text("import torch\n" + RECIPE)
    done = titan_moe(folder, "validate", "tiny.toml")
    assert "torch was imported" in done.stderr
