"""Quantised folders against naive dequantisation, whole and by slices."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from titan_moe.hf.folder import Folder, Raw, open_folder
from titan_moe.hf.quantised import Range

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def folder_of(path: Path, tensors: dict[str, Tensor], quantisation: dict[str, object]) -> Folder:
    """Each tensor in a file of its own, so that scales lie apart from what they scale."""
    files = {name: f"model-{index}.safetensors" for index, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (path / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    return open_folder(path)


def reading(tensors: dict[str, Tensor]) -> object:
    def read(raw: Raw, ranges: list[Range]) -> Tensor:
        return tensors[raw.name][tuple(slice(begin, end) for begin, end in ranges)]

    return read


def test_fp8_blocks_with_ragged_edges(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 9, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, generator=generator) + 0.5
    expected = torch.empty(5, 9)
    for row in range(5):
        for column in range(9):
            expected[row, column] = weight[row, column].float() * scales[row // 2, column // 4]
    tensors = {"w": weight, "w_scale_inv": scales}
    config = {"quant_method": "fp8", "weight_block_size": [2, 4]}
    stored = folder_of(tmp_path, tensors, config).tensors["w"]
    assert stored.shape == (5, 9)
    for ranges in ([(0, 5), (0, 9)], [(1, 4), (3, 9)], [(4, 5), (8, 9)], [(2, 3), (0, 5)]):
        rows, columns = (slice(*bounds) for bounds in ranges)
        got = stored.read(ranges, reading(tensors))
        assert torch.equal(got, expected[rows, columns]), ranges


def test_mxfp4_as_transformers_has_it(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 132, (2, 6, 3), generator=generator).to(torch.uint8)
    tensors = {"w_blocks": blocks, "w_scales": scales}
    stored = folder_of(tmp_path, tensors, {"quant_method": "mxfp4"}).tensors["w"]
    assert stored.shape == (2, 96, 6)
    got = stored.read([(0, 2), (0, 96), (0, 6)], reading(tensors))
    for expert, row, entry in ((0, 0, 0), (1, 5, 95), (1, 2, 33), (0, 3, 62)):
        byte = int(blocks[expert, row, entry // 32, entry % 32 // 2])
        code = byte >> 4 if entry % 2 else byte & 15
        value = E2M1[code % 8] * (-1 if code >= 8 else 1)
        value *= 2.0 ** (int(scales[expert, row, entry // 32]) - 127)
        assert got[expert, entry, row] == value
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(got, expected)
    part = stored.read([(1, 2), (17, 70), (2, 5)], reading(tensors))
    assert torch.equal(part, expected[1:2, 17:70, 2:5])


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"w": "fp8"}, {"quant_method": "fp8"}, "w is FP8, but there is no w_scale_inv"),
        ({"w": "fp8", "w_scale_inv": "f32"}, {"quant_method": "fp8"}, "make it floats \\[1, 1\\]"),
        ({}, {"quant_method": "gptq"}, "quant_method = 'gptq': only fp8 and mxfp4"),
    ],
)
def test_what_cannot_be_dequantised(
    tmp_path: Path, tensors: dict[str, str], config: dict[str, object], message: str
) -> None:
    kinds = {"fp8": torch.float8_e4m3fn, "f32": torch.float32}
    made = {name: torch.ones(4, 4).to(kinds[kind]) for name, kind in tensors.items()}
    with pytest.raises(ValueError, match=message):
        folder_of(tmp_path, made, config).check_readable(made)
