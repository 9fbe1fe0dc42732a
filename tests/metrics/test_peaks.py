"""Peak rates are found by the names that drivers report, and never guessed."""

import pytest

from titan_moe.metrics.peaks import known_devices, peak_tflops


@pytest.mark.parametrize(
    ("device_name", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 1979.0),
        ("NVIDIA H100 PCIe", 756.5, 1513.0),
        ("NVIDIA H100 NVL", 835.5, 1670.5),
        ("NVIDIA H200", 989.5, 1979.0),
        ("NVIDIA H200 NVL", 835.5, 1670.5),
        ("NVIDIA GH200 480GB", 989.5, 1979.0),
        ("NVIDIA B200", 2250.0, 4500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0, 4500.0),
        ("NVIDIA GB200", 2500.0, 5000.0),
        ("NVIDIA GB300", 2500.0, 5000.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, None),
        ("NVIDIA A100 80GB PCIe", 312.0, None),
        ("NVIDIA H20", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA GeForce RTX 4090", None, None),
        ("cpu", None, None),
    ],
)
def test_device_names(device_name: str, bf16: float | None, fp8: float | None) -> None:
    assert peak_tflops(device_name) == bf16
    assert peak_tflops(device_name, "fp8") == fp8


def test_every_entry_states_its_source() -> None:
    assert len(known_devices()) == 10
    for device in known_devices():
        assert len(device["source"]) > 20, device["name"]
        assert device.get("fp8", 2 * device["bf16"]) == pytest.approx(2 * device["bf16"], rel=1e-3)
        assert device["bf16"] == pytest.approx(2 * device["tf32"], rel=2e-3)
