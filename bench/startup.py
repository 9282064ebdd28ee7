"""Process time of the commands that need no tensors, and time to the first token, beside peers that are installed.

usage: python bench/startup.py [--rounds 7] [--peers]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

from race import machine, race, report

COMMANDS = {
    "scantling --help": ["-m", "scantling", "--help"],
    "scantling count llama-3-8b": ["-m", "scantling", "count", "llama-3-8b"],
    "scantling flops llama-3-8b": ["-m", "scantling", "flops", "llama-3-8b"],
    "scantling trace llama-3-8b": ["-m", "scantling", "trace", "llama-3-8b"],
    "scantling cards": ["-m", "scantling", "cards"],
    "scantling count --all": ["-m", "scantling", "count", "--all"],
    "bare Python": ["-c", "pass"],
}
TRANSFORMERS = "import transformers; transformers.LlamaConfig, transformers.LlamaForCausalLM"
FIRST_TOKEN = ["-m", "scantling", "generate", "The capital of France is", "--max-new-tokens", "1"]
TORCH = ["-c", "import torch"]


def process(arguments: list[str]) -> Callable[[], float]:
    """Seconds of one process of this Python."""

    def run() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        return time.perf_counter() - start

    return run


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--peers", action="store_true", help="also import transformers' Llama classes")
    chosen = options.parse_args()
    print(machine("scantling", "torch", "transformers"), "\n")
    light = {name: process(arguments) for name, arguments in COMMANDS.items()}
    report("process time", "s", race(light, chosen.rounds), "scantling count llama-3-8b", higher_is_better=False)
    heavy = {"import torch": process(TORCH), "generate, first token, whole process": process(FIRST_TOKEN)}
    if chosen.peers:
        heavy["import transformers' Llama"] = process(["-c", TRANSFORMERS])
    report("first token", "s", race(heavy, max(1, chosen.rounds // 2)), "import torch", higher_is_better=False)


if __name__ == "__main__":
    main()
