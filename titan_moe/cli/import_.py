"""`titan-moe import HF_DIR CHECKPOINT`: check what can be checked, then become torchrun."""

import os
import sys
from collections.abc import Sequence

from titan_moe.cli.launch import launch_environment, nodes_of, processes_of, torchrun_argv
from titan_moe.cli.train import become, cores
from titan_moe.config.errors import ConfigError
from titan_moe.config.load import load_config

HELP = """\
usage: titan-moe import HF_DIR CHECKPOINT --config TOML [--section.key=value ...]

Read the sharded safetensors in HF_DIR, dequantised if they are FP8 or MXFP4, and write them as the
checkpoint CHECKPOINT, a folder that is new or empty. The recipe's table (hf.py) has to cover every
tensor of both sides, and the sizes in TOML have to be those of HF_DIR/config.json. Each process
reads its own share alone, under the layout that TOML states. A run under any layout starts from
CHECKPOINT by checkpoint.initial_load_path.

environment: as for train, NGPU (processes on this node) above all
exit code: 2 where arguments or config are wrong, else torchrun's: 0, or 1 if a process failed
"""


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return 0
    source, target, path, overrides = _parse(arguments)
    processes, nodes = processes_of(os.environ), nodes_of(os.environ)
    config = load_config(path, overrides, world=processes * nodes)
    command = torchrun_argv(
        config,
        [source, target, path, *overrides],
        os.environ,
        processes,
        sys.executable,
        module="titan_moe.hf.importing",
    )
    return become(command, launch_environment(os.environ, processes, cores()))


def _parse(arguments: Sequence[str]) -> tuple[str, str, str, list[str]]:
    rest, path = list(arguments), ""
    for at, argument in enumerate(arguments):
        if argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or "".join(arguments[at + 1 : at + 2])
            del rest[at : at + (1 if "=" in argument else 2)]
            break
    folders = [argument for argument in rest if not argument.startswith("-")]
    if len(folders) != 2 or not path:
        raise ConfigError(["command line: expected HF_DIR CHECKPOINT --config TOML; see --help"])
    return folders[0], folders[1], path, [item for item in rest if item.startswith("-")]
