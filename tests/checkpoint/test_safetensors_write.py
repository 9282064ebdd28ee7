"""Writing a safetensors file: the bytes of the library, whatever is in the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from scantling.checkpoint.header import read_safetensors
from scantling.checkpoint.safetensors_write import write_safetensors


def written(path: Path, tensors: dict[str, torch.Tensor], dtype: str) -> bytes:
    write_safetensors(path, {name: tuple(t.shape) for name, t in tensors.items()}, dtype, tensors.__getitem__)
    return path.read_bytes()


@settings(deadline=None, max_examples=40)
@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=9), max_size=5),
    shape=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_the_bytes_are_those_of_the_library(
    names: list[str], shape: list[int], dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    tensors = {name: torch.full(shape, float(i)).to(getattr(torch, dtype)) for i, name in enumerate(set(names))}
    save_file(tensors, folder / "library", metadata={"format": "pt"})
    assert written(folder / "ours", tensors, dtype) == (folder / "library").read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_sixteen_bits_survives(dtype: torch.dtype, tmp_path: Path) -> None:
    """LOAD-08: also infinities, and NaN with whatever payload."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    written(tmp_path / "all", {"w": patterns.view(dtype)}, str(dtype).removeprefix("torch."))
    assert torch.equal(load_file(tmp_path / "all")["w"].view(torch.int16), patterns)


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    written(tmp_path / "views", {"t": whole.t(), "cut": whole[1:3, ::2], "scalar": whole[2, 3]}, "float32")
    found = load_file(tmp_path / "views")
    assert found["t"].tolist() == whole.t().tolist()
    assert found["cut"].tolist() == [[6, 8, 10], [12, 14, 16]]
    assert found["scalar"].tolist() == 15
    assert set(read_safetensors(tmp_path / "views").tensors) == {"t", "cut", "scalar"}
