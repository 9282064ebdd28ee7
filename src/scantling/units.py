"""Sizes of number formats, and numbers as people write them; nothing is rounded before it is shown."""

from __future__ import annotations

import re
from decimal import Decimal

from scantling.errors import ScantlingInputError, nearest

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of each dtype, by torch's own names."""

BLOCKS: dict[str, tuple[int, int]] = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q8_1": (32, 36),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "q8_k": (256, 292),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq3_xxs": (256, 98),
    "iq1_s": (256, 50),
    "iq4_nl": (32, 18),
    "iq3_s": (256, 110),
    "iq2_s": (256, 82),
    "iq4_xs": (256, 136),
    "iq1_m": (256, 56),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
    "mxfp4": (32, 17),
    "nvfp4": (64, 36),
    "q1_0": (128, 18),
    "q2_0": (64, 18),
}
"""Formats of quantised rows: elements per block and bytes per block, scales included (ggml-common.h)."""

_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "f32": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


def dtype_name(name: str) -> str:
    """The full name of a dtype: ``bf16``, ``torch.bfloat16`` and ``bfloat16`` are all ``bfloat16``.

    Raises:
        ScantlingInputError: no such dtype.
    """
    plain = name.removeprefix("torch.")
    plain = _SHORT.get(plain, plain)
    if plain not in DTYPE_BYTES:
        raise ScantlingInputError(
            f"unknown dtype {name!r}: use one of {', '.join(DTYPE_BYTES)}{nearest(plain, [*DTYPE_BYTES, *_SHORT])}"
        )
    return plain


def weights_dtype(name: str) -> str:
    """The full name of a dtype that weights can have while they compute.

    Raises:
        ScantlingInputError: no such dtype, or not a floating-point one that torch computes in.
    """
    full, known = dtype_name(name), ("float64", "float32", "float16", "bfloat16")
    if full not in known:
        raise ScantlingInputError(f"weights cannot be loaded as {full}: use one of {', '.join(known)}")
    return full


_USUAL = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "mxfp4")


def storage_dtype(name: str) -> str:
    """The full name of a dtype that weights or a cache can be stored in.

    Raises:
        ScantlingInputError: no such dtype, or one for indices.
    """
    full = dtype_name(name)
    known = [dtype for dtype in DTYPE_BYTES if dtype not in ("int64", "int32", "int16", "bool")]
    if full not in known:
        raise ScantlingInputError(f"weights are not stored as {full}: use one of {', '.join(known)}")
    return full


def format_name(name: str) -> str:
    """The full name of what weights or a cache can be stored in: a dtype, or a format of blocks such as ``q4_0``.

    Raises:
        ScantlingInputError: no such format.
    """
    if name.lower() in BLOCKS:
        return name.lower()
    plain = name.removeprefix("torch.")
    if _SHORT.get(plain, plain) not in DTYPE_BYTES:
        raise ScantlingInputError(
            f"unknown dtype {name!r}: use one of {', '.join(DTYPE_BYTES)}, or a format of blocks as {', '.join(_USUAL)}"
            f"{nearest(plain, [*DTYPE_BYTES, *_SHORT, *BLOCKS])}"
        )
    return storage_dtype(name)


def stored_bytes(rows: int, width: int, kind: str) -> int:
    """Bytes of `rows` rows of `width` elements in a dtype or a format of blocks.

    Raises:
        ScantlingInputError: a row is no whole number of blocks.
    """
    if kind in DTYPE_BYTES:
        return rows * width * DTYPE_BYTES[kind]
    block, size = BLOCKS[kind]
    if width % block:
        raise ScantlingInputError(f"rows of {width} elements are no multiple of the {block} of a block of {kind}")
    return rows * width // block * size


def parse_bytes(text: str) -> int:
    """Bytes as people write them: ``5GB`` is 5 * 10^9, ``5GiB`` is 5 * 2^30, ``500`` is 500.

    Raises:
        ScantlingInputError: not a number with one of these units.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:(?:([kmgt])(i?))?b)?", text.strip().lower())
    if match is None:
        known = "kB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise ScantlingInputError(f"{text!r} is no size: give bytes, or a number with one of {known}")
    number, letter, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(letter) if letter else 0))


def parse_count(text: str, what: str) -> int:
    """A count as people write it: ``2T`` is 2 * 10^12, ``15.6T``, ``7B``, ``300M``, ``1e12``, ``1024``.

    Args:
        what: names it in the message.

    Raises:
        ScantlingInputError: not a number with one of these letters, not whole, or below 1.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?) ?([kmbtp]?)", text.strip().lower().replace(",", ""))
    if match is None:
        raise ScantlingInputError(f"{what} is {text!r}: give a number, or one with k, M, B, T or P (10^3 to 10^15)")
    exact = Decimal(match[1]) * 1000 ** " kmbtp".index(match[2] or " ")
    if exact < 1 or exact != int(exact):
        raise ScantlingInputError(f"{what} is {text!r}; a whole number of at least 1 is needed")
    return int(exact)


def bytes_text(n: int) -> str:
    """Bytes in decimal and binary units, each named: ``262.1 MB (250.0 MiB)``."""
    if n < 1000:
        return f"{n} B"
    power = min((len(str(n)) - 1) // 3, 5)
    decimal = n / 1000**power
    binary = n / 1024**power
    return f"{decimal:,.1f} {'kMGTP'[power - 1]}B ({binary:,.1f} {'KMGTP'[power - 1]}iB)"


def count_text(n: float) -> str:
    """A count with three or four significant digits: ``124.4 M``, ``8.030 B``, ``3.07 k``."""
    for power, letter in ((15, "P"), (12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if abs(n) >= 10**power:
            scaled = n / 10**power
            return f"{scaled:.4g} {letter}" if abs(scaled) >= 100 else f"{scaled:.3f} {letter}".replace(".000 ", " ")
    return f"{n:g}"


def flops_text(n: float) -> str:
    """FLOPs with their unit: ``291.6 GFLOP``."""
    for power, letter in ((24, "Y"), (21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(n) >= 10**power:
            return f"{n / 10**power:.4g} {letter}FLOP"
    return f"{n:g} FLOP"
