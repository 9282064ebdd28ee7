"""One contender in a process of its own: its threads, its libraries and its memory are nobody else's.

Requests come as JSON lines on standard input, answers go as JSON lines to what was standard output when it began; what
libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scantling.benches.plan import Load
from scantling.benches.resident import begin_mark, most_resident
from scantling.errors import ScantlingError

if TYPE_CHECKING:
    from scantling.model import Model
    from scantling.text.tokenizer import Tokenizer

COMPUTING = ("float32", "bfloat16", "float16")
"""Of the weights of a net; other widths are those of packed matrices and of files."""


class Runner(Protocol):
    """What a contender is to the loop below.

    Attributes:
        weights_bytes, read_bytes: of all weights, and of those that a step reads; None where the parts tell.
    """

    weights_bytes: int | None
    read_bytes: int | None

    def run(self, load: Load) -> dict[str, Any]:
        """Seconds to the first token, seconds of the steps after it, how many tokens these made, bytes of the cache."""


def loaded(asked: dict[str, Any]) -> Model:
    """The model with its weights; initial ones where it has none.

    Raises:
        ScantlingError: as `scantling.load` and `scantling.new`.
    """
    from scantling import loading

    dtype = asked["dtype"] if asked["dtype"] in COMPUTING else None
    if asked["initial"]:
        return loading.from_card(asked["model"], dtype=dtype or "float32")
    return loading.load(asked["model"], dtype=dtype, revision=asked["revision"])


def opened(asked: dict[str, Any]) -> Runner:
    """The contender that is asked for, loaded.

    Raises:
        ScantlingError: it does not take this model.
    """
    if asked["engine"] in ("llama.cpp", "llama-server"):
        from scantling.benches.llama_cpp import LlamaCpp

        return LlamaCpp(asked["file"], asked["vocab_size"], built=asked["engine"] == "llama-server")
    if asked["engine"] == "openvino":
        from scantling.benches.openvino import OpenVino

        return OpenVino(asked["file"], asked["vocab_size"])
    if asked["engine"] == "transformers":
        from scantling.benches.theirs import Transformers

        return Transformers(asked["file"], asked["dtype"], asked["family"], asked["vocab_size"])
    from scantling.benches.ours import Ours

    activations = "int8" if asked["engine"] == "packed-int8" else "exact"
    if asked["engine"].startswith("packed") and asked["width"] == "stored" and not asked["initial"]:
        from scantling.loading import load_packed

        return Ours(load_packed(asked["model"], activations=activations, revision=asked["revision"]))
    lm = loaded(asked)
    lm.net.requires_grad_(False).eval()
    if asked["engine"] == "compile":
        lm.compile()
    elif asked["engine"] != "torch":
        lm.pack(asked["width"], activations)
    return Ours(lm)


def lent_tokenizer(vocab_size: int) -> Tokenizer | None:
    """That of the default model, for a file whose reader wants one; None where it is not there or too large."""
    from scantling.loading import tokenizer_of

    try:
        found = tokenizer_of()
    except ScantlingError:
        return None
    return found if found.vocab_size <= vocab_size else None


def write(asked: dict[str, Any]) -> dict[str, Any]:
    """The model's weights as a peer reads them: a folder in the Hugging Face layout, or a GGUF file.

    Raises:
        ScantlingError: that layout cannot express it.
    """
    lm = loaded(asked)
    if asked["file"].endswith(".gguf"):
        from scantling.checkpoint.gguf_write import write_gguf

        if lm.tokenizer is None:
            lm.tokenizer = lent_tokenizer(lm.card.vocab_size)
        write_gguf(lm, asked["file"], asked["kind"])
    else:
        from scantling.saving import save

        save(lm, asked["file"])
    return {"bytes": sum(path.stat().st_size for path in Path(asked["file"]).parent.rglob("*") if path.is_file())}


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    runner: Runner | None = None
    for line in sys.stdin:
        asked, found = json.loads(line), dict[str, Any]()
        try:
            if asked["do"] == "write":
                found = write(asked)
            elif asked["do"] == "open":
                began = time.perf_counter()
                runner = opened(asked)
                found = {"seconds": time.perf_counter() - began}
                found |= {"weights_bytes": runner.weights_bytes, "read_bytes": runner.read_bytes}
            elif asked["do"] == "mark":
                found = {"marked": begin_mark(getattr(runner, "process", None))}
            elif asked["do"] == "memory":
                found = {"most": most_resident(getattr(runner, "process", None))}
            else:
                assert runner is not None
                found = runner.run(Load(**asked["load"]))
        except ScantlingError as error:
            found = {"error": str(error)}
        except ModuleNotFoundError as error:
            found = {"error": f"{error.name} is not installed"}
        except (RuntimeError, MemoryError, OSError) as error:
            found = {"error": (str(error).splitlines() or [type(error).__name__])[0]}
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    if runner is not None and hasattr(runner, "close"):
        runner.close()
    # Nothing is left to write, and what large libraries do at the end takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
