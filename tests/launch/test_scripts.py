"""run_train.sh and run_tests.sh from outside, with a python that only notes what it is asked."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("run_train.sh", "run_tests.sh", "scripts/setup_env.sh", ".ci/run")

# Answers as a Python would whose environment holds nothing; `-m venv` copies it into the new one.
PYTHON = """\
#!/bin/bash
echo "$(basename "$(dirname "$0")"): $*" | head -n 1 >>"$LOG"
case "$*" in
    *version_info*prefix*) echo "$VERSION" ;;
    *"< (3, 11)"*) [ "$VERSION" != 3.10 ] ;;
    -P*) exit "${MISSING:-1}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install"*) sleep "${SLOW:-0}"; exit "${BROKEN:-0}" ;;
    "-m pip --version") [ -x "$0" ] ;;
    *cli.main*) shift 3; for argument in "$@"; do echo "<$argument>"; done ;;
esac
"""


class Checkout:
    """A copy of the scripts in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a check out"
        self.log = folder / "log"
        (self.root / "scripts").mkdir(parents=True)
        for name in (*SCRIPTS[:3], "constraints.txt", "pyproject.toml"):
            (self.root / name).write_bytes((ROOT / name).read_bytes())
            (self.root / name).chmod(0o755)
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name in ("python3", "python"):
            (bin_folder / name).write_text(PYTHON)
            (bin_folder / name).chmod(0o755)
        self.environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "LOG": str(self.log),
            "VERSION": "3.11",
            "HOME": str(folder),
        }
        self.elsewhere = folder

    def start(self, script: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / script), *arguments],
            cwd=self.elsewhere,
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *arguments: str, **more: str) -> tuple[int, str, list[str]]:
        """Exit code, output, and what the pythons were asked to run as modules this time."""
        self.log.write_text("")
        process = self.start(script, *arguments, **more)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output, self.asked()

    def asked(self) -> list[str]:
        lines = [line for line in self.log.read_text().splitlines() if ": -m " in line]
        return [line.replace(f"{self.root}", "ROOT") for line in lines if "--version" not in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


MAKE = "bin: -m venv ROOT/.venv"
INSTALL = "bin: -m pip install -c ROOT/constraints.txt -e ROOT"
TRAIN = "bin: -m titan_moe.cli.main train"


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_bash_and_can_be_run(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK) or script == "scripts/setup_env.sh"


def test_the_first_launch_sets_up_and_later_ones_do_not(checkout: Checkout) -> None:
    code, output, asked = checkout.run("run_train.sh", "my config.toml", "--training.steps=3")
    assert code == 0
    assert output.endswith("\n<my config.toml>\n<--training.steps=3>\n")
    assert asked == [MAKE, INSTALL, f"{TRAIN} my config.toml --training.steps=3"]
    code, output, asked = checkout.run("run_train.sh")
    assert (code, output, asked) == (0, "", [TRAIN])


def test_links_to_the_scripts_work(checkout: Checkout) -> None:
    folder = checkout.elsewhere / "links"
    folder.mkdir()
    for script in SCRIPTS[:2]:
        (checkout.elsewhere / script).symlink_to(checkout.root / script)
        (folder / script).symlink_to(f"../{script}")
        command = [str(folder / script), "x"]
        done = subprocess.run(command, env=checkout.environment, capture_output=True, check=False)
        assert (done.returncode, checkout.asked()[-1].split()[-1]) == (0, "x"), done.stderr


def test_new_pins_or_another_python_install_again(checkout: Checkout) -> None:
    checkout.run("run_train.sh")
    for name in ("constraints.txt", "pyproject.toml"):
        with (checkout.root / name).open("a") as file:
            file.write("# changed\n")
        assert checkout.run("run_train.sh")[2] == [INSTALL, TRAIN]
    assert checkout.run("run_train.sh", VERSION="3.12")[2] == [INSTALL, TRAIN]
    assert checkout.run("run_train.sh", VERSION="3.12")[2] == [TRAIN]


def test_a_broken_installation_leaves_no_stamp(checkout: Checkout) -> None:
    code, output, asked = checkout.run("run_train.sh", BROKEN="1")
    assert (code, asked) == (1, [MAKE, INSTALL])
    assert "did not finish" in output
    assert not list((checkout.root / ".venv").glob("stamp*"))
    assert checkout.run("run_train.sh")[2] == [INSTALL, TRAIN]
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    checkout.run("run_train.sh", BROKEN="1")
    assert not list((checkout.root / ".venv").glob("stamp*"))


def test_an_active_environment_that_has_it_is_used(checkout: Checkout) -> None:
    code, _, asked = checkout.run("run_train.sh", MISSING="0")
    assert (code, asked) == (0, [TRAIN])
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize(
    "cluster",
    [
        {"NNODES": "2"},
        {"SLURM_JOB_ID": "7"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"PBS_JOBID": "7"},
        {"LSB_JOBID": "7"},
    ],
)
def test_on_a_cluster_nothing_is_installed(checkout: Checkout, cluster: dict[str, str]) -> None:
    code, output, asked = checkout.run("run_train.sh", **cluster)
    assert (code, asked) == (1, [])
    assert ".venv/bin/pip install -c constraints.txt -e ." in output
    assert not (checkout.root / ".venv").exists()
    assert checkout.run("run_train.sh", MISSING="0", **cluster)[2] == [TRAIN]
    checkout.run("run_train.sh")
    assert checkout.run("run_train.sh", **cluster)[2] == [TRAIN]


def test_an_old_python_is_refused(checkout: Checkout) -> None:
    newer = checkout.elsewhere / "newer"
    newer.mkdir()
    for name in ("bash", "env", "dirname", "basename", "head", "cat", "cksum", "mkdir", "cp",
                 "mv", "rm", "flock", "sleep"):  # fmt: skip
        (newer / name).symlink_to(f"/usr/bin/{name}")
    path = f"{checkout.elsewhere / 'bin'}:{newer}"
    code, output, asked = checkout.run("run_train.sh", VERSION="3.10", PATH=path)
    assert (code, asked) == (1, [])
    assert "titan-moe needs Python 3.11 or newer" in output
    text = PYTHON.replace('"$VERSION" != 3.10', "1 = 1")
    (newer / "python3.13").write_text(text)
    (newer / "python3.13").chmod(0o755)
    code, _, asked = checkout.run("run_train.sh", VERSION="3.10", PATH=path)
    assert (code, asked[0]) == (0, "newer: -m venv ROOT/.venv")


def test_of_two_first_launches_one_installs(checkout: Checkout) -> None:
    checkout.log.write_text("")
    both = [checkout.start("run_train.sh", SLOW="1") for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert sorted(checkout.asked()) == sorted([MAKE, INSTALL, TRAIN, TRAIN])


def test_all_checks_run_in_order(checkout: Checkout) -> None:
    checks = ["ruff format --check .", "ruff check .", "mypy"]
    expected = [f"bin: -m {check}" for check in checks]
    code, _, asked = checkout.run("run_tests.sh", "-k", "two words")
    assert code == 0
    dev = f"{INSTALL}[dev]"
    assert asked == [MAKE, dev, *expected, "bin: -m pytest -m not nightly -k two words"]
    assert checkout.run("run_tests.sh")[2] == [*expected, "bin: -m pytest -m not nightly"]
    assert checkout.run("run_tests.sh", "--nightly", "-x")[2] == [*expected, "bin: -m pytest -x"]
    assert checkout.run("run_train.sh")[2] == [TRAIN], "tools for tests include all of training"


def test_training_alone_lacks_the_tools_for_tests(checkout: Checkout) -> None:
    checkout.run("run_train.sh")
    assert checkout.run("run_tests.sh")[2][0] == f"{INSTALL}[dev]"


def test_ci_calls_the_same_checks(checkout: Checkout) -> None:
    (checkout.root / ".ci").mkdir()
    (checkout.root / ".ci" / "run").write_bytes((ROOT / ".ci/run").read_bytes())
    (checkout.root / ".ci" / "run").chmod(0o755)
    code, _, asked = checkout.run(".ci/run")
    assert (code, asked[-1]) == (0, "bin: -m pytest -m not nightly")
