"""What the configs of all encoder-decoders share."""

from __future__ import annotations

from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.header import shown
from scantling.errors import ScantlingInputError

GENERATION = frozenset(
    {
        "bad_words_ids",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "force_bos_token_to_be_generated",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_past",
        "remove_invalid_values",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "use_cache",
    }
)
"""Settings of their text generation, which older configs hold: no sizes and no logits depend on them."""


def architecture(keys: Keys, *known: str) -> str:
    """The class that the weights were saved from; the first of `known` where the config names none.

    Raises:
        ScantlingInputError: another class: its head is not one that an encoder-decoder's card can have; or one stack.
    """
    keys.only("is_encoder_decoder", True)
    keys.only("is_decoder", False)
    named = keys.raw("architectures", [known[0]])
    found = named[0] if isinstance(named, list) and len(named) == 1 else named
    if found not in known:
        right = f"known: {', '.join(known)}"
        raise ScantlingInputError(f"{keys.where}: architectures is {shown(named)}, which is not supported; {right}")
    return str(found)
