"""Passes of a model of `transformers`: plain, by kernel, packed, over its cache, and as `generate` runs them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from scantling.audits import Feed
from scantling.audits.protocol import Cached, Maps, Run

KERNELS = ("sdpa", "eager")
_TWINS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


@contextmanager
def quietly() -> Iterator[None]:
    """Warnings of the library are not ours to print."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def arguments(model: Any) -> dict[str, inspect.Parameter]:
    """What its forward takes, by name."""
    return dict(inspect.signature(model.forward).parameters)


def cache_name(model: Any) -> str | None:
    """What its forward calls the cache."""
    return next((name for name in ("cache", "past_key_values") if name in arguments(model)), None)


def kernels(model: Any) -> list[str]:
    """The implementations of attention that it has on this machine; the one that it chose comes first."""
    chosen = str(model.config._attn_implementation)
    known = [k for k in KERNELS if k == "eager" or bool(getattr(model, "_supports_sdpa", False))]
    return [chosen, *(k for k in known if k != chosen)]


@contextmanager
def _kernel(model: Any, name: str | None) -> Iterator[Any]:
    """The model with another implementation of attention: itself, or where that cannot be changed a twin."""
    before = str(model.config._attn_implementation)
    if name is None or name == before:
        yield model
        return
    model.set_attn_implementation(name)
    try:
        yield model if str(model.config._attn_implementation) == name else _twin(model, name)
    finally:
        model.set_attn_implementation(before)


def _twin(model: Any, kernel: str) -> Any:
    """A second model of the same weights, kept as long as the first."""
    kept = _TWINS.setdefault(model, {})
    if kernel not in kept:
        twin = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=kernel)
        twin = twin.to(model.dtype).to(model.device)
        twin.load_state_dict(model.state_dict())
        kept[kernel] = twin.eval()
    return kept[kernel]


def given(model: Any, feed: Feed) -> dict[str, Any]:
    """The feed under the library's names."""
    if feed.source is None:
        named = {"input_ids": feed.ids, "attention_mask": feed.mask, "position_ids": feed.positions}
    else:
        named = {
            "input_ids": feed.source,
            "attention_mask": feed.source_mask,
            "decoder_input_ids": feed.ids,
            "decoder_attention_mask": feed.mask,
        }
    known = arguments(model)
    return {key: value for key, value in named.items() if value is not None and key in known}


def plain(model: Any, kernel: str | None = None, maps: bool = False, **more: Any) -> Run:
    """One pass without a cache, by a kernel, with attention maps asked for or not."""
    known = arguments(model)
    fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}
    fixed |= more
    if maps:
        fixed["output_attentions"] = True

    def run(feed: Feed) -> Tensor:
        with quietly(), _kernel(model, kernel) as chosen:
            return logits_of(chosen(**given(model, feed), **fixed), feed.tokens)

    return run


def maps(model: Any, kernel: str) -> Maps:
    """The attention maps that a kernel gives when it is asked: none where it has none."""
    run_with = {"use_cache": False} if "use_cache" in arguments(model) else {}
    name = "decoder_attentions" if model.config.is_encoder_decoder else "attentions"

    def run(feed: Feed) -> list[Tensor]:
        with quietly(), _kernel(model, kernel) as chosen:
            out = chosen(**given(model, feed), **run_with, output_attentions=True)
        return list(getattr(out, name, None) or ())

    return run


def logits_of(out: Any, tokens: int) -> Tensor:
    """(B, T, n); (B, 1, n) of a head that gives one answer per row."""
    found: Any = getattr(out, "logits", None)
    found = out.last_hidden_state if found is None else found
    if found.dim() == 2:
        found = found[..., None] if found.shape[1] == tokens else found[:, None]
    return found  # type: ignore[no-any-return]


def packed(model: Any) -> dict[str, Run]:
    """The ways to hand over a packed row: positions that start anew tell the documents apart."""
    ways = {"position_ids": plain(model)}
    ways["position_ids and a mask of ones"] = _masked(plain(model))
    if "use_cache" in arguments(model):
        ways["position_ids, use_cache as by default"] = plain(model, use_cache=True)
        ways["position_ids and a mask of ones, use_cache as by default"] = _masked(plain(model, use_cache=True))
    return ways


def _masked(run: Run) -> Run:
    return lambda feed: run(replace(feed, mask=torch.ones_like(feed.ids)))


def cached(model: Any) -> Cached:
    """Every logit of pieces over one cache."""
    name = cache_name(model)
    assert name is not None

    def run(feed: Feed, pieces: Sequence[int]) -> Tensor:
        store, encoded, outs, start = None, None, [], 0
        for tokens in pieces:
            end = start + tokens
            part = replace(
                feed,
                ids=feed.ids[:, start:end],
                mask=None if feed.mask is None else feed.mask[:, :end],
                positions=None if feed.positions is None else feed.positions[:, start:end],
            )
            named = given(model, part)
            if encoded is not None:
                named["encoder_outputs"] = encoded
                del named["input_ids"]
            with quietly():
                out = model(**named, use_cache=True, **{name: store})
            store = getattr(out, name, None)
            if feed.source is not None and encoded is None:
                encoded = (out.encoder_last_hidden_state,)
            outs.append(out.logits)
            start = end
        return torch.cat(outs, 1)

    return run


def generated(model: Any) -> Cached:
    """What `generate` computes while it is made to write the given ids: the logits before each."""

    def run(feed: Feed, pieces: Sequence[int]) -> Tensor:
        first, ids = pieces[0], feed.ids
        rest = ids.shape[1] - first

        def forced(row: int, written: Tensor) -> list[int]:
            at = min(len(written), ids.shape[1] - 1)
            return [int(ids[row, at])]

        named: dict[str, Any] = {"input_ids": ids[:, :first], "attention_mask": feed.mask}
        if feed.mask is not None:
            named["attention_mask"] = feed.mask[:, :first]
        if feed.source is not None:
            named = {"input_ids": feed.source, "attention_mask": feed.source_mask, "decoder_input_ids": ids[:, :first]}
        with quietly(), _endless(model):
            out = model.generate(
                **{key: value for key, value in named.items() if value is not None},
                max_new_tokens=rest + 1,
                do_sample=False,
                num_beams=1,
                prefix_allowed_tokens_fn=forced,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return torch.stack(out.logits, 1)

    return run


@contextmanager
def _endless(model: Any) -> Iterator[None]:
    """No token ends a text, and none is forced."""
    keys = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "bad_words_ids", "max_length")
    before = {key: getattr(model.generation_config, key, None) for key in keys}
    for key in keys:
        setattr(model.generation_config, key, None)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(model.generation_config, key, value)
