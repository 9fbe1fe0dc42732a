"""From environment variables to torchrun's command line."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.config.keys import number_in
from titan_moe.config.sections import RunConfig

Environment = Mapping[str, str]

PROCESSES_WITHOUT_GPUS = 2
DEFAULT_MASTER_PORT = "29500"
STDOUT_AND_STDERR = 3


def processes_of(environment: Environment) -> int:
    """Processes on this node: $NGPU, else one for each GPU, else two.

    Here as in all that follows, a variable that is empty counts as unset.

    Raises ConfigError: $NGPU is no positive integer.
    """
    if environment.get("NGPU"):
        return _integer(environment, "NGPU", least=1)
    return count_gpus(environment) or PROCESSES_WITHOUT_GPUS


def nodes_of(environment: Environment) -> int:
    """Nodes of the run. Raises ConfigError: $NNODES is no positive integer."""
    return _integer(environment, "NNODES", least=1, default=1)


def count_gpus(environment: Environment, devices: Path = Path("/dev")) -> int:
    """GPUs that a process may use, counted without torch."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return len([name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name])
    nodes = [entry for entry in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)]
    if nodes or not shutil.which("nvidia-smi", path=environment.get("PATH")):
        return len(nodes)
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return len(re.findall(r"^GPU \d+:", answer.stdout, re.MULTILINE))


def refuse_what_needs_gpus(path: str | Path, config: RunConfig, gpus: int) -> None:
    """Raises ConfigError: the config in `path` asks for what this machine's `gpus` cannot do."""
    wrong = []
    if config.training.attention_backend == "flex":
        wrong.append(('training.attention_backend = "flex"', '"auto"'))
    if config.profiling.enable_memory_snapshot:
        wrong.append(("profiling.enable_memory_snapshot = true", "false"))
    if wrong and not gpus:
        why = "needs an NVIDIA GPU, and none is visible here"
        raise ConfigError([f"{path}: {key}: {why}; use {other}" for key, other in wrong])


def torchrun_argv(
    config: RunConfig,
    arguments: Sequence[str],
    environment: Environment,
    processes: int,
    python: str,
    module: str = "titan_moe.train",
) -> list[str]:
    """The command that starts this node's `processes`, each running `module` with `arguments`.

    Local ranks in $LOG_RANK (0) keep the console to themselves; the output of the others goes to
    files below the run folder's logs/, so that no traceback is lost.

    Raises ConfigError: a variable that is missing or makes no sense.
    """
    restarts = _integer(environment, "MAX_RESTARTS", least=0, default=0)
    silent = sorted(set(range(processes)) - _log_ranks(environment, processes))
    redirects = ",".join(f"{rank}:{STDOUT_AND_STDERR}" for rank in silent)
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        *_rendezvous(config, environment),
        f"--max-restarts={restarts}",
        f"--shutdown-timeout={config.comm.shutdown_timeout_seconds}",
        f"--log-dir={Path(config.job.dump_folder) / config.job.name / 'logs'}",
        *([f"--redirects={redirects}"] if silent else []),
        "-m",
        module,
        *arguments,
    ]


def launch_environment(environment: Environment, processes: int, cores: int) -> dict[str, str]:
    """Variables to add. Processes that each took all cores would slow each other down."""
    if environment.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(cores // processes, 1))}


def _rendezvous(config: RunConfig, environment: Environment) -> list[str]:
    nodes = nodes_of(environment)
    if nodes == 1:
        return ["--standalone", "--nnodes=1"]
    if endpoint := environment.get("RDZV_ENDPOINT"):
        name = environment.get("RDZV_ID") or config.job.name
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={name}"]
        return [f"--nnodes={nodes}", *meeting]
    if not environment.get("MASTER_ADDR") or not environment.get("NODE_RANK"):
        ways = "RDZV_ENDPOINT=host:port, or MASTER_ADDR and NODE_RANK"
        raise ConfigError(
            [f"environment: NNODES = {nodes}: the nodes must find each other; set {ways}"]
        )
    rank = _integer(environment, "NODE_RANK", least=0)
    if rank >= nodes:
        raise ConfigError([f"environment: NODE_RANK = {rank}: not below NNODES = {nodes}"])
    return [
        f"--nnodes={nodes}",
        f"--node-rank={rank}",
        f"--master-addr={environment['MASTER_ADDR']}",
        f"--master-port={environment.get('MASTER_PORT') or DEFAULT_MASTER_PORT}",
    ]


def _log_ranks(environment: Environment, processes: int) -> set[int]:
    text = environment.get("LOG_RANK") or "0"
    ranks = text.split(",")
    if not set(ranks) <= set(map(str, range(processes))):
        wanted = f"expected local ranks from 0 to {processes - 1}, as in 0,1"
        raise ConfigError([f"environment: LOG_RANK = {text}: {wanted}"])
    return set(map(int, ranks))


def _integer(environment: Environment, name: str, least: int, default: int | None = None) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    number = number_in(text)
    if number is None or number < least:
        raise ConfigError([f"environment: {name} = {text}: expected integer >= {least}"])
    return number
