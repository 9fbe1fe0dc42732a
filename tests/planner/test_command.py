"""`titan-moe plan` as a person meets it: what it prints, what it answers, and what it refuses."""

import json
from pathlib import Path

import pytest

from titan_moe.cli.main import main
from titan_moe.cli.plan import case_of
from titan_moe.cli.plan_options import parse

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "train_configs" / "clusters"
TINY_CLUSTER = f'extends = "{CLUSTERS / "h100.toml"}"\n[machine]\nname = "tiny"\n'
SMALL = ("--model.num_layers=2", "--training.seq_len=32")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A machine whose GPUs have a megabyte."""
    path = tmp_path / "tiny.toml"
    path.write_text(f"{TINY_CLUSTER}[gpu]\nmemory_gb = 1e-3\n")
    return path


def plan(*words: str, cluster: Path = CLUSTERS / "h100.toml") -> int:
    return main(["plan", str(ROOT / "train_configs/debug.toml"), f"--cluster={cluster}", *words])


def test_a_plan_that_fits_as_json_alone_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    """Of a config whose data are not on this machine."""
    elsewhere = ("--data.tokenizer=./none/tokenizer.json", "--data.bos_token=<s>")
    assert (
        plan("--gpus=4", "--json", "--parallelism.expert_parallel_degree=2", *SMALL, *elsewhere)
        == 0
    )
    out, err = capfd.readouterr()
    said = json.loads(out)
    assert said["fits"]
    assert (said["gpus"], said["layout"]["dp_shard"], said["layout"]["ep"]) == (4, 4, 2)
    (rank,) = said["memory"]
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    assert sum(rank[f"{part}_bytes"] for part in parts) == rank["peak_bytes"]
    # AdamW keeps two numbers per weight, both as the weights in fp32.
    assert rank["optimizer_bytes"] >= 2 * 4 * _weights_of_rank_0()
    assert {lane["dimension"] for lane in said["traffic"]} == {"ep", "dp_shard", "efsdp"}
    assert err == "planning debug on 4 × H100: tracing 1 pipeline rank ...\n"


def test_a_plan_that_does_not_fit(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpus=1", *SMALL, cluster=tiny) == 1
    out, _ = capfd.readouterr()
    assert "does not fit; pipeline rank 0 needs" in out
    assert "more than the 0.00092 that tensors can have" in out  # 1 MB less 8%


def _weights_of_rank_0() -> int:
    """Of the debug recipe with one dense block and one of experts, a fourth of all, counted."""
    hidden, vocabulary, inner, experts = 128, 264, 64, 8
    dense, shared = 3 * hidden * 256, 3 * hidden * inner
    routed = experts * 3 * hidden * inner
    return (2 * vocabulary * hidden + dense + shared + routed + experts * hidden) // 4


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--gpu=8"], "command line: unknown option --gpu; did you mean --gpus?"),
        (
            ["--training.stpes=5", "--gpus=1"],
            "unknown key training.stpes; did you mean training.steps?",
        ),
        ([], "data_parallel_shard_degree = -1: takes what the world leaves"),
        (["--gpus=12"], "12 data-parallel ranks"),
        (
            ["--gpus=8", "--parallelism.pipeline_parallel_degree=3"],
            "pp 3 × dp_replicate 1 × cp 1 × tp 1 = 3 does not divide the world of 8 processes",
        ),
        (
            ["--gpus=8", "--parallelism.expert_parallel_degree=3"],
            "must divide them",
        ),
        (
            [
                "--parallelism.pipeline_parallel_degree=12",
                "--parallelism.data_parallel_shard_degree=1",
            ],
            "12 ranks with 1 stage each have 12, more than model.num_layers 8",
        ),
        (
            [
                "--gpus=2",
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_schedule_csv=none.csv",
            ],
            "parallelism.pipeline_parallel_schedule_csv: it cannot be read: No such file",
        ),
    ],
)
def test_what_cannot_be_planned_says_why(
    words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert fault in err
    assert "Traceback" not in err


def test_the_config_may_name_the_machine(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "train_configs/debug.toml")
    assert main(["plan", config, "--gpus=1"]) == 2
    assert "--cluster is missing" in capsys.readouterr().err
    named = case_of(parse([config, "--gpus=1", f"--plan.cluster={tiny}"], {}))
    assert named.cluster.machine.name == "tiny"
    told = f"--cluster={CLUSTERS / 'h100.toml'}"
    named = case_of(parse([config, "--gpus=1", told, f"--plan.cluster={tiny}"], {}))
    assert named.cluster.machine.name == "H100"


def test_part_of_a_host_is_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    twelve = ("--gpus=12", "--training.global_batch_size=24", "--data.num_streams=24")
    assert plan(*twelve) == 2
    assert capsys.readouterr().err == (
        "command line: --gpus = 12: not whole hosts of H100, of 8 GPUs each (12 % 8 = 4); "
        "16 would be rented, so plan for them\n"
    )


def test_faults_of_all_files_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(f"{TINY_CLUSTER}[gpu]\nmemry_gb = 80.0\n")
    assert plan("--gpus=2", "--training.stpes=5", cluster=wrong) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"{wrong}: unknown key gpu.memry_gb; did you mean gpu.memory_gb?" in lines
    assert "command line: unknown key training.stpes; did you mean training.steps?" in lines


def test_the_world_is_what_the_degrees_multiply_to() -> None:
    words = ["--parallelism.data_parallel_shard_degree=2", "--parallelism.tensor_parallel_degree=4"]
    config = str(ROOT / "train_configs/debug.toml")
    options = parse([config, f"--cluster={CLUSTERS / 'h100.toml'}", *words], {})
    assert case_of(options).world == 8
