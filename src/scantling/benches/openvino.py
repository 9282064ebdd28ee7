"""openvino-genai on a GGUF file, which it converts as it loads; by its own clock."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from scantling.benches.llama_cpp import cores, stored_bytes
from scantling.benches.plan import Load, prompts
from scantling.errors import ScantlingInputError


class OpenVino:
    """`LLMPipeline` on the CPU, a thread per core, in the arithmetic that it chooses for this processor.

    Args:
        vocab_size: ids below this are drawn.

    Raises:
        ScantlingInputError: it does not read this file.
    """

    read_bytes: int | None = None
    weights_bytes: int | None = None

    def __init__(self, file: str, vocab_size: int) -> None:
        from scantling.checkpoint.gguf import read_gguf

        self.weights_bytes, self.read_bytes = stored_bytes(read_gguf(file).tensors)
        genai: Any = import_module("openvino_genai")
        self._vocab_size, self._config, self._runs = vocab_size, genai.GenerationConfig(), 0
        self._config.ignore_eos, self._config.do_sample = True, False
        try:
            self._pipe = genai.LLMPipeline(file, "CPU", INFERENCE_NUM_THREADS=cores())
        except RuntimeError as error:
            line = " ".join(str(error).split())
            raise ScantlingInputError(f"openvino-genai does not load this file: {line[-200:]}") from None

    def run(self, load: Load) -> dict[str, Any]:
        """As `Ours.run`."""
        import numpy as np

        if load.batch != 1:
            raise ScantlingInputError("openvino-genai takes one prompt of ids at a time")
        openvino: Any = import_module("openvino")
        given = np.array(prompts(load, self._vocab_size), np.int64)
        # It keeps what it read before, and would not read the same prompt again.
        self._runs += 1
        given[:, 0] = (given[:, 0] + self._runs) % self._vocab_size
        ids = openvino.Tensor(given)
        self._config.max_new_tokens = self._config.min_new_tokens = load.tokens + 1
        metrics = self._pipe.generate(ids, self._config).perf_metrics
        return {
            "first_seconds": 1e-3 * metrics.get_ttft().mean,
            "decode_seconds": 1e-3 * metrics.get_tpot().mean * load.tokens,
            "made": load.batch * load.tokens,
            "cache_bytes": None,
        }
