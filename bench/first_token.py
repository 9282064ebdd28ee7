"""Time to the first token with everything before it: a process starts, loads the model as it is shipped, and answers.

usage: python bench/first_token.py [--rounds 5]

Each contender is a whole process that ends when the first new token of a short prompt is there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

from race import machine, race, report

from scantling.checkpoint.find import default_model

PROMPT = "The capital of France is"
OURS = ["-m", "scantling", "generate", PROMPT, "--max-new-tokens", "1"]
CONTENDERS = {
    "scantling generate": OURS,
    "scantling generate, torch": [*OURS, "--engine", "torch"],
    "scantling generate, packed": [*OURS, "--engine", "packed"],
    "scantling generate, packed-int8": [*OURS, "--engine", "packed-int8"],
}
LLAMA_CPP = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = sys.argv[1], 1, 512
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
params.warmup, params.verbosity = False, -1
xllamacpp.Server(params).handle_completions({"prompt": sys.argv[2], "n_predict": 1, "temperature": 0})
"""
OPENVINO = """
import sys, openvino_genai
pipe = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[3]))
pipe.generate(sys.argv[2], max_new_tokens=1)
"""
TRANSFORMERS = """
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import pathlib, torch, transformers
path = pathlib.Path(sys.argv[1])
source = {"gguf_file": path.name}
tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **source)
model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **source, dtype=torch.bfloat16)
model.generate(**tokenizer(sys.argv[2], return_tensors="pt"), max_new_tokens=1, do_sample=False)
"""
PEERS = {
    "llama.cpp": ("xllamacpp", LLAMA_CPP),
    "openvino-genai": ("openvino_genai", OPENVINO),
    "transformers, bfloat16": ("transformers", TRANSFORMERS),
}


def process(arguments: list[str]) -> Callable[[], float]:
    """Seconds of one process of this Python."""

    def run() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)
        return time.perf_counter() - began

    return run


def main() -> None:
    from scantling.benches.llama_cpp import cores

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    print(machine("scantling", "torch", "xllamacpp", "openvino-genai", "transformers"), "\n")
    runs = {name: process(arguments) for name, arguments in CONTENDERS.items()}
    absent = {}
    for name, (module, code) in PEERS.items():
        if find_spec(module) is None:
            absent[name] = f"{module} is not installed"
        else:
            runs[name] = process(["-c", code, str(default_model()), PROMPT, str(cores())])
    able = {}
    for name, run in runs.items():
        try:
            run()
        except subprocess.CalledProcessError as error:
            absent[name] = (error.stderr.strip().splitlines() or ["no message"])[-1][:160]
        else:
            able[name] = run
    report("first token, whole process", "s", race(able, given.rounds), "llama.cpp", False, absent)


if __name__ == "__main__":
    main()
