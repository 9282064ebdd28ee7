"""Time of a process, wall and processor, and peak memory of `scantling inspect` on published models, headers only.

usage: python -m bench.inspect_headers [--rounds 5] [NAME...]     from the root of the repository
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.checkpoint.header_files import header_folder, shapes_of_config
from tests.conftest import GOLDEN

MODELS = ("llama-3.1-405b", "deepseek-v3", "mixtral-8x22b-v0.1", "llama-2-70b", "smollm2-135m")
CHILD = """
import sys, json, time
from scantling.cli.main import _run
status = _run(["inspect", sys.argv[1]])
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([time.process_time(), int(lines["VmHWM"].split()[0]) * 1024]), file=sys.stderr)
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", default=MODELS)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    print("| model | tensors | files | GB of weights | seconds, median | of the processor, median | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name in chosen.names:
        config = GOLDEN / "configs" / f"{name}.json"
        with tempfile.TemporaryDirectory() as place:
            shapes = shapes_of_config(config)
            folder = header_folder(Path(place) / name, shapes, config)
            files = list(folder.glob("*.safetensors"))
            size = sum(file.stat().st_size for file in files)
            seconds, busy, peaks = [], [], []
            for _ in range(chosen.rounds):
                start = time.perf_counter()
                done = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True)
                seconds.append(time.perf_counter() - start)
                used, peak = json.loads(done.stderr.splitlines()[-1])
                busy.append(used)
                peaks.append(peak)
        figures = f"{size / 1e9:.1f} | {median(seconds):.2f} | {median(busy):.2f} | {max(peaks) / 1e6:.0f}"
        print(f"| {name} | {len(shapes):,} | {len(files)} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
