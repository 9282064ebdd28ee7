"""llama.cpp's embeddings in a process of its own, since a file that it dislikes may end the process.

Reads {"model", "texts": [text, ...]} from stdin and writes {"ids": [[id, ...], ...], "vectors": [...]}: how it cuts
each text, with its marks, and what its embeddings endpoint gives: a list of one vector, or of one per token where the
file asks for no pooling.
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
    params.embedding = True
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)

    def answer(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        address = f"{server.listening_address}/{path}"
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    ids, vectors = [], []
    for text in asked["texts"]:
        ids.append(answer("tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"])
        (found,) = answer("embeddings", {"content": text})
        vectors.append(found["embedding"])
    print("answer:" + json.dumps({"ids": ids, "vectors": vectors}))


main()
