"""A tokenizer as the files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scantling.errors import need


def with_bos(library: Any, bos: str) -> Any:
    """A copy whose post-processor begins each text with BOS, and does what it did besides.

    The library's post-processor runs in every tool; `add_bos_token` in the config is obeyed by some only.
    """
    data = json.loads(library.to_str())
    steps = _steps(data["post_processor"])
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), None)
    if template is None:
        first, second = ({"Sequence": {"id": text, "type_id": 0}} for text in "AB")
        template = {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}
        steps.append(template)
    template["special_tokens"][bos] = {"id": bos, "ids": [library.token_to_id(bos)], "tokens": [bos]}
    for kind in ("single", "pair"):
        template[kind].insert(0, {"SpecialToken": {"id": bos, "type_id": 0}})
    data["post_processor"] = steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}
    return need("tokenizers", "write a tokenizer").Tokenizer.from_str(json.dumps(data))


def _steps(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The processors that run one after the other."""
    if processor is None:
        return []
    if processor["type"] != "Sequence":
        return [processor]
    return [step for inner in processor["processors"] for step in _steps(inner)]


def texts(
    library: Any, config: Mapping[str, object], bos_id: int | None, ends: Sequence[int], template: str | None
) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json, generation_config.json and, where there is one, chat_template.jinja.

    Args:
        config: what tokenizer_config.json says of special tokens.
        bos_id: of the token that begins a text.
        ends: ids that end a text.
    """
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    generation = {"bos_token_id": bos_id, "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None}
    found = {
        "tokenizer.json": library.to_str(pretty=True) + "\n",
        "tokenizer_config.json": _json({**usual, **config}),
        "generation_config.json": _json({key: value for key, value in generation.items() if value is not None}),
    }
    return found if template is None else found | {"chat_template.jinja": template}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
