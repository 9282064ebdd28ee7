"""llama.cpp in a process of its own, since a file that it dislikes may end the process.

Reads {"model", "prompts": [[id, ...], ...], "n_probs"} from stdin and writes, for every prompt, what comes next as
{id: log-probability} of the `n_probs` likeliest tokens. Prompts that continue each other reuse the cache.
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
    params.n_ctx = max(map(len, asked["prompts"])) + 8
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.swa_full = True
    server = xllamacpp.Server(params)

    def next_of(prompt: list[int]) -> dict[str, float]:
        body = {
            "prompt": prompt,
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
            answer: Any = json.load(response)
        (place,) = answer["completion_probabilities"]
        return {str(top["id"]): top["logprob"] for top in place["top_logprobs"]}

    print("answer:" + json.dumps([next_of(prompt) for prompt in asked["prompts"]]))


main()
