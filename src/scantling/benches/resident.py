"""The memory that a process holds, and the most that it held."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Bytes that this process holds in memory now, its libraries included; None where the system does not tell."""
    return _line("VmRSS")


def most_resident() -> int | None:
    """The most that it held since `begin_mark`, or since it began."""
    return _line("VmHWM")


def begin_mark() -> bool:
    """Set the mark of `most_resident` back to what is held now; whether the system lets us (Linux, 5 to clear_refs)."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _line(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
