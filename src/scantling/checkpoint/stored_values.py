"""Tensors of safetensors files as arrays of numpy over the files' own bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scantling.checkpoint.files import here, refuse, shown
from scantling.checkpoint.header import TensorInfo
from scantling.errors import need

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KINDS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8"}


def stored(info: TensorInfo) -> NDArray[Any]:
    """A tensor as it stands in its file, read when it is looked at; bfloat16 as its bits, in uint16.

    Raises:
        ScantlingInputError: it holds no floating-point numbers of these kinds, or the file has shrunk.
        MissingExtra: numpy is not installed.
    """
    np = need("numpy", "read tensors")
    if info.dtype not in _KINDS:
        refuse(info.file, f"tensor {shown(info.name)} is {info.dtype}; weights are floating-point numbers")
    try:
        mapped = np.memmap(here(info.file), _KINDS[info.dtype], mode="r", offset=info.start, shape=info.shape or (1,))
    except (OSError, ValueError) as error:
        refuse(info.file, f"tensor {shown(info.name)} at byte {info.start} cannot be mapped: {error}")
    found: NDArray[Any] = mapped.view(np.ndarray)
    return found


def as_float32(values: NDArray[Any]) -> NDArray[Any]:
    """The numbers of what `stored` gave, or of some of it, in float32."""
    np = need("numpy", "read tensors")
    if values.dtype != np.uint16:
        return values.astype(np.float32, copy=False)
    widened: NDArray[Any] = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return widened


def same(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    np = need("numpy", "compare tensors")
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bool(np.array_equal(stored(a), stored(b)))
