"""A loaded model: card, parts, net and tokenizer together."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling import inputs
from scantling.cards import Card
from scantling.checkpoint.origin import Origin
from scantling.checkpoint.sentence import TextRules
from scantling.errors import ScantlingInputError, need
from scantling.parts.heads import Head
from scantling.parts.transformer import Transformer
from scantling.passes import Given, hidden_states, prepare
from scantling.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from scantling.generate.beam import Beams
    from scantling.generate.compiled import Compiled
    from scantling.generate.packed import PackedWeights
    from scantling.generate.sampling import Sampling
    from scantling.generate.settings import Generation, Options

Ids = Any
"""Token ids: a list of ints (one row), a list of equal lists, or an integer tensor (T) or (B, T)."""


@dataclass
class Model:
    """A Transformer with weights.

    Attributes:
        card: what it is.
        parts: its part tree.
        net: the built module, in evaluation mode.
        tokenizer: None where the checkpoint has none.
        notes: what loading noticed.
        eos_ids: ids that end a text: the tokenizer's and those of the checkpoint's config.
        start_id: what an encoder-decoder's target begins with, or None where nobody says.
        labels: names of what a classifier tells apart.
        origin: the folder it was loaded from, whose config and tokenizer files `save` writes again.
        text_rules: what `embed` does to a text before it is read, by sentence-transformers' files.
        file: the GGUF file it was loaded from.
        packed: what it decodes with instead of its net; see `pack`.
        compiled: the same of one text and of rows; see `compile`.

    The net of a model that `load_packed` made is loaded when it is first asked for.
    """

    card: Card
    parts: Transformer
    net: nn.Module
    tokenizer: Tokenizer | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)
    eos_ids: frozenset[int] = frozenset()
    start_id: int | None = None
    labels: tuple[str, ...] = ()
    origin: Origin | None = None
    text_rules: TextRules = field(default_factory=TextRules)
    file: Path | None = None
    packed: PackedWeights | None = None
    compiled: Compiled | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            later = self.__dict__.get("_later")
            if name != "net" or later is None:
                raise AttributeError(f"a model has no {name!r}")
            self.net = later()
            return self.net

    @property
    def is_built(self) -> bool:
        """Whether the net is there; one that is not will be on the CPU, in the dtype of the card."""
        return "net" in self.__dict__

    def ids(self, ids: Ids) -> Tensor:
        """Ids as a (B, T) int64 tensor on the net's device.

        Raises:
            ScantlingInputError: empty, ragged, not integers, or out of the vocabulary.
        """
        return inputs.token_ids(ids, self.card.vocab_size).to(self.device)

    @property
    def device(self) -> Any:
        """Where the weights are."""
        if not self.is_built:
            return need("torch", "run the model").device("cpu")
        return next(self.net.parameters()).device

    @property
    def dtype(self) -> Any:
        """Of the weights."""
        if not self.is_built:
            return getattr(need("torch", "run the model"), self.card.dtype)
        return next(self.net.parameters()).dtype

    def logits(
        self,
        ids: Ids,
        attention_mask: Any = None,
        position_ids: Any = None,
        kernel: str = "fused",
        *,
        token_type_ids: Any = None,
        decoder_ids: Ids = None,
        prefix_lengths: Any = None,
        document_ids: Any = None,
        decoder_document_ids: Any = None,
    ) -> Tensor:
        """Logits of every position, or whatever the head gives: scores of labels, the text's vector.

        Args:
            ids: (B, T).
            attention_mask: (B, T), 1 at real tokens and 0 at padding; None where all are real.
            position_ids: (1 or B, T); default 0 .. T - 1, whatever the mask, unless the card counts from it.
            kernel: ``fused`` or ``reference``.
            token_type_ids: (B, T) kinds of tokens; default all 0.
            decoder_ids: (B, T) of an encoder-decoder's target, whose source `ids` (B, S) and `attention_mask` are.
            prefix_lengths: (B,) how many of each row's first real tokens read each other both ways, where the card has
                attention.prefix; None for none.
            document_ids: (B, T) numbers of the documents that share a row: each is read as if it were alone, its
                positions from 0 on; a negative number is padding. None where each row is one document.
            decoder_document_ids: (B, T) the same of `decoder_ids`; a target reads the source that has its number.

        Returns:
            (B, T, V) in float32; (B, T, n_labels), (B, n_labels), (B, T) or (B, d) by the card's head.

        Raises:
            ScantlingInputError: ids out of range, or longer than a learned position table.
        """
        torch = need("torch", "run the model")
        given = Given(
            attention_mask,
            position_ids,
            token_type_ids,
            decoder_ids,
            prefix_lengths,
            document_ids,
            decoder_document_ids,
        )
        from scantling.tensor.pages import for_pass

        read, *rest = prepare(self, ids, given, kernel)
        with torch.no_grad(), for_pass(read.device, read.numel()):
            return self.net(read, *rest).float()  # type: ignore[no-any-return]

    def hidden(
        self,
        ids: Ids,
        attention_mask: Any = None,
        position_ids: Any = None,
        *,
        token_type_ids: Any = None,
        decoder_ids: Ids = None,
    ) -> list[Tensor]:
        """The residual stream (B, T, d): embeddings first, then after each block, the last one after the final norm.

        Of an encoder-decoder: the encoder's, or with `decoder_ids` the decoder's.
        """
        return hidden_states(self, ids, Given(attention_mask, position_ids, token_type_ids, decoder_ids))

    def loss(
        self,
        ids: Ids,
        labels: Ids,
        attention_mask: Any = None,
        label_smoothing: float = 0.0,
        *,
        document_ids: Any = None,
    ) -> Tensor:
        """Mean negative log-probability of the labels, in nats.

        Args:
            labels: not shifted; -100 is not judged. Of a decoder (B, T) like ids: position t is judged on label t + 1.
                Of an encoder (B, T): position t is judged on label t. Of an encoder-decoder (B, T) of any length: the
                decoder is given `start_id` and the labels but the last.
            label_smoothing: share e of each target that is spread evenly over the vocabulary: (1 - e) at the label plus
                e / V everywhere (Szegedy et al., arXiv:1512.00567, section 7; 0.1 in arXiv:1706.03762).
            document_ids: (B, T) as `logits` takes them, of one stack; no document is judged on the next one's first
                token, and padding is not judged.

        Raises:
            ScantlingInputError: labels of another shape, out of the vocabulary, or none left after the shift; or a
                smoothing below 0 or above 1.

        Warns where a decoder's row begins with one id as the label of several other tokens: -100 leaves a prompt out.
        """
        torch = need("torch", "run the model")
        if not isinstance(self.parts.head, Head):
            raise ScantlingInputError(f"the loss is that of a vocabulary; this card's head is {self.card.head.kind}")
        inputs.check_smoothing(label_smoothing)
        wanted = inputs.labels(labels).to(self.device)
        if self.parts.two_stacks and document_ids is not None:
            raise ScantlingInputError("document_ids: the loss of an encoder-decoder takes one pair per row")
        decoder_ids = self.shifted(wanted) if self.parts.two_stacks else None
        logits = self.logits(ids, attention_mask, decoder_ids=decoder_ids, document_ids=document_ids)
        if wanted.shape != logits.shape[:2]:
            raise ScantlingInputError(f"labels have shape {list(wanted.shape)}; the shape of the ids is needed")
        if document_ids is not None:
            documents = inputs.documents(document_ids, wanted, self.card)
            wanted = wanted.masked_fill(inputs.unjudged(documents, self.card), -100)
        if self.card.family == "decoder":
            if (note := inputs.filled_prompts(self.ids(ids), wanted)) is not None:
                warnings.warn(note, stacklevel=2)
            logits, wanted = logits[:, :-1], wanted[:, 1:]
        inputs.check_judged(wanted, self.card.vocab_size)
        cross_entropy = torch.nn.functional.cross_entropy
        return cross_entropy(  # type: ignore[no-any-return]
            logits.flatten(0, 1), wanted.flatten(), label_smoothing=label_smoothing
        )

    def shifted(self, labels: Tensor) -> Tensor:
        """What the decoder of an encoder-decoder reads to predict labels (B, T): `start_id`, then all but the last.

        Raises:
            ScantlingInputError: nobody says with what a target begins.
        """
        if self.start_id is None:
            raise ScantlingInputError("the checkpoint does not say with what a target begins (decoder_start_token_id)")
        # What is not judged has no id of its own; no judged label comes after it.
        return labels.roll(1, -1).index_fill(-1, labels.new_zeros(1), self.start_id).clamp(min=0)

    def generate(
        self,
        prompt: str | Sequence[str] | Ids,
        max_new_tokens: int = 20,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        attention_mask: Any = None,
        ignore_eos: bool = False,
        sampling: Sampling | None = None,
        options: Options | None = None,
        beams: Beams | None = None,
        best_of: int = 1,
    ) -> Any:
        """Continue a prompt, or several; of an encoder-decoder, write the target of a source.

        Args:
            prompt: text, or ids (B, T); padded rows are padded on the left and come with `attention_mask`. Of an
                encoder-decoder, the source, padded anywhere. A list of texts, or of rows of unequal lengths, gives what
                each gives alone.
            temperature: 0 is greedy.
            top_k, top_p, min_p: keep only the likeliest tokens; 0, 1.0 and 0.0 keep all.
            seed: of the draws; None is a new one each time.
            stop: strings (or one string) that end a text.
            ignore_eos: go on past end-of-text.
            sampling: every setting of the draw, in place of the five above.
            options: how a text is made, in place of `stop` and `ignore_eos`.
            beams: keep several beginnings and return the best text; of one prompt.
            best_of: draw so many texts of one prompt and return the one of the highest mean log-probability.

        Returns:
            The new text for a text; for ids the whole rows (B, T + new), ended rows filled with their last id. Of an
            encoder-decoder the targets, (B, 1 + new) with `start_id` first. For several texts a list of them; for
            unequal rows a list of whole rows, each as long as it became.

        Raises:
            ScantlingInputError: an empty prompt, one longer than the context, or a setting out of range.
        """
        from scantling.generate.api import Asked, generate

        asked = Asked(temperature, top_k, top_p, min_p, seed, stop, ignore_eos)
        wanted = asked.wanted(max_new_tokens, sampling, options, beams, best_of)
        return generate(self, prompt, wanted, attention_mask)

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 20,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
        options: Options | None = None,
    ) -> Generator[str, None, Generation]:
        """The text that `generate` makes of one prompt, in pieces, each as soon as it is certain.

        The model goes on when the next piece is asked for, and not before. The value of the generator is a `Generation`
        with everything about the text.

        Raises:
            ScantlingInputError: as `generate`; what is wrong with the prompt and the limit before a piece is asked for.
        """
        from scantling.generate.api import Asked
        from scantling.generate.text import streamed

        wanted = Asked(temperature, seed=seed, stop=stop).wanted(max_new_tokens, sampling, options, None, 1)
        return streamed(self, prompt, max_new_tokens, wanted.sampling, wanted.options)

    def pack(self, width: str = "stored", activations: str = "exact") -> None:
        """Decode through the compiled pass from now on: weights in tiles, no Python inside a token.

        The weights are those of the GGUF file that the model was loaded from, in its own blocks; of another model,
        those that its net has now. Nothing but generation uses them.

        Args:
            width: how matrices are held: ``stored``, or ``f32``, ``bf16``, ``q8_0``, ``q4_0``, ``q4_1`` for all.
            activations: ``exact``, in float32; or ``int8``, faster, rounded where they meet 8- and 4-bit weights.

        Raises:
            ScantlingInputError: a card or a machine that the compiled pass does not know, or no such setting.
        """
        from scantling.generate.packed import pack

        self.packed = pack(self, width, activations)

    def compile(self, rows: int = 1, *, block: int = 0) -> None:
        """Decode through a step that torch compiles, from now on: no Python inside a token.

        On a CPU it is compiled ahead of time, about a minute for 30 layers, and kept in the cache folder; the weights
        are not in it, and those that the net has are used. On CUDA it is compiled in each process, at the first token.
        Prompts and drafts go through the net as before; on CUDA, so does what `Engine` batches.

        Args:
            rows: texts that will be decoded side by side. One row has a step of its own, and any more share one.
            block: positions of a block, where `Engine` will decode (`Limits.block`); 0 where it will not. The step for
                these rows and blocks is made now, any other when it is first needed.

        Raises:
            ScantlingInputError: a card whose step cannot be compiled, or no C++ compiler.
        """
        need("torch", "compile the step")
        from scantling.generate.compiled import compiled

        self.compiled = compiled(self, rows, block)

    def embed(
        self,
        texts: Sequence[str],
        batch_size: int | None = None,
        max_length: int | None = None,
        *,
        compiled: bool = False,
    ) -> Tensor:
        """A vector per text, by an encoder: (N, d) in float32.

        A head of kind embedding pools as it says. Under any other head (masked LM, labels, none) the vector is the mean
        of the last hidden states of all tokens, special ones included, divided by its length.

        Args:
            texts: each gets the tokenizer's special tokens; one that is too long is cut, with a warning.
            batch_size: texts that run together; None goes by their tokens. The vectors do not depend on it.
            max_length: tokens of a text that are read, special ones included; default max_seq_length of
                sentence-transformers where the model has one, else as many as the context holds.
            compiled: through torch.compile; it takes a minute before the first vector.

        Raises:
            ScantlingInputError: no encoder, no tokenizer, no texts, one without any token, or a length out of range.
        """
        need("torch", "embed texts")
        from scantling.generate.embed import encode_for_vectors, vectors

        encoded = encode_for_vectors(self, texts, max_length)
        for note in encoded.notes:
            warnings.warn(note, stacklevel=2)
        return vectors(self, encoded.rows, batch_size, compiled=compiled)

    @property
    def reads_prefix(self) -> bool:
        """Whether a layer reads the prefix of a row both ways."""
        return any(part.visibility.prefix for _, part, _ in self.parts.walk() if hasattr(part, "visibility"))
