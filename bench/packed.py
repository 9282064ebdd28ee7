"""Decoding of packed weights as they are shipped (Q4_1 and Q8_0), beside llama.cpp: batch 1, batches, prefill.

usage: python bench/packed.py [--rounds 5] [--tokens 96] [--prompt 128] [--batch 8,32]
"""

from __future__ import annotations

import argparse
import json
import random
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from race import machine, race, report

import scantling
from scantling.checkpoint.families.gguf import architecture, card_of_gguf
from scantling.checkpoint.find import default_model
from scantling.checkpoint.gguf import read_gguf
from scantling.native.decoder import Decoder, usable_cores
from scantling.native.packed import Packed
from scantling.native.program import outline
from scantling.native.weights import OfGGUF


def ours(slots: int, capacity: int, quantised: bool) -> Decoder:
    """The packed decoder of the default model."""
    path = default_model()
    header = read_gguf(path)
    card = card_of_gguf(header.metadata, header.tensors, str(path))
    model = scantling.assemble(card)
    found = outline(model)
    assert not isinstance(found, str)
    rows = tuple(architecture(header.metadata, str(path)).rows(card))
    weights = OfGGUF(header, rows, model.named_weights)
    return Decoder(Packed(found, weights, keep=True), slots=slots, capacity=capacity, quantised=quantised)


def read_in(decoder: Decoder, prompts: list[list[int]]) -> list[int]:
    """Every prompt into its slot, 32 rows a pass: the first new token of each."""
    first = []
    for slot, prompt in enumerate(prompts):
        for start in range(0, len(prompt), decoder.most_rows):
            ids = prompt[start : start + decoder.most_rows]
            wanted = [False] * (len(ids) - 1) + [start + len(ids) == len(prompt)]
            best = decoder.run(ids, [slot] * len(ids), range(start, start + len(ids)), wanted)
        first += best
    return first


def rate_of(decoder: Decoder, prompts: list[list[int]], tokens: int) -> Callable[[], float]:
    """Tokens per second of decoding, all slots together, the prompts read before."""

    def run() -> float:
        new, position, slots = read_in(decoder, prompts), len(prompts[0]), range(len(prompts))
        began = time.perf_counter()
        for i in range(tokens):
            new = decoder.run(new, slots, [position + i] * len(prompts), [True] * len(prompts))
        return tokens * len(prompts) / (time.perf_counter() - began)

    return run


def prefill_of(decoder: Decoder, prompt: list[int]) -> Callable[[], float]:
    """Tokens per second of reading a prompt."""

    def run() -> float:
        began = time.perf_counter()
        read_in(decoder, [prompt])
        return len(prompt) / (time.perf_counter() - began)

    return run


def llama_cpp(slots: int, capacity: int) -> Any:
    """llama.cpp's server on the same file, with flash attention and as many threads as cores."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(default_model())
    params.n_parallel, params.n_ctx = slots, slots * capacity
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = usable_cores()
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.warmup, params.verbosity = False, -1
    return xllamacpp.Server(params)


def their_rate(server: Any, prompts: list[list[int]], tokens: int, phase: str = "predicted") -> Callable[[], float]:
    """The same by the server's own clock, which counts the phase alone; rows of a batch run side by side."""

    def run() -> float:
        body = {"n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "prompt": prompts}
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{server.listening_address}/completion", data, kind)
        ) as got:
            answers = json.load(got)
        answers = answers if isinstance(answers, list) else [answers]
        return sum(float(answer["timings"][f"{phase}_per_second"]) for answer in answers)

    return run


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--batch", default="8,32")
    options.add_argument("--long-prompt", type=int, default=512)
    chosen = options.parse_args()
    print(machine("scantling", "xllamacpp"), f"; {usable_cores()} threads\n")
    draw = random.Random(0)
    capacity = chosen.prompt + chosen.tokens + 32
    for batch in (1, *map(int, filter(None, chosen.batch.split(",")))):
        prompts = [[draw.randrange(3, 49000) for _ in range(chosen.prompt)] for _ in range(batch)]
        decoders = {kind: ours(batch, capacity, kind == "8-bit activations") for kind in ("exact", "8-bit activations")}
        server = llama_cpp(batch, capacity)
        contenders = {"llama.cpp (xllamacpp wheel)": their_rate(server, prompts, chosen.tokens)}
        contenders |= {f"scantling, {kind}": rate_of(d, prompts, chosen.tokens) for kind, d in decoders.items()}
        figures = race(contenders, chosen.rounds)
        report(f"decode, batch {batch}, {chosen.tokens} tokens", "tokens/s", figures, next(iter(contenders)))
        del server
        for decoder in decoders.values():
            decoder.close()
    prompt = [draw.randrange(3, 49000) for _ in range(chosen.long_prompt)]
    decoders = {kind: ours(1, chosen.long_prompt + 32, kind != "exact") for kind in ("exact", "8-bit activations")}
    server = llama_cpp(1, chosen.long_prompt + 32)
    contenders = {"llama.cpp (xllamacpp wheel)": their_rate(server, [prompt], 1, "prompt")}
    contenders |= {f"scantling, {kind}": prefill_of(decoder, prompt) for kind, decoder in decoders.items()}
    report(
        f"prefill, {chosen.long_prompt} tokens",
        "tokens/s",
        race(contenders, chosen.rounds),
        "llama.cpp (xllamacpp wheel)",
    )


if __name__ == "__main__":
    main()
