"""llama.cpp in a process of its own, since a file that it dislikes may end the process.

Reads {"model", "batches": [[[id, ...], ...], ...], "n_probs"} from stdin and writes, for every prompt of every batch,
what comes next as {id: log-probability} of the `n_probs` likeliest tokens. The prompts of a batch run side by side, and
those of the next batch that continue them reuse the cache.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import xllamacpp


def main() -> None:
    asked = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    width = max(map(len, asked["batches"]))
    longest = max(len(prompt) for batch in asked["batches"] for prompt in batch)
    params.n_parallel = width
    params.n_ctx = width * -(-(longest + 8) // 256) * 256
    params.n_gpu_layers = 0
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.swa_full = True
    server = xllamacpp.Server(params)

    def next_of(batch: list[list[int]]) -> list[dict[str, float]]:
        body = {
            "prompt": batch,
            "n_predict": 1,
            "n_probs": asked["n_probs"],
            "temperature": 0.0,
            "cache_prompt": True,
            "ignore_eos": True,
        }
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/completion", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            found: Any = json.load(response)
        answers = sorted(found, key=lambda answer: answer["index"]) if isinstance(found, list) else [found]
        places = [answer["completion_probabilities"][0]["top_logprobs"] for answer in answers]
        return [{str(top["id"]): top["logprob"] for top in place} for place in places]

    print("answer:" + json.dumps([next_of(batch) for batch in asked["batches"]]))


main()
