"""llama.cpp on a GGUF file, by its own clock, which counts each phase alone."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scantling.benches.plan import Load, prompts
from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.checkpoint.gguf import GGUFTensor


class LlamaCpp:
    """The server of the wheel `xllamacpp`: flash attention, a thread per core, no mapped file, prompts in one batch.

    Args:
        file: GGUF.
        vocab_size: ids below this are drawn.

    Raises:
        ScantlingInputError: the file has no tokenizer.
    """

    read_bytes: int | None = None
    weights_bytes: int | None = None

    def __init__(self, file: str, vocab_size: int) -> None:
        from scantling.checkpoint.gguf import read_gguf

        self._file, self._vocab_size = file, vocab_size
        self._shape: tuple[int, int] | None = None
        self._server: Any = None
        header = read_gguf(file)
        if header.metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
            raise ScantlingInputError("llama.cpp's server wants a tokenizer in the file, and this model has none")
        self.weights_bytes, self.read_bytes = stored_bytes(header.tensors)

    def run(self, load: Load) -> dict[str, Any]:
        """As `Ours.run`."""
        shape = (load.batch, load.prompt + load.tokens + 1)
        if shape != self._shape:
            self._server, self._shape = None, None
            self._server, self._shape = self._open(*shape, load.batch * load.prompt), shape
        body = {
            "prompt": prompts(load, self._vocab_size),
            "n_predict": load.tokens + 1,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                found: Any = json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(200).decode(errors="replace")
            raise ScantlingInputError(f"llama.cpp refuses the prompts: {said}") from None
        times = [one["timings"] for one in (found if isinstance(found, list) else [found])]
        made = load.batch * load.tokens
        rate = sum(load.tokens / (1e-3 * float(t["predicted_ms"])) for t in times) if load.tokens else 1.0
        return {
            "first_seconds": 1e-3 * max(float(t["prompt_ms"]) for t in times),
            "decode_seconds": made / rate,
            "made": made,
            "cache_bytes": None,
        }

    def _open(self, rows: int, positions: int, prompt_tokens: int) -> Any:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = self._file
        params.n_parallel, params.n_ctx = rows, rows * -(-positions // 256) * 256
        params.n_batch = max(2048, prompt_tokens)
        params.n_gpu_layers = 0
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = cores()
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.warmup, params.verbosity = False, -1
        try:
            return xllamacpp.Server(params)
        except RuntimeError as error:
            raise ScantlingInputError(f"llama.cpp does not load this model: {str(error)[:160]}") from None


def stored_bytes(tensors: Mapping[str, GGUFTensor]) -> tuple[int, int]:
    """Bytes of all tensors of a file, and of those that a step reads: a table beside a head only looks up."""
    whole = sum(tensor.nbytes for tensor in tensors.values())
    table = tensors.get("token_embd.weight")
    return whole, whole if table is None or "output.weight" not in tensors else whole - table.nbytes


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
