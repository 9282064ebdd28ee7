"""llama.cpp on a GGUF file, by its own clock, which counts each phase alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from scantling.benches.plan import Load, prompts
from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.checkpoint.gguf import GGUFTensor


PROGRAM = "llama-server"
"""Of a build of llama.cpp, as PATH finds it."""
_START = 120.0
"""Seconds that the program may take to load a file."""


class LlamaCpp:
    """Its server: flash attention, a thread per core, no mapped file, prompts in one batch.

    Args:
        file: GGUF.
        vocab_size: ids below this are drawn.
        built: the program `llama-server` of PATH, such as one compiled for this processor; else the wheel `xllamacpp`.

    Raises:
        ScantlingInputError: the file has no tokenizer, or no such program is found.
    """

    read_bytes: int | None = None
    weights_bytes: int | None = None

    def __init__(self, file: str, vocab_size: int, built: bool = False) -> None:
        from scantling.checkpoint.gguf import read_gguf

        self._file, self._vocab_size, self._built = file, vocab_size, built
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
            self.close()
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

    @property
    def process(self) -> int | None:
        """That of the program; None where the server is within this one."""
        return self._server.process if isinstance(self._server, _Program) else None

    def close(self) -> None:
        """End the server."""
        if isinstance(self._server, _Program):
            self._server.close()
        self._server, self._shape = None, None

    def _open(self, rows: int, positions: int, prompt_tokens: int) -> Any:
        context, batch = rows * -(-positions // 256) * 256, max(2048, prompt_tokens)
        if self._built:
            return _Program(self._file, rows, context, batch)
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = self._file
        params.n_parallel, params.n_ctx, params.n_batch = rows, context, batch
        params.n_gpu_layers = 0
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = cores()
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.warmup, params.verbosity = False, -1
        try:
            return xllamacpp.Server(params)
        except RuntimeError as error:
            raise ScantlingInputError(f"llama.cpp does not load this model: {str(error)[:160]}") from None


class _Program:
    """`llama-server` in a process of its own.

    Raises:
        ScantlingInputError: it is not on PATH, or it ends before it listens.
    """

    def __init__(self, file: str, rows: int, context: int, batch: int) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            raise ScantlingInputError(f"{PROGRAM} is not on PATH; build llama.cpp and put its folder there")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        threads = str(cores())
        options = {"-m": file, "-np": str(rows), "-c": str(context), "-b": str(batch), "-t": threads, "-tb": threads}
        options |= {"-fa": "on", "--host": "127.0.0.1", "--port": port}
        command = [program, *(word for pair in options.items() for word in pair), *_unmapped(program), "--no-warmup"]
        self.listening_address = f"http://127.0.0.1:{port}"
        # What it prints is kept for the sentence of a failure.
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115
        self._running = subprocess.Popen(command, stdout=self._noise, stderr=self._noise, stdin=subprocess.DEVNULL)
        self.process = self._running.pid
        self._wait()

    def close(self) -> None:
        """End it."""
        self._running.kill()
        self._running.wait()
        self._noise.close()

    def _wait(self) -> None:
        end = time.monotonic() + _START
        while time.monotonic() < end and self._running.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.listening_address}/health"):
                return
            time.sleep(0.05)
        self._running.kill()
        self._noise.seek(0)
        last = self._noise.read().decode(errors="replace").strip().splitlines()[-1:]
        self.close()
        raise ScantlingInputError(f"{PROGRAM} does not load this model: {''.join(last)[:160]}")


def _unmapped(program: str) -> list[str]:
    """How this build is told to read the file and not to map it."""
    said = subprocess.run([program, "--help"], capture_output=True, text=True, errors="replace", check=False).stdout
    return ["--load-mode", "none"] if "--load-mode" in said else ["--no-mmap"]


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
