"""A conversation: the messages so far, and the model's next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scantling.errors import ScantlingInputError
from scantling.generate.batching import Engine, Limits
from scantling.generate.request import Request
from scantling.generate.sampling import Sampling
from scantling.generate.settings import Generation, Options
from scantling.generate.text import templated

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass
class Conversation:
    """Messages that grow by turns. What was said before is in the cache and is not read again.

    Attributes:
        system: what stands before the first message, or None for what the template says.
        sampling: how words are drawn.
        max_new_tokens: of an answer.
        positions: tokens that the whole conversation may have.
        messages: what was said, without `system`.
    """

    model: Model
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    options: Options = field(default_factory=Options)
    max_new_tokens: int = 512
    positions: int = 4096
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        block = Limits().block
        held = min(self.positions, self.model.card.context)
        self._engine = Engine(self.model, Limits(rows=1, positions=max(block, -(-held // block) * block)))
        self._held = held
        templated(self.model, [{"role": "user", "content": "Hello"}])

    def reset(self) -> None:
        """Forget what was said; `system` stays."""
        self.messages.clear()

    def say(self, text: str, show: Callable[[str], Any] | None = None) -> Generation:
        """The answer to a message, which both become part of the conversation.

        Args:
            show: called with each piece of the answer as soon as it is certain.

        Raises:
            ScantlingInputError: an empty message, or no room left in the context; nothing was said then.
        """
        if not isinstance(text, str):
            raise ScantlingInputError(f"the message is {type(text).__name__}; text is needed")
        if not text.strip():
            raise ScantlingInputError("the message is empty: at least one character is needed")
        said = [*self.messages, {"role": "user", "content": text}]
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = templated(self.model, [*first, *said])
        assert self.model.tokenizer is not None
        used = len(self.model.tokenizer.encode(prompt))
        if used >= self._held:
            raise ScantlingInputError(
                f"the conversation has {used} tokens with this message and {self._held} fit: begin anew"
            )
        limit = min(self.max_new_tokens, self._held - used)
        handle = self._engine.submit(Request(prompt, limit, self.sampling, self.options))
        try:
            while self._engine.busy:
                self._engine.step()
                if (piece := handle.take()) and show:
                    show(piece)
        except BaseException:
            handle.cancel()
            self._engine.step()
            raise
        made = handle.result()
        self.messages = [*said, {"role": "assistant", "content": made.text}]
        return made
