"""Unusual configs of every family: the original is built from each here, and what ours makes of its files is equal."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.varied import VARIED, varied

import scantling as sc
from scantling.checkpoint.families import FAMILIES

transformers = pytest.importorskip("transformers")

TRIES = 7
SPANS = {"t5": 9, "bart": 9, "marian": 9}
"""Of these, how long the target is."""


def test_every_family_is_varied() -> None:
    assert VARIED.keys() == FAMILIES.keys()


def original(config: dict[str, Any], folder: Path, seed: int) -> Any:
    """The original with random weights, saved to the folder beside the config as it stands."""
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder)
    # Falcon's eager path adds its bias twice.
    read._attn_implementation = "sdpa" if config["model_type"] == "falcon" else "eager"
    net = getattr(transformers, config["architectures"][0])(read).float().eval()
    draw, seen = torch.Generator().manual_seed(seed), set()
    buffers = [(n, b) for n, b in net.named_buffers() if n.endswith(("correction_bias", "final_logits_bias"))]
    with torch.no_grad():
        for name, weight in [*net.named_parameters(), *buffers]:
            fixed = config["model_type"] == "marian" and "embed_positions" in name
            if weight.data_ptr() not in seen and not fixed:
                centre = 1.0 if weight.ndim == 1 and name.endswith("weight") else 0.0
                weight.copy_(centre + 0.2 * torch.randn(weight.shape, generator=draw))
            seen.add(weight.data_ptr())
    net.tie_weights()
    net.save_pretrained(folder)
    path.write_text(json.dumps(config))
    return net


def scores(net: Any, config: dict[str, Any], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    span = SPANS.get(config["model_type"])
    more = {} if span is None else {"decoder_input_ids": ids.flip(1)[:, :span]}
    with torch.no_grad():
        found = net(input_ids=ids, attention_mask=mask, **more)
    return found.prediction_logits if hasattr(found, "prediction_logits") else found.logits


def rows(config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A full row and rows padded on the right and on the left."""
    draw = torch.Generator().manual_seed(5)
    ids, mask = torch.randint(6, config["vocab_size"], (3, 19), generator=draw), torch.ones(3, 19, dtype=torch.int64)
    mask[1, 15:], mask[2, :4] = 0, 0
    return ids.masked_fill(mask == 0, config.get("pad_token_id") or 0), mask


def compared(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores at real tokens; of a text's one vector, those of the rows that begin with a real token."""
    return logits[mask.bool()] if logits.shape[:2] == mask.shape else logits[:2]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TRIES))
@pytest.mark.parametrize("model_type", VARIED)
def test_logits_are_those_of_the_original(model_type: str, number: int, tmp_path: Path) -> None:
    """Read from its files; and, where a family can say what the card says, read by it from ours. All: 55 s."""
    config = varied(model_type, number)
    print(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = original(config, tmp_path / "theirs", number)
    ids, mask = rows(config)
    wanted = scores(net, config, ids, mask)
    close = {"atol": 5e-5 * max(1.0, float(wanted.abs().max())), "rtol": 0.0}
    lm = sc.load(tmp_path / "theirs")
    if model_type in SPANS:
        found, mask = (
            lm.logits(ids, mask, decoder_ids=ids.flip(1)[:, : SPANS[model_type]]),
            torch.ones(wanted.shape[:2]),
        )
    else:
        found = lm.logits(ids, mask)
    torch.testing.assert_close(compared(found, mask), compared(wanted, mask), **close)

    born = sc.new(lm.card)
    born.net.load_state_dict(lm.net.state_dict())
    sc.save(born, tmp_path / "born")
    written = json.loads((tmp_path / "born" / "config.json").read_text())
    if written["model_type"] in FAMILIES:
        print(written)
        cls, kernel = getattr(transformers, written["architectures"][0]), net.config._attn_implementation
        again = cls.from_pretrained(tmp_path / "born", attn_implementation=kernel)
        torch.testing.assert_close(
            compared(scores(again, config, *rows(config)), mask), compared(wanted, mask), **close
        )
