"""Sessions, blocks, 8 bits and the compiled pass of our models: asked, clean, and found where they are broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases.small import LLAMA, built, card

from scantling.audits import Verdict, examine
from scantling.generate import packed
from scantling.subjects.ours import ours
from scantling.tensor import paged, store

WIDE = {"d_model": 32, "attention": {"n_heads": 2, "n_kv_heads": 1, "d_head": 16}}
"""Heads that the compiled pass knows."""
COMPILED = pytest.mark.skipif(packed.missing() is not None, reason="no compiler here")


def test_everything_that_decodes_is_asked_and_clean() -> None:
    subject = ours(built(card(attention={"window": 6})))
    assert {"its cache", "a session", "a session with rings", "blocks"} <= set(subject.can.cached)
    assert set(subject.can.kept) == {"a session in 8 bits", "blocks in 8 bits"}
    report = examine(subject, ["cache", "chunks", "window", "kept"])
    assert report.defects == []
    assert {f.verdict for f in report.of("kept")} == {Verdict.ROUNDING}


@COMPILED
def test_the_compiled_pass_is_asked_where_it_knows_the_card() -> None:
    assert "the compiled pass" not in ours(built(card(attention={"stride": {"every": 4}}))).can.cached
    assert "the compiled pass" not in ours(built(card(**WIDE), dtype="float64")).can.cached
    subject = ours(built(card(**WIDE)))
    assert "the compiled pass" in subject.can.cached
    report = examine(subject, ["cache", "chunks"])
    assert report.defects == []
    asked = [f for f in report.findings if "the compiled pass" in f.where]
    assert {f.verdict for f in asked} == {Verdict.ROUNDING}


@COMPILED
def test_weights_that_change_are_packed_again() -> None:
    lm = built(card(**WIDE))
    subject = ours(lm)
    assert examine(subject, ["cache"]).defects == []
    with torch.no_grad():
        lm.net.get_parameter("decoder.blocks.0.mlp.up.weight").mul_(3.0)
    assert examine(subject, ["cache"]).defects == []


@COMPILED
def test_a_compiled_pass_over_other_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, other = built(card(**WIDE)), built(card(**WIDE))
    with torch.no_grad():
        # A hundredth of one matrix: no text would show it.
        other.net.get_parameter("decoder.blocks.1.attn.v.weight").mul_(1.01)
    real = packed.pack
    monkeypatch.setattr("scantling.subjects.caches.pack", lambda _, *how: real(other, *how))
    found = examine(ours(lm), ["cache"]).defects
    assert found
    assert all("the compiled pass" in f.where for f in found)


def test_blocks_that_two_rows_share_by_mistake_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = paged.PagedCache.rows

    def mixed(self: Any, tables: Any, pasts: Any, size: int) -> Any:
        return real(self, [tables[0]] * len(tables), pasts, size)

    monkeypatch.setattr(paged.PagedCache, "rows", mixed)
    found = examine(ours(built(card())), ["cache"]).defects
    assert found
    assert all(f.where.startswith("blocks") for f in found)


def test_a_scale_of_8_bits_that_is_too_large_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = store._coded

    def coded(new: Any) -> Any:
        codes, scales = real(new)
        return codes, scales * 1.1

    monkeypatch.setattr(store, "_coded", coded)
    report = examine(ours(built(card())), ["cache", "kept"])
    assert {f.probe for f in report.defects} == {"kept"}


def test_a_family_without_such_a_cache_says_so() -> None:
    (encoder,) = examine(ours(built(card({**LLAMA, "family": "encoder"}))), ["kept"]).findings
    assert encoder.verdict is Verdict.NOT_APPLICABLE


def test_blocks_of_an_encoder_decoder_are_asked_and_clean() -> None:
    subject = ours(built(card({**LLAMA, "family": "encoder-decoder"})))
    assert {"its cache", "a session", "blocks"} <= set(subject.can.cached)
    assert set(subject.can.kept) == {"a session in 8 bits", "blocks in 8 bits"}
    report = examine(subject, ["cache", "chunks", "source", "kept"])
    assert report.defects == []
    assert {f.verdict for f in report.of("kept")} == {Verdict.ROUNDING}


def test_a_source_that_stands_one_position_late_in_its_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = paged.PagedRows.read
    monkeypatch.setattr(paged.PagedRows, "read", lambda self, path: real(self, path).roll(int("keys" in path), 2))
    found = examine(ours(built(card({**LLAMA, "family": "encoder-decoder"}))), ["cache"]).defects
    assert found
    assert all(f.where.startswith("blocks") for f in found)
