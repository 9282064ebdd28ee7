"""Perplexity of SmolLM2-135M on a fixed real text: every engine and dtype of ours, beside llama.cpp on the same file.

usage: python bench/perplexity.py [--tokens 512] [--engines packed,packed-int8,bfloat16,float32] [--json]

The text is the licence of CPython as the tests have it. Each token after the first is judged once, on all before it.
llama.cpp's probability of a token is the one that its server reports, before sampling, for a token that a bias makes it
choose; one request per token, which reuses the cache.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from race import machine

import scantling
from scantling.benches.llama_cpp import cores
from scantling.checkpoint.find import default_model
from scantling.errors import ScantlingError
from scantling.generate.session import begin
from scantling.loading import tokenizer_of

TEXT = Path(__file__).parent.parent / "tests" / "data" / "cpython-license.txt"
AT_ONCE = 128
"""Positions whose logits are held together."""


def logs_of(lm: scantling.Model, ids: Sequence[int]) -> list[float]:
    """Log-probability of each token after the first, by whatever the model decodes with."""
    rows, found = torch.tensor([ids]), list[float]()
    with torch.inference_mode():
        session, logits, _ = begin(lm, rows[:, :1], len(ids))
        found.append(float(logits.float().log_softmax(-1)[0, ids[1]]))
        for start in range(1, len(ids) - 1, AT_ONCE):
            piece = rows[:, start : min(start + AT_ONCE, len(ids) - 1)]
            logs = session.score(piece)[0].float().log_softmax(-1)
            wanted = rows[0, start + 1 : start + 1 + piece.shape[1], None]
            found += logs.gather(-1, wanted)[:, 0].tolist()
    return found


def ours(engine: str) -> Callable[[Sequence[int]], list[float]]:
    """An engine, or torch in a dtype."""
    packed = engine.startswith("packed")
    lm = scantling.load(dtype=None if packed else engine)
    if packed:
        lm.pack(activations="int8" if engine == "packed-int8" else "exact")
    return lambda ids: logs_of(lm, ids)


def llama_cpp(ids: Sequence[int]) -> list[float]:
    """The same by llama.cpp's server, with its default cache and kernels."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(default_model())
    params.n_parallel, params.n_ctx = 1, -(-(len(ids) + 8) // 256) * 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = cores()
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)
    found = []
    for end in range(1, len(ids)):
        body = {
            "prompt": list(ids[:end]),
            "n_predict": 1,
            "n_probs": 1,
            "temperature": 0,
            "cache_prompt": True,
            "logit_bias": [[ids[end], 1000.0]],
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            (place,) = json.load(answer)["completion_probabilities"]
        assert place["id"] == ids[end], "the bias did not decide"
        found.append(float(place["logprob"]))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--engines", default="float32,bfloat16,packed,packed-int8")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    ids = tokenizer_of().encode(TEXT.read_text("utf-8"))[: given.tokens]
    judged: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    runs: dict[str, Callable[[], list[float]]] = {
        name: lambda name=name: ours(name)(ids) for name in given.engines.split(",")
    }
    for name, run in {**runs, "llama.cpp": lambda: llama_cpp(ids)}.items():
        print(f"judging with {name} ...", file=sys.stderr)
        try:
            judged[name] = run()
        except (ScantlingError, ModuleNotFoundError) as error:
            absent[name] = str(error)
    base = judged.get("float32")
    rows = [_row(name, logs, base) for name, logs in judged.items()]
    if given.json:
        print(json.dumps({"text": TEXT.name, "tokens": len(ids) - 1, "rows": rows, "absent": absent}, indent=2))
        return
    print(machine("scantling", "torch", "xllamacpp"), "\n")
    print(f"{default_model().name} on {len(ids) - 1} tokens of {TEXT.name}")
    for row in rows:
        apart = row["largest_difference"]
        beside = "" if apart is None else f"   from float32: mean {row['mean_difference']:.1e}, at most {apart:.1e}"
        print(f"  {row['engine']:14} perplexity {row['perplexity']:9.4f}{beside}")
    for name, why in absent.items():
        print(f"  {name:14} did not run: {why}")


def _row(name: str, logs: Sequence[float], base: Sequence[float] | None) -> dict[str, Any]:
    apart = None if base is None else [abs(a - b) for a, b in zip(logs, base, strict=True)]
    return {
        "engine": name,
        "perplexity": math.exp(-statistics.fmean(logs)),
        "mean_difference": None if apart is None else statistics.fmean(apart),
        "largest_difference": None if apart is None else max(apart),
    }


if __name__ == "__main__":
    main()
