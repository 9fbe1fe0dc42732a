"""The torchrun command line, read back by torchrun's own parser."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from titan_moe.cli import train
from titan_moe.cli.launch import (
    count_gpus,
    launch_environment,
    nodes_of,
    processes_of,
    refuse_what_needs_gpus,
    torchrun_argv,
)
from titan_moe.config import ConfigError, RunConfig, load_config

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "train_configs/debug.toml")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    return load_config(DEBUG, ["--comm.shutdown_timeout_seconds=77", "--job.dump_folder=out put"])


def parsed(argv: Sequence[str]) -> Any:
    assert argv[:3] == [sys.executable, "-m", "torch.distributed.run"]
    return get_args_parser().parse_args(argv[3:])


def run(config: RunConfig, processes: int = 2, **environment: str) -> Any:
    arguments = ["a b.toml", "--training.steps=3", "--job.name", "x"]
    return parsed(torchrun_argv(config, arguments, environment, processes, sys.executable))


def told(config: RunConfig, processes: int = 2, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(config, processes, **environment)
    return str(caught.value)


def test_one_node(config: RunConfig) -> None:
    args = run(config, 4)
    assert (args.standalone, args.nnodes, args.nproc_per_node) == (True, "1", "4")
    assert (args.max_restarts, args.shutdown_timeout) == (0, 77)
    assert (args.module, args.training_script) == (True, "titan_moe.train")
    assert args.training_script_args == ["a b.toml", "--training.steps=3", "--job.name", "x"]
    assert args.log_dir == "out put/debug/logs"
    assert run(config, MAX_RESTARTS="3").max_restarts == 3


def test_ranks_that_do_not_log_write_to_files(config: RunConfig) -> None:
    assert run(config, 4).redirects == "1:3,2:3,3:3"
    assert run(config, 4, LOG_RANK="1,3").redirects == "0:3,2:3"
    assert run(config, 1).redirects == "0"  # torchrun's default: nothing is redirected
    assert run(config, 4).local_ranks_filter == ""  # would send tracebacks to /dev/null
    wanted = "expected local ranks from 0 to 1, as in 0,1"
    assert run(config, 4, LOG_RANK="").redirects == "1:3,2:3,3:3"
    for text in ("2", "x", "0,", "-1", "9" * 5000):
        assert told(config, LOG_RANK=text) == f"environment: LOG_RANK = {text}: {wanted}"


def test_several_nodes_meet_at_an_endpoint(config: RunConfig) -> None:
    args = run(config, 8, NNODES="4", RDZV_ENDPOINT="host:1234")
    assert (args.nnodes, args.rdzv_backend, args.rdzv_endpoint) == ("4", "c10d", "host:1234")
    assert args.rdzv_id == "debug"
    assert not args.standalone
    assert run(config, NNODES="2", RDZV_ENDPOINT="h:1", RDZV_ID="run7").rdzv_id == "run7"


def test_several_nodes_with_a_master(config: RunConfig) -> None:
    args = run(config, 8, NNODES="2", MASTER_ADDR="10.0.0.1", NODE_RANK="1")
    assert (args.nnodes, args.rdzv_backend, args.node_rank) == ("2", "static", 1)
    assert (args.master_addr, args.master_port) == ("10.0.0.1", 29500)
    args = run(config, NNODES="2", MASTER_ADDR="m", NODE_RANK="0", MASTER_PORT="7")
    assert args.master_port == 7
    args = run(config, NNODES="2", MASTER_ADDR="m", NODE_RANK="0", MASTER_PORT="", MAX_RESTARTS="")
    assert (args.master_port, args.max_restarts) == (29500, 0)


def test_several_nodes_need_a_way_to_meet(config: RunConfig) -> None:
    ways = "the nodes must find each other; set RDZV_ENDPOINT=host:port, or MASTER_ADDR and"
    said = f"environment: NNODES = 2: {ways} NODE_RANK"
    assert told(config, NNODES="2") == said
    assert told(config, NNODES="2", MASTER_ADDR="m") == said
    assert told(config, NNODES="2", MASTER_ADDR="m", NODE_RANK="") == said
    said = told(config, NNODES="2", MASTER_ADDR="m", NODE_RANK="2")
    assert said == "environment: NODE_RANK = 2: not below NNODES = 2"


def test_processes(tmp_path: Path) -> None:
    assert processes_of({"NGPU": "3", "CUDA_VISIBLE_DEVICES": "0"}) == 3
    assert processes_of({"CUDA_VISIBLE_DEVICES": "0,2,5"}) == 3
    assert processes_of({"CUDA_VISIBLE_DEVICES": ""}) == 2
    assert processes_of({"NGPU": "", "CUDA_VISIBLE_DEVICES": "0,2,5"}) == 3
    for text in ("0", "two", "-1", "²", "9" * 5000):
        with pytest.raises(ConfigError) as caught:
            processes_of({"NGPU": text})
        assert str(caught.value) == f"environment: NGPU = {text}: expected integer >= 1"
    assert nodes_of({}) == nodes_of({"NNODES": ""}) == 1
    with pytest.raises(ConfigError, match="NNODES = 1:4: expected integer >= 1"):
        nodes_of({"NNODES": "1:4"})


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    assert count_gpus({"PATH": ""}, devices=tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({"PATH": ""}, devices=tmp_path) == 3


def test_gpus_are_asked_of_nvidia_smi_where_there_are_no_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "GPU 0: A (UUID: x)"; echo "GPU 1: A (UUID: y)"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "dev").mkdir()
    assert count_gpus({"PATH": str(tmp_path)}, devices=tmp_path / "dev") == 2


def test_cores_are_shared_out() -> None:
    assert launch_environment({}, processes=2, cores=8) == {"OMP_NUM_THREADS": "4"}
    assert launch_environment({}, processes=8, cores=2) == {"OMP_NUM_THREADS": "1"}
    assert launch_environment({"OMP_NUM_THREADS": "3"}, processes=2, cores=8) == {}
    shared = launch_environment({"OMP_NUM_THREADS": ""}, processes=2, cores=8)
    assert shared == {"OMP_NUM_THREADS": "4"}


def test_train_becomes_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []

    class BecameError(Exception):
        """Stands for the process that is no more."""

    def exec_in_place(file: str, argv: list[str], environment: dict[str, str]) -> None:
        became.extend((file, argv, environment))
        raise BecameError

    monkeypatch.setattr(os, "execvpe", exec_in_place)
    monkeypatch.chdir(ROOT)
    for name in ("CONFIG_FILE", "NNODES", "OMP_NUM_THREADS", "LOG_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NGPU", "1")
    with pytest.raises(BecameError):
        train.main(["--training.steps=400"])
    file, argv, environment = became
    assert file == sys.executable
    args = parsed(argv)
    assert args.training_script_args == ["train_configs/debug.toml", "--training.steps=400"]
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert environment["PATH"] == os.environ["PATH"]


def test_train_checks_for_the_processes_that_it_would_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NGPU", "5")
    monkeypatch.setenv("NNODES", "3")
    with pytest.raises(ConfigError, match="not a multiple of 15 data-parallel ranks"):
        train.main([DEBUG])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "--training.attention_backend=flex",
            'training.attention_backend = "flex": needs an NVIDIA GPU, and none is visible here; '
            'use "auto"',
        ),
        (
            "--profiling.enable_memory_snapshot=true",
            "profiling.enable_memory_snapshot = true: needs an NVIDIA GPU, and none is visible "
            "here; use false",
        ),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("torchrun was started"))
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("NNODES", raising=False)
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        train.main([DEBUG, override])
    assert str(caught.value) == f"{DEBUG}: {said}"
    refuse_what_needs_gpus(DEBUG, load_config(DEBUG, [override]), gpus=1)
