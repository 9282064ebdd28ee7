"""transformers on the same weights: `generate` as it comes, or an encoder's forward and the mean of its states."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import torch

from scantling.benches.plan import Load, prompts
from scantling.errors import ScantlingInputError


class Transformers:
    """A folder in the Hugging Face layout, by transformers' own class.

    Args:
        family: decoder, encoder or encoder-decoder.
        vocab_size: ids below this are drawn.
    """

    read_bytes: int | None = None
    weights_bytes: int | None = None

    def __init__(self, folder: str, dtype: str, family: str, vocab_size: int) -> None:
        transformers: Any = import_module("transformers")
        transformers.logging.set_verbosity_error()
        classes = {
            "decoder": transformers.AutoModelForCausalLM,
            "encoder": transformers.AutoModel,
            "encoder-decoder": transformers.AutoModelForSeq2SeqLM,
        }
        try:
            self._model = classes[family].from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            line = str(error).splitlines()[0][:160]
            raise ScantlingInputError(f"transformers does not load this model: {line}") from None
        self._family, self._vocab_size = family, vocab_size
        if family != "encoder":
            self._model.generation_config.eos_token_id = None
            self._model.generation_config.pad_token_id = 0

    def run(self, load: Load) -> dict[str, Any]:
        """As `Ours.run`."""
        ids = torch.tensor(prompts(load, self._vocab_size))
        mask = torch.ones_like(ids)
        at: list[float] = []

        def clock(seen: Any, _: Any) -> Any:
            at.append(time.perf_counter())
            return torch.zeros(len(seen), dtype=torch.bool)

        began = time.perf_counter()
        with torch.inference_mode():
            if self._family == "encoder":
                torch.nn.functional.normalize(self._model(ids, attention_mask=mask).last_hidden_state.float().mean(1))
                at.append(time.perf_counter())
            else:
                self._model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=load.tokens + 1,
                    do_sample=False,
                    num_beams=1,
                    stopping_criteria=[clock],
                )
        return {
            "first_seconds": at[0] - began,
            "decode_seconds": at[-1] - at[0],
            "made": load.batch * (len(at) - 1),
            "cache_bytes": None,
        }
