"""The table of devices: dense peaks, memory, links and watts, each with its source; and a user's own table like it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from scantling import strict_yaml
from scantling.errors import ScantlingInputError, nearest
from scantling.strict_yaml import shown

ARITHMETIC = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""What a matrix product multiplies in, by the names of data sheets."""

_ALSO = {
    "float32": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "uint8": "int8",
}
_TABLE = Path(__file__).with_name("hardware.yaml")
_POSITIVE = ("memory_gb", "memory_mib", "memory_gb_per_s", "link_gb_per_s", "network_gb_per_s", "watts")
_RATES = ("dense_tflops", "reached_tflops")


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device; a figure that is not known is None or absent.

    Attributes:
        dense_tflops: TFLOP/s (int8: TOP/s) by arithmetic, without structured sparsity.
        sparsity: the vendor also prints twice these rates, for matrices of which half is zero.
        memory_gb: capacity as the vendor prints it, 10^9 bytes.
        memory_mib: capacity as the driver reports it, 2^20 bytes.
        memory_gb_per_s: peak bandwidth, 10^9 bytes per second.
        link_gb_per_s: all links to the other devices of the node or pod, in one direction.
        network_gb_per_s: between nodes, one device's share, in one direction.
        reached_tflops: TFLOP/s that a large matrix product was measured to reach, by arithmetic.
        devices_per_node: how many devices those links join.
        watts: power limit, without host and cooling.
        source: where the figures come from.
    """

    about: str
    source: str
    dense_tflops: dict[str, float] = {}
    sparsity: bool = False
    memory_gb: float | None = None
    memory_mib: float | None = None
    memory_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    network_gb_per_s: float | None = None
    reached_tflops: dict[str, float] = {}
    devices_per_node: int | None = None
    watts: float | None = None
    name: str = ""

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s in an arithmetic.

        Raises:
            ScantlingInputError: the device has none, or it is not known.
        """
        if dtype not in self.dense_tflops:
            known = f"known: {', '.join(self.dense_tflops)}" if self.dense_tflops else "no peak of it is known"
            raise ScantlingInputError(f"device {self.name} has no dense peak in {dtype}; {known}; --peak sets one")
        return self.dense_tflops[dtype] * 1e12

    @property
    def memory_bytes(self) -> int | None:
        """Capacity in bytes: what the driver reports, or else what the vendor prints."""
        if self.memory_mib is not None:
            return round(self.memory_mib * 2**20)
        return None if self.memory_gb is None else round(self.memory_gb * 1e9)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the memory.

        Raises:
            ScantlingInputError: it is not known.
        """
        if self.memory_gb_per_s is None:
            raise ScantlingInputError(f"device {self.name} has no memory_gb_per_s: a row of --device-file can state it")
        return self.memory_gb_per_s * 1e9


def arithmetic(name: str) -> str:
    """The data sheet's name of a dtype: ``bfloat16`` is ``bf16``, ``float8_e4m3fn`` is ``fp8``.

    Raises:
        ScantlingInputError: no device multiplies in it.
    """
    plain = _ALSO.get(name.removeprefix("torch."), name.removeprefix("torch."))
    if plain not in ARITHMETIC:
        raise ScantlingInputError(
            f"no peak is tabled for {name!r}: use one of {', '.join(ARITHMETIC)}{nearest(plain, [*ARITHMETIC, *_ALSO])}"
        )
    return plain


@cache
def devices() -> dict[str, Device]:
    """The table that comes with the package, by name."""
    return read_devices(_TABLE.read_text("utf-8"), "hardware.yaml")


def device(name: str, own: Path | None = None) -> Device:
    """A device by name, from a user's file first; or the only row of a file whose path is the name.

    Raises:
        ScantlingInputError: no such device, or the file is not a table of devices.
    """
    if own is None and name.endswith((".yaml", ".yml")):
        rows = _of_file(Path(name))
        if len(rows) != 1:
            raise ScantlingInputError(
                f"{name} has {len(rows)} devices: name one of {', '.join(rows)} with --device and give --device-file"
            )
        return next(iter(rows.values()))
    known = devices() | (_of_file(own) if own is not None else {})
    plain = name.lower().replace("_", "-").replace(" ", "-")
    if plain not in known and name not in known:
        raise ScantlingInputError(f"no device {name!r}{nearest(plain, known)}; known: {', '.join(known)}")
    return known[name] if name in known else known[plain]


def _of_file(path: Path) -> dict[str, Device]:
    return read_devices(strict_yaml.file_text(path, "a table of devices"), str(path))


def read_devices(text: str, where: str) -> dict[str, Device]:
    """Devices by name from YAML text: a mapping of names to rows with the keys of `Device`.

    Raises:
        ScantlingInputError: not such a table; the message names row and key.
    """
    data = strict_yaml.parse(text, where, "a table of devices")
    if not isinstance(data, Mapping) or not data:
        raise ScantlingInputError(f"{where}: {shown(data)} where a mapping of device names to rows is needed")
    return {_name(key, where): _row(str(key), row, where) for key, row in data.items()}


def _name(key: Any, where: str) -> str:
    if not isinstance(key, str) or not key:
        raise ScantlingInputError(f"{where}: the device name {shown(key)} is not a text")
    return key


def _row(name: str, row: Any, where: str) -> Device:
    keys = [field for field in Device.__struct_fields__ if field != "name"]
    if not isinstance(row, Mapping):
        raise ScantlingInputError(f"{where}: {name} is {shown(row)}; a mapping with {', '.join(keys)} is needed")
    for key in row:
        if key not in keys:
            raise ScantlingInputError(
                f"{where}: unknown key {shown(f'{name}.{key}')}; known here: {', '.join(keys)}{nearest(str(key), keys)}"
            )
    for key in ("about", "source"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise ScantlingInputError(f"{where}: {name}.{key} is {shown(row.get(key))}; a text is needed")
    for rates in _RATES:
        _check_rates(row.get(rates, {}), f"{name}.{rates}", where)
    if not isinstance(row.get("sparsity", False), bool):
        raise ScantlingInputError(f"{where}: {name}.sparsity is {shown(row['sparsity'])}; true or false is needed")
    for key in _POSITIVE:
        if row.get(key) is not None:
            _positive(row[key], f"{name}.{key}", where)
    joined = row.get("devices_per_node")
    if joined is not None and (isinstance(joined, bool) or not isinstance(joined, int) or joined < 1):
        raise ScantlingInputError(
            f"{where}: {name}.devices_per_node is {shown(joined)}; a whole number of at least 1 is needed"
        )
    for key, value in row.get("reached_tflops", {}).items():
        if value > row.get("dense_tflops", {}).get(key, value):
            raise ScantlingInputError(
                f"{where}: {name}.reached_tflops.{key} is {value:g}, more than its dense peak of "
                f"{row['dense_tflops'][key]:g}"
            )
    return msgspec.convert(dict(row) | {"name": name}, Device, strict=True)


def _check_rates(rates: Any, at: str, where: str) -> None:
    if not isinstance(rates, Mapping):
        raise ScantlingInputError(f"{where}: {at} is {shown(rates)}; a mapping is needed, {{bf16: 989.4}}")
    for key, value in rates.items():
        if key not in ARITHMETIC:
            raise ScantlingInputError(
                f"{where}: unknown key {shown(f'{at}.{key}')}; known here: {', '.join(ARITHMETIC)}"
                f"{nearest(str(key), ARITHMETIC)}"
            )
        _positive(value, f"{at}.{key}", where)


def _positive(value: Any, at: str, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ScantlingInputError(f"{where}: {at} is {shown(value)}; a number above 0 is needed")
