"""Decoding and prefill beside transformers: the same weights, dtype, prompt and number of tokens, one process.

usage: python bench/decode.py [--rounds 5] [--tokens 64] [--prompt 128] [--dtypes float32,bfloat16]
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from race import machine, race, report

import scantling
from scantling.checkpoint.families import family
from scantling.checkpoint.names import links
from scantling.generate.engine import Session


def original(lm: scantling.Model) -> Any:
    """The same weights in transformers' own class."""
    import transformers

    card = lm.card
    config = transformers.LlamaConfig(
        vocab_size=card.vocab_size,
        hidden_size=card.d_model,
        intermediate_size=card.mlp.d_ff,
        num_hidden_layers=card.n_layers,
        num_attention_heads=card.attention.n_heads,
        num_key_value_heads=card.attention.n_kv_heads,
        max_position_embeddings=card.context,
        rms_norm_eps=card.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": card.position.theta},
        tie_word_embeddings=card.tied,
        eos_token_id=None,
        pad_token_id=0,
    )
    ours, theirs = lm.net.state_dict(), {}
    for link in links(family("llama", "bench").rows(card), lm.parts.named_weights):
        theirs |= zip(link.theirs, link.transform.save([ours[name] for name in link.ours]), strict=True)
    model = transformers.LlamaForCausalLM(config).to(lm.dtype)
    model.load_state_dict(theirs, strict=False)
    return model.eval()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--long-prompt", type=int, default=512)
    options.add_argument("--dtypes", default="float32,bfloat16")
    chosen = options.parse_args()
    print(machine("scantling", "torch", "transformers"), f"; {torch.get_num_threads()} threads\n")
    for dtype in chosen.dtypes.split(","):
        lm = scantling.load(dtype=dtype)
        peer = original(lm)
        ids = torch.randint(3, 49000, (1, chosen.prompt), generator=torch.Generator().manual_seed(0))
        long = torch.randint(3, 49000, (1, chosen.long_prompt), generator=torch.Generator().manual_seed(1))
        texts: dict[str, Any] = {}

        def ours(lm: Any = lm, ids: Any = ids, texts: Any = texts) -> float:
            start = time.perf_counter()
            lm.generate(ids, 1, ignore_eos=True)
            middle = time.perf_counter()
            texts["scantling"] = lm.generate(ids, chosen.tokens + 1, ignore_eos=True)
            return chosen.tokens / (time.perf_counter() - middle - (middle - start))

        def theirs(peer: Any = peer, ids: Any = ids, texts: Any = texts) -> float:
            mask = torch.ones_like(ids)
            start = time.perf_counter()
            peer.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
            middle = time.perf_counter()
            texts["transformers"] = peer.generate(
                ids, attention_mask=mask, max_new_tokens=chosen.tokens + 1, do_sample=False
            )
            return chosen.tokens / (time.perf_counter() - middle - (middle - start))

        figures = race({"transformers.generate": theirs, "scantling": ours}, chosen.rounds)
        report(f"decode, batch 1, {dtype}, {chosen.tokens} tokens", "tokens/s", figures, "transformers.generate")
        same = int((texts["scantling"] == texts["transformers"]).sum()) - chosen.prompt
        print(f"  equal tokens: {same} of {chosen.tokens + 1}\n")

        def our_prefill(lm: Any = lm, long: Any = long) -> float:
            session = Session(lm, 1, chosen.long_prompt + 1)
            start = time.perf_counter()
            with torch.inference_mode():
                session.prefill(long)
            return chosen.long_prompt / (time.perf_counter() - start)

        def their_prefill(peer: Any = peer, long: Any = long) -> float:
            start = time.perf_counter()
            with torch.inference_mode():
                peer(long, logits_to_keep=1, use_cache=True)
            return chosen.long_prompt / (time.perf_counter() - start)

        figures = race({"transformers forward": their_prefill, "scantling": our_prefill}, chosen.rounds)
        report(f"prefill, {dtype}, {chosen.long_prompt} tokens", "tokens/s", figures, "transformers forward")


if __name__ == "__main__":
    main()
