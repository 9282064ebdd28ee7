"""The memory that a process holds, and the most that it held."""

from __future__ import annotations

from pathlib import Path

_PROCESSES = Path("/proc")


def resident() -> int | None:
    """Bytes that this process holds in memory now, its libraries included; None where the system does not tell."""
    return _line("VmRSS")


def most_resident(process: int | None = None) -> int | None:
    """The most that it, or the process of that number, held since `begin_mark`, or since it began."""
    return _line("VmHWM", process)


def begin_mark(process: int | None = None) -> bool:
    """Set the mark of `most_resident` back to what is held now; whether the system lets us (Linux, 5 to clear_refs)."""
    try:
        (_PROCESSES / str(process or "self") / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _line(name: str, process: int | None = None) -> int | None:
    try:
        lines = (_PROCESSES / str(process or "self") / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
