"""Values of GGUF tensors as float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.checkpoint.files import refuse, shown
from scantling.checkpoint.gguf import GGUFTensor
from scantling.checkpoint.gguf_types import GGML_TYPES
from scantling.errors import need

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_ROW_ELEMENTS = 16_384


def dequantise(tensor: GGUFTensor) -> NDArray[numpy.float32]:
    """The values of one tensor as float32, in `tensor.shape`.

    F32 is a copy-on-write map of the file and costs no memory until it is written to; F16, BF16 and F64 are converted;
    blocks go through ``gguf.quants``, whose bits are the result.

    Raises:
        ScantlingInputError: the kind holds integers or has no float32 form in ``gguf``, or the file has shrunk.
        MissingExtra: numpy or gguf is not installed.
    """
    np = need("numpy", "read GGUF tensors")
    plain = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}.get(tensor.kind)
    block, block_bytes = next(sizes for name, *sizes in GGML_TYPES.values() if name == tensor.kind)
    shape = tensor.shape if plain else (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
    try:
        raw = np.memmap(tensor.file, plain or "u1", mode="c", offset=tensor.start, shape=shape).view(np.ndarray)
    except (OSError, ValueError) as error:
        refuse(tensor.file, f"tensor {shown(tensor.name)} at byte {tensor.start} cannot be mapped: {error}")
    with np.errstate(all="ignore"):
        if plain is None:
            values = _dequantise_blocks(tensor, raw)
        elif tensor.kind == "BF16":
            bits = raw.astype(np.uint32)
            bits <<= 16
            values = bits.view(np.float32)
        else:
            values = raw.astype(np.float32, copy=False)
    result: NDArray[numpy.float32] = values
    return result


def _dequantise_blocks(tensor: GGUFTensor, raw: NDArray[numpy.uint8]) -> NDArray[numpy.float32]:
    quants = need("gguf.quants", "dequantise GGUF blocks")
    # The library works through 16 rows at a time, so short rows are joined; no block depends on another.
    rows, width = tensor.numel // tensor.shape[-1], tensor.shape[-1]
    while rows % 2 == 0 and 2 * width <= _ROW_ELEMENTS:
        rows, width = rows // 2, 2 * width
    try:
        values: NDArray[numpy.float32] = quants.dequantize(
            raw.reshape(rows, -1), quants.GGMLQuantizationType[tensor.kind]
        )
    except (KeyError, NotImplementedError):
        refuse(
            tensor.file,
            f"tensor {shown(tensor.name)} at byte {tensor.start} is {tensor.kind}, which has no float32 form here; "
            "convert the model again with weights of another kind",
        )
    return values.reshape(tensor.shape)
