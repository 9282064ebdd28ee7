"""The outputs in docs/lens.md, printed by the commands above them.

``python -m tests.lens.page --write`` rewrites them; a test fails where they are out of date.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from pathlib import Path

from tests.lens.steered import steered, table

import scantling as sc
from scantling.cli.main import _run

PATH = Path(__file__).parents[2] / "docs" / "lens.md"
BLOCK = re.compile(r"^```console\n\$ scantling (?P<words>.*)\n(?:.*\n)*?```$", re.MULTILINE)

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
STEERED = re.compile(r"(?<=<!-- steered: written by `python -m tests.lens.page --write` -->\n)(?:\|.*\n)*")


def output(words: str) -> str:
    """What a command prints on standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = _run(shlex.split(words))
    assert status == 0, words
    return out.getvalue().strip("\n")


def page() -> str:
    """The page with every output of a command as it is now."""
    text = PATH.read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: f"```console\n$ scantling {found['words']}\n{output(found['words'])}\n```", text)


def pieces(text: str) -> tuple[list[str], list[float]]:
    """The words of a page, and its numbers apart."""
    numbers = [float(found.replace(",", "")) for found in NUMBER.findall(text)]
    return NUMBER.sub("0", text).split(), numbers


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        figures = table(steered(sc.load()))
        PATH.write_text(STEERED.sub(f"{figures}\n", page()), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
