"""`titan-moe train [CONFIG] ...`: check the config, then become torchrun."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from titan_moe.cli.launch import (
    count_gpus,
    launch_environment,
    nodes_of,
    processes_of,
    refuse_what_needs_gpus,
    torchrun_argv,
)
from titan_moe.config.command_line import config_and_overrides
from titan_moe.config.help import keys_text
from titan_moe.config.load import load_config, sections_for

HELP = """\
usage: titan-moe train [CONFIG] [--section.key=value ...]

Check the config without torch, then run it under torchrun, in place of this process. CONFIG is by
default $CONFIG_FILE, else train_configs/debug.toml.

environment (a variable that is empty counts as unset):
  CONFIG_FILE       the config, if no argument names it
  NGPU              processes on this node; default: the GPUs present, else 2
  LOG_RANK          local ranks that write to the console, as in 0,1; default 0. The others write
                    to files in the run folder's logs/. The step lines come from rank 0; of any
                    other rank only warnings and errors are seen
  NNODES            nodes of the run; default 1. With more than one, either
    RDZV_ENDPOINT     host:port of a node, the same on all (RDZV_ID tells runs apart), or
    MASTER_ADDR, MASTER_PORT, NODE_RANK     the first node, a port (29500) and this node's number
  MAX_RESTARTS      times that torchrun starts the processes anew if one fails; default 0
  OMP_NUM_THREADS   threads of each process; default: the cores, shared out

exit code: 2 where config or environment are wrong, else torchrun's: 0, or 1 if a process failed or
the run was told to stop, even if it then saved its state.

"""


def become(command: list[str], more_environment: dict[str, str]) -> NoReturn:
    """Replace this process, so that signals reach torchrun itself."""
    sys.stdout.flush()
    os.execvpe(command[0], command, os.environ | more_environment)


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        rest = [argument for argument in arguments if argument not in ("--help", "-h")]
        print(HELP + keys_text(sections_for(*config_and_overrides(rest, os.environ))), end="")
        return 0
    path, overrides = config_and_overrides(arguments, os.environ)
    processes, nodes = processes_of(os.environ), nodes_of(os.environ)
    config = load_config(path, overrides, world=processes * nodes, on_disk=True)
    refuse_what_needs_gpus(path, config, count_gpus(os.environ))
    command = torchrun_argv(config, [str(path), *overrides], os.environ, processes, sys.executable)
    become(command, launch_environment(os.environ, processes, cores()))
