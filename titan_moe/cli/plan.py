"""`titan-moe plan CONFIG --cluster FILE`: know before you rent."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from titan_moe.cli.plan_options import Options, parse
from titan_moe.cli.plan_text import json_of, text_of
from titan_moe.config.checks_pipeline import order_can_be_run
from titan_moe.config.errors import ConfigError
from titan_moe.config.layout import Layout
from titan_moe.config.load import load_config
from titan_moe.config.sections import RunConfig
from titan_moe.config.words import counted
from titan_moe.planner.case import Case
from titan_moe.planner.cluster import Cluster, load_cluster
from titan_moe.planner.stack import Stack

T = TypeVar("T")

DOES_NOT_FIT = 1
# Of options.
TO_COME = ("stack", "precision", "tokens", "price", "mtbf_hours", "imbalance", "search", "html")

HELP = """\
usage: titan-moe plan [CONFIG] [--cluster FILE] [--gpus N] [--json] [--section.key=value ...]

Say of a run that is not started, on a machine that need not be here: does it fit, and where does
its traffic go. The code that will run is traced, one rank of each pipeline stage: no GPU is needed,
nothing is allocated, and no data that the config names is looked for. CONFIG is by default
$CONFIG_FILE, else train_configs/debug.toml; keys on the command line override it.

  --cluster     the machine, a TOML; train_configs/clusters/ has some, and yours is a copy of one;
                default: plan.cluster of the config
  --gpus        of the run; default: what the layout asks for, if its degrees all are numbers
  --json        the same for scripts

exit code: 0 if it fits, 1 if it does not (the plan says by how much), 2 where config, cluster or
options are wrong.
"""


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return 0
    options = parse(arguments, os.environ)
    case = case_of(options)
    _tell(
        f"planning {case.config.job.name} on {case.world} × {case.cluster.machine.name}: tracing "
        f"{counted(case.layout.pp, 'pipeline rank')} ..."
    )
    # Slow to import; what is wrong so far is told first.
    from titan_moe.planner.plan import make_plan

    try:
        plan = make_plan(case)
    except ConfigError:
        raise
    except ValueError as error:  # what only building the model can tell
        raise ConfigError([f"{options.config}: {error}"]) from error
    print(json.dumps(json_of(plan), indent=2) if options.json else text_of(plan))
    return 0 if plan.fits else DOES_NOT_FIT


def case_of(options: Options) -> Case:
    """What is to be planned. Raises ConfigError: one line per fault, of all files together."""
    faults = _to_come(options)
    config = _or_fault(lambda: load_config(options.config, options.overrides, options.gpus), faults)
    cluster = _cluster(options, config, faults)
    if config is None or cluster is None or faults:
        raise ConfigError(faults)
    world = options.gpus or world_of(options, config)
    if faults := [*_unreadable_order(options, config, world), *_misfits(cluster, world)]:
        raise ConfigError(faults)
    return Case(config, world, cluster, Stack(name=options.stack))


def _to_come(options: Options) -> list[str]:
    """All that needs to know how long a step takes."""
    plain = parse([], {})
    given = [name for name in TO_COME if getattr(options, name) != getattr(plain, name)]
    given += [] if options.traced else ["no_trace"]
    return [
        f"command line: --{name.replace('_hours', '').replace('_', '-')}: is to come; today a plan "
        f"tells memory, by tracing, and traffic"
        for name in given
    ]


def _cluster(options: Options, config: RunConfig | None, faults: list[str]) -> Cluster | None:
    path = options.cluster or (config and config.plan.cluster)
    if path:
        return _or_fault(lambda: load_cluster(path), faults)
    if config is not None:
        faults.append(
            f"command line: --cluster is missing: the TOML of a machine to plan for; "
            f"{options.config} names none under plan.cluster either"
        )
    return None


def world_of(options: Options, config: RunConfig) -> int:
    """GPUs that the layout's degrees ask for. Raises ConfigError: they leave it open."""
    world = Layout.world_of(config.parallelism)
    if world is None:
        raise ConfigError(
            [
                f"{options.config}: parallelism.data_parallel_shard_degree = -1: takes what the "
                f"world leaves, so that the number of GPUs must be told; add --gpus N"
            ]
        )
    load_config(options.config, options.overrides, world)  # the checks that need the world
    return world


def _unreadable_order(options: Options, config: RunConfig, world: int) -> list[str]:
    """A pipeline's order in a file is part of the plan, unlike the data that a config names."""
    return [
        f"{options.config}: {fault.key}: {fault.message}"
        for fault in order_can_be_run(config, world)
    ]


def _misfits(cluster: Cluster, world: int) -> list[str]:
    machine, host = cluster.machine, cluster.machine.gpus_per_host
    if world <= host or world % host == 0:
        return []
    rented = -(-world // host) * host
    return [
        f"command line: --gpus = {world}: not whole hosts of {machine.name}, of {host} GPUs each "
        f"({world} % {host} = {world % host}); {rented} would be rented, so plan for them"
    ]


def _or_fault(act: Callable[[], T], faults: list[str]) -> T | None:
    try:
        return act()
    except ConfigError as error:
        faults += error.faults
        return None


def _tell(line: str) -> None:
    """Apart from the result, which a script may read."""
    print(line, file=sys.stderr, flush=True)
