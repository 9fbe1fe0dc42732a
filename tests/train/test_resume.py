"""Killed, or told to stop, at any step: the run goes on as if nothing had happened, bit for bit."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import (
    assert_same,
    family,
    finish,
    kill,
    lines_of,
    start,
    stop_here,
    train_here,
    wait_for_step,
    write_recipe,
)
from titan_moe.check.pool import Pool

STEPS = 40
LONG = f"--training.steps={STEPS}"

KILLS = {
    "one process": (1, 7, []),
    "one process, two loader workers, asynchronous saves": (
        1,
        18,
        ["--training.dataloader.num_workers=2", "--checkpoint.async_mode=async"],
    ),
    "two processes, two loader workers": (
        2,
        10,
        ["--training.dataloader.num_workers=2"],
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """A recipe whose unbroken runs, on one process and on two, are there already."""
    recipe = write_recipe(tmp_path_factory.mktemp("resume"))
    pool.run(1, train_here, recipe, LONG, "--job.name=unbroken-1")
    pool.run(2, train_here, recipe, LONG, "--job.name=unbroken-2")
    return recipe


@pytest.mark.parametrize("case", KILLS)
def test_a_killed_run_goes_on_bit_for_bit(recipe: Path, case: str) -> None:
    processes, step, options = KILLS[case]
    runs = recipe.parent / "runs"
    run = runs / f"killed-{step}"
    overrides = [LONG, f"--job.name={run.name}", *options]

    victim = start(recipe, *overrides, processes=processes)
    wait_for_step(victim, run / "metrics.jsonl", step)
    kill(victim)
    finish(victim)
    before = lines_of(run / "metrics.jsonl")
    assert step <= before[-1]["step"] < STEPS

    code, output = finish(start(recipe, *overrides, processes=processes))
    assert code == 0, output
    resumed = re.findall(r"resuming after step (\d+), from (\S+)", output)
    assert [Path(folder) for _, folder in resumed] == [
        run / f"checkpoint/step-{number}" for number, _ in resumed
    ]
    assert resumed
    after = lines_of(run / "metrics.jsonl")
    unbroken = runs / f"unbroken-{processes}"
    assert_same(after, lines_of(unbroken / "metrics.jsonl"))
    assert {record["attempt"] for record in after} == {1, 2}
    assert lines_of(run / "validation.jsonl") == lines_of(unbroken / "validation.jsonl")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_exits_with_0(recipe: Path, number: signal.Signals) -> None:
    runs = recipe.parent / "runs"
    run = runs / f"stopped-by-{number.name}"
    overrides = [LONG, f"--job.name={run.name}", "--checkpoint.interval=1000"]

    process = start(recipe, *overrides)
    wait_for_step(process, run / "metrics.jsonl", 1)  # soon: on a busy machine signals are late
    process.send_signal(number)
    process.send_signal(number)  # in a hurry: no harm
    code, output = finish(process)
    assert code == 0, output
    stopped_at = lines_of(run / "metrics.jsonl")[-1]["step"]
    assert stopped_at < STEPS
    assert f"stopped by {number.name} after step {stopped_at}" in output
    assert (run / "checkpoint" / f"step-{stopped_at}" / "COMMITTED").is_file()

    code, output = finish(start(recipe, *overrides))
    assert code == 0, output
    assert_same(lines_of(run / "metrics.jsonl"), lines_of(runs / "unbroken-1" / "metrics.jsonl"))


def test_one_signalled_process_stops_all(recipe: Path) -> None:
    """A signal reaches torchrun, which passes it on; it says 1 itself, whatever they did."""
    run = recipe.parent / "runs" / "stopped-pair"
    overrides = [LONG, f"--job.name={run.name}"]
    torchrun = start(recipe, *overrides, processes=2)
    wait_for_step(torchrun, run / "metrics.jsonl", 5)
    torchrun.terminate()
    code, output = finish(torchrun)
    assert code == 1
    stopped_at = lines_of(run / "metrics.jsonl")[-1]["step"]
    assert stopped_at < STEPS
    assert (run / "checkpoint" / f"step-{stopped_at}" / "COMMITTED").is_file(), output


def test_processes_whose_launcher_is_gone_save_and_end(recipe: Path) -> None:
    run = recipe.parent / "runs" / "orphans"
    torchrun = start(
        recipe,
        "--training.steps=4000",
        "--lr_scheduler.total_steps=4000",
        f"--job.name={run.name}",
        processes=2,
    )
    wait_for_step(torchrun, run / "metrics.jsonl", 5)
    orphans = family(torchrun)[1:]
    os.kill(torchrun.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while any(Path(f"/proc/{pid}").exists() for pid in orphans):
        assert time.monotonic() < deadline, "still training, though nobody could stop them"
        time.sleep(0.1)
    finish(torchrun)
    stopped_at = lines_of(run / "metrics.jsonl")[-1]["step"]
    assert (run / "checkpoint" / f"step-{stopped_at}" / "COMMITTED").is_file()
    assert "the launcher's end" in (run / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize("step", [8, STEPS])
def test_a_validation_that_a_stop_cut_off_is_made_up_for(
    recipe: Path, pool: Pool, step: int
) -> None:
    runs = recipe.parent / "runs"
    name = f"--job.name=cut-off-{step}"
    pool.run(2, stop_here, recipe, step, LONG, name)
    before = lines_of(runs / f"cut-off-{step}/validation.jsonl")
    assert step not in [record["step"] for record in before]
    pool.run(2, train_here, recipe, LONG, name)
    pool.run(2, train_here, recipe, LONG, name)  # complete: nothing is said twice
    for file in ("validation.jsonl", "metrics.jsonl"):
        got, expected = (lines_of(runs / run / file) for run in (f"cut-off-{step}", "unbroken-2"))
        assert_same(got, expected)


def test_going_back_begins_a_branch_that_later_launches_follow(recipe: Path, pool: Pool) -> None:
    run = recipe.parent / "runs" / "branch"
    keep = ["--job.name=branch", "--checkpoint.keep_latest_k=0"]
    pool.run(1, train_here, recipe, "--training.steps=20", *keep)
    old = lines_of(run / "metrics.jsonl")
    again = ["--optimizer.lr=1e-2", *keep]
    pool.run(1, train_here, recipe, "--training.steps=14", "--checkpoint.load_step=8", *again)
    pool.run(1, train_here, recipe, "--training.steps=24", *again)
    records = lines_of(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 25))
    assert [record["attempt"] for record in records] == [1] * 8 + [2] * 6 + [3] * 10
    assert records[8]["lr"] != old[8]["lr"]
    assert (run / "checkpoint" / "step-20.abandoned" / "COMMITTED").is_file()


def test_under_nohup_a_closed_terminal_is_no_reason_to_stop() -> None:
    run_python(
        "import signal",
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        "from titan_moe.world import StopSignal",
        "stop = StopSignal()",
        "signal.raise_signal(signal.SIGHUP)",
        "assert stop.reason is None",
        "signal.raise_signal(signal.SIGTERM)",
        "assert stop.reason == 'SIGTERM'",
    )


def run_python(*lines: str) -> None:
    """Signal handlers are a process's own, so these need one."""
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
