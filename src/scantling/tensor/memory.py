"""Devices: whether one is there, and how much memory it has free."""

from __future__ import annotations

import os

import torch

from scantling.errors import ScantlingInputError


def device_of(name: str) -> torch.device:
    """The torch device of that name.

    Raises:
        ScantlingInputError: no such kind of device, or none on this machine.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        here = ["cpu", "meta"]
        here += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        here += ["mps"] if torch.backends.mps.is_available() else []
        raise ScantlingInputError(f"no device {name!r} on this machine; there are {', '.join(here)}") from None
    return device


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`, or None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
