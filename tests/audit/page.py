"""The table of probes in docs/audit.md, made from the registry.

``python -m tests.audit.page --write`` rewrites it; a test fails where it is out of date.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scantling.audits.probes import PROBES

PATH = Path(__file__).parents[2] / "docs" / "audit.md"
START, END = "<!-- probes: written by `python -m tests.audit.page --write` -->\n", "<!-- end of probes -->\n"


def table() -> str:
    """A row per probe: its name, what it asks, and how many faults and near-faults are planted."""
    rows = ["| probe | asks | planted faults | near-faults |", "|---|---|---|---|"]
    for probe in PROBES.values():
        faults = sum(plant.faulty for plant in probe.plants)
        rows.append(f"| `{probe.name}` | {probe.asks} | {faults} | {len(probe.plants) - faults} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page with the table as it is now."""
    before, _, rest = PATH.read_text(encoding="utf-8").partition(START)
    return before + START + table() + END + rest.partition(END)[2]


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PATH.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
