"""A machine to plan for: what one GPU can do, and how fast it talks to which others.

Figures are vendors': peaks without sparsity, bandwidths in one direction, per GPU. How much of them
a software stack gets is that stack's matter (see `stack.py`). GB and TB are powers of ten.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from titan_moe.config.base import Section
from titan_moe.config.errors import ConfigError
from titan_moe.config.tables import load_tables

Architecture = Literal["hopper", "blackwell"]


class Machine(Section):
    """`[machine]`: what it is called, and how it is built."""

    name: str = Field(min_length=1, description="as people call it, e.g. GB300 NVL72")
    architecture: Architecture = Field(description="of the GPU: which kernels there are for it")
    gpus_per_host: PositiveInt = Field(description="that one operating system runs")


class Gpu(Section):
    """`[gpu]`: one of them."""

    bf16_tflops: PositiveFloat = Field(description="dense peak")
    fp8_tflops: PositiveFloat = Field(description="dense peak; MXFP8's too, where there is any")
    memory_gb: PositiveFloat = Field(description="HBM, as the driver counts it")
    memory_tb_per_second: PositiveFloat = Field(description="its bandwidth")


class ScaleUp(Section):
    """`[scale_up]`: the fast network (NVLink): a domain is a host, or a rack."""

    gpus: PositiveInt = Field(description="of one domain")
    gb_per_second: PositiveFloat = Field(description="one way, per GPU")


class ScaleOut(Section):
    """`[scale_out]`: the network between domains (InfiniBand, Ethernet)."""

    gb_per_second: PositiveFloat = Field(description="one way, per GPU")


class Cluster(Section):
    """A whole cluster file."""

    machine: Machine
    gpu: Gpu
    scale_up: ScaleUp
    scale_out: ScaleOut


def load_cluster(path: str | Path) -> Cluster:
    """Read a machine's TOML, as `train_configs/clusters` has them; it may extend others.

    Raises ConfigError (a ValueError) with one line per fault: file, key, value, remedy.
    """
    cluster = load_tables(path, Cluster)
    host, domain = cluster.machine.gpus_per_host, cluster.scale_up.gpus
    if domain % host and host % domain:
        raise ConfigError(
            [
                f"{path}: scale_up.gpus = {domain}: a domain of {domain} GPUs is neither made of "
                f"whole hosts nor fits whole into one of machine.gpus_per_host = {host}"
            ]
        )
    return cluster
