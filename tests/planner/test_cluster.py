"""Machines' TOMLs against what is published of whole racks and boards, and their faults."""

from pathlib import Path

import pytest

from titan_moe.config import ConfigError
from titan_moe.planner.cluster import Cluster, load_cluster

CLUSTERS = Path(__file__).parents[2] / "train_configs" / "clusters"

# Of a whole scale-up domain as data sheets have it: GPUs, PFLOPS of BF16 and FP8 with sparsity, GiB
# of memory that are sold, TB/s of memory, TB/s of NVLink both ways, Gb/s of the network per GPU.
PUBLISHED = {
    "gb300_nvl72": (72, 360, 720, 72 * 279, 576, 130, 800),
    "gb200_nvl72": (72, 360, 720, 72 * 186, 576, 130, 400),
    "b300": (8, 36, 72, 8 * 270, 62, 14.4, 800),
    "b200": (8, 36, 72, 8 * 180, 62, 14.4, 400),
    "h200": (8, 15.8, 31.7, 8 * 141, 38.4, 7.2, 400),
    "h100": (8, 15.8, 31.7, 8 * 80, 26.8, 7.2, 400),
}


def test_all_machines_are_there() -> None:
    assert {path.stem for path in CLUSTERS.glob("*.toml")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_add_up_to_what_is_published_of_the_whole(name: str) -> None:
    gpus, bf16, fp8, gib, memory, nvlink, network = PUBLISHED[name]
    cluster = load_cluster(CLUSTERS / f"{name}.toml")
    assert cluster.scale_up.gpus == gpus
    assert 2 * gpus * cluster.gpu.bf16_tflops / 1e3 == pytest.approx(bf16, rel=3e-3)
    assert 2 * gpus * cluster.gpu.fp8_tflops / 1e3 == pytest.approx(fp8, rel=3e-3)
    assert gpus * cluster.gpu.memory_gb * 1e9 / 2**30 == pytest.approx(gib, rel=8e-3)
    assert gpus * cluster.gpu.memory_tb_per_second == pytest.approx(memory, rel=8e-3)
    assert 2 * gpus * cluster.scale_up.gb_per_second / 1e3 == pytest.approx(nvlink, rel=8e-3)
    assert 8 * cluster.scale_out.gb_per_second == network


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_figure_has_a_source(name: str) -> None:
    lines = (CLUSTERS / f"{name}.toml").read_text("utf-8").splitlines()
    figures = [line for line in lines if "=" in line and '"' not in line]
    assert len(figures) == 8
    assert all(len(line.partition("#")[2]) > 5 for line in figures)


H100 = (CLUSTERS / "h100.toml").read_text("utf-8")


def written(tmp_path: Path, old: str, new: str) -> Path:
    assert H100.count(old) == 1
    path = tmp_path / "mine.toml"
    path.write_text(H100.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "memory_gb = 85.5",
            "memory = 85.5",
            [
                "unknown key gpu.memory; did you mean gpu.memory_gb?",
                "missing key gpu.memory_gb (number > 0: HBM, as the driver counts it)",
            ],
        ),
        ("memory_gb = 85.5", "memory_gb = -1", ["gpu.memory_gb = -1: expected number > 0"]),
        (
            "memory_gb = 85.5",
            'memory_gb = "85.5"',
            ['gpu.memory_gb = "85.5": expected number > 0; write 85.5 without quotes'],
        ),
        (
            '"hopper"',
            '"hoper"',
            [
                'machine.architecture = "hoper": expected "hopper" | "blackwell"; '
                'did you mean "hopper"?'
            ],
        ),
        (
            "[scale_out]",
            "[scale_ou]",
            [
                "unknown key scale_ou; did you mean scale_out?",
                "missing key scale_out.gb_per_second (number > 0: one way, per GPU)",
            ],
        ),
        (
            "gpus = 8",
            "gpus = 12",
            [
                "scale_up.gpus = 12: a domain of 12 GPUs is neither made of whole hosts nor fits "
                "whole into one of machine.gpus_per_host = 8"
            ],
        ),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, old: str, new: str, said: list[str]) -> None:
    path = written(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert set(caught.value.faults) == {f"{path}: {fault}" for fault in said}


@pytest.mark.parametrize("gpus", [2, 8, 72])
def test_a_domain_is_of_hosts_or_a_host_of_domains(tmp_path: Path, gpus: int) -> None:
    assert load_cluster(written(tmp_path, "gpus = 8", f"gpus = {gpus}")).scale_up.gpus == gpus


def test_a_copy_may_extend_and_change_one_figure(tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(f'extends = "{CLUSTERS / "h100.toml"}"\n[scale_out]\ngb_per_second = 12.5\n')
    slow, fast = load_cluster(path), load_cluster(CLUSTERS / "h100.toml")
    assert slow.scale_out.gb_per_second == 12.5
    assert slow == Cluster(**{**dict(fast), "scale_out": slow.scale_out})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"h10\.toml: no such file; did you mean .*h100\.toml"):
        load_cluster(CLUSTERS / "h10.toml")
