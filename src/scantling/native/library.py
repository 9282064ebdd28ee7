"""The compiled pass: built from its source on first use, kept in a cache folder, reached through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from scantling.errors import ScantlingInputError

SOURCE = Path(__file__).with_name("pass.cpp")
"""What is compiled; it includes the headers beside it."""
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-shared", "-fPIC", "-pthread", "-w")
COMPILERS = ("c++", "g++", "clang++")

_int, _float, _pointer = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """`Matrix` of program.h."""

    _fields_ = (
        ("kind", _int),
        ("n", _int),
        ("k", _int),
        ("pad", _int),
        ("data", _pointer),
        ("bias", _pointer),
    )


class Norm(ctypes.Structure):
    """`Norm` of program.h."""

    _fields_ = (
        ("gain", _pointer),
        ("shift", _pointer),
        ("eps", _float),
        ("kind", _int),
        ("n", _int),
        ("stride", _int),
    )


class Mlp(ctypes.Structure):
    """`Mlp` of program.h."""

    _fields_ = (
        *((name, Matrix) for name in ("up", "down")),
        *((name, _int) for name in ("d_ff", "gated", "act", "pad")),
        *((name, _float) for name in ("limit", "alpha")),
    )


class Layer(ctypes.Structure):
    """`Layer` of program.h."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "o", "router", "shared_gate")),
        *((name, Mlp) for name in ("mlp", "shared")),
        ("norms", Norm * 6),
        *((name, Norm) for name in ("q_norm", "k_norm")),
        *((name, _pointer) for name in ("cos", "sin", "slopes", "sinks", "selection")),
        *((name, _int) for name in ("window", "experts", "chosen", "scoring", "normalize")),
        *((name, _int) for name in ("expert_groups", "top_groups", "best_of_group")),
        *((name, _float) for name in ("scale", "kept_scale")),
        *((name, _pointer) for name in ("keys", "values")),
    )


class Program(ctypes.Structure):
    """`Program` of program.h."""

    _fields_ = (
        *(
            (name, _int)
            for name in (
                *("d", "heads", "kv_heads", "head", "turned", "layers", "vocab"),
                *("slots", "capacity", "threads", "quantised", "parallel", "offset", "pad"),
            )
        ),
        *((name, _float) for name in ("softcap", "logit_softcap", "embed_scale", "logit_scale", "clip", "pad_too")),
        ("layer", _pointer),
        *((name, Matrix) for name in ("table", "out", "places")),
        *((name, Norm) for name in ("embed_norm", "final_norm")),
        *((name, _pointer) for name in ("pages", "logits", "pool", "scratch")),
    )


def cache_folder() -> Path:
    """Where what was compiled is kept: $SCANTLING_CACHE, or scantling in the user's cache folder."""
    own = os.environ.get("SCANTLING_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scantling"


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first one found."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, COMPILERS)), None)


def missing() -> str | None:
    """Why there is no compiled pass for this processor and none can be made; None where there is or can."""
    if platform.system() not in ("Linux", "Darwin"):
        return f"the compiled pass is not made for {platform.system()}"
    return None if is_built() or compiler() else "no C++ compiler was found (g++ or clang++, or $CXX)"


@cache
def library(march: str = "native") -> Any:
    """The compiled pass for this processor, or for the one that `march` names.

    Raises:
        ScantlingInputError: there is no compiler, or it refuses the source.
    """
    if (why := missing()) is not None:
        raise ScantlingInputError(f"{why}; without it everything runs through PyTorch, slower")
    target = _target(march)
    if not target.exists():
        _compile(march, target)
    loaded = ctypes.CDLL(str(target))
    for name, result, given in (
        ("sc_arena", _pointer, [ctypes.c_size_t]),
        ("sc_free", None, [_pointer, ctypes.c_size_t]),
        ("sc_tile_bytes", ctypes.c_long, [ctypes.c_int]),
        ("sc_lay", None, [_int, _pointer, ctypes.c_long, ctypes.c_long, _pointer]),
        ("sc_scratch", ctypes.c_long, [ctypes.c_long]),
        ("sc_start", None, [_pointer, _pointer, ctypes.c_long]),
        ("sc_stop", None, [_pointer]),
        ("sc_pass", None, [_pointer, ctypes.c_int, *[_pointer] * 5]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, given
    kinds = (Program, Layer, Mlp, Matrix, Norm)
    sizes = [loaded.sc_sizes(i) for i in range(len(kinds))]
    assert sizes == [ctypes.sizeof(kind) for kind in kinds], "program.h and library.py disagree"
    return loaded


def is_built() -> bool:
    """Whether the pass for this processor is in the cache folder."""
    return _target("native").exists()


def _target(march: str) -> Path:
    """A file whose name tells the source, the flags and the processor apart."""
    told = [*_sources(), *FLAGS, march, processor() if march == "native" else ""]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    return cache_folder() / "native" / f"pass-{key}.so"


def _sources() -> list[str]:
    return [path.read_text() for path in sorted([SOURCE, *SOURCE.parent.glob("*.h")])]


def processor() -> str:
    """What this processor can do, as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def usable_cores() -> int:
    """Cores that this process may use; at most $OMP_NUM_THREADS where that is a number, as PyTorch has it."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(found, int(asked)) if asked.isdecimal() and int(asked) else found


def _compile(march: str, target: Path) -> None:
    found = compiler()
    if found is None:
        raise ScantlingInputError(f"no C++ compiler was found to make the pass for {march}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            flags = [*FLAGS, f"-march={march}"] if march != "native" or platform.machine() != "arm64" else list(FLAGS)
            done = subprocess.run(
                [found, *flags, "-o", str(made), str(SOURCE)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
                raise ScantlingInputError(f"{found} does not compile the pass: {first}")
            # Renamed when it is whole: another process may be about to load it.
            made.replace(target)
    except OSError as error:
        raise ScantlingInputError(f"the compiled pass cannot be kept in {target.parent}: {error}") from None
