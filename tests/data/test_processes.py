"""Loader processes: their errors arrive whole, a stop signal spares them, and none outlives us."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.corpora import make_config, make_documents, source, write_jsonl
from titan_moe.data import build_train_loader

TRAINER = """
import json, multiprocessing, os, signal, sys

def main():
    from tests.data.corpora import make_config, source
    from titan_moe.data import build_train_loader
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    loader = build_train_loader(make_config(source(sys.argv[1]), num_workers=1), 0, 1)
    next(loader)
    children = [child.pid for child in multiprocessing.active_children()]
    os.killpg(0, signal.SIGTERM)
    batches = [next(loader)["tokens"].sum().item() for _ in range(50)]
    print(json.dumps([len(stopped), len(batches), children]), flush=True)
    sys.stdin.readline()
    raise RuntimeError("the run fails")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_stop_signals_and_sudden_death(end: str, tmp_path: Path) -> None:
    """SIGTERM to the whole group: batches go on. However the trainer ends, its processes do too."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    corpus = write_jsonl(tmp_path, make_documents(50))
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(corpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert trainer.stdout is not None
    stopped, batches, children = json.loads(trainer.stdout.readline())
    assert (stopped, batches) == (1, 50)
    assert len(children) == 1
    if end == "killed":
        trainer.send_signal(signal.SIGKILL)
    trainer.communicate("go on\n", timeout=60)
    assert trainer.returncode == (-signal.SIGKILL if end == "killed" else 1)
    deadline = time.monotonic() + 60
    while any(_runs(child) for child in children):
        assert time.monotonic() < deadline, "a loader process outlived its trainer"
        time.sleep(0.2)


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_errors_arrive_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "%s"}\n' % (b"a" * 500) + b'{"body": ""}\n')
    config = make_config(source(path), num_streams=1, global_batch_size=1, num_workers=1)
    loader = build_train_loader(config, 0, 1)
    expected = f"{path}, line 2: no field 'text' (text_field); the fields are 'body'"
    for _ in range(31):
        next(loader)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        next(loader)
    # Everything before the broken line was served: 501 tokens are 31 rows with their labels.
    assert loader.state()["sequences"] == 31


def test_more_processes_than_streams(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(source(write_jsonl(tmp_path, ["a"])), num_streams=2, num_workers=5)
    build_train_loader(config, 0, 2)
    assert "num_workers = 5: this rank has 1 streams, so 1 are started" in caplog.text
