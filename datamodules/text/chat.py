"""Which tokens of an instruction are answers: spans of its text, then of its tokens."""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from datamodules.text.instruction_rows import ASSISTANT, Instruction
from datamodules.text.prompt_rows import kept_tokens
from datamodules.tokenizers.text_tokenizer import TextTokenizer

TrainOn = Literal["answers", "all"]


class MarkedText(NamedTuple):
    """A text and what of it is trained on.

    Args:
        text: as it is tokenised.
        spans: first and past-the-last character of each.
        is_chat: written by a template, which brings its own begin token.
        ends: whether end-of-text goes behind it.
        is_end_trained: whether that is trained on.
        shrinks: see `Instruction`.
    """

    text: str
    spans: list[tuple[int, int]]
    is_chat: bool
    ends: bool
    is_end_trained: bool
    shrinks: tuple[int, int] = (0, 0)


class TrainedTokens(NamedTuple):
    """ids [n] int64; is_trained [n] bool; whether an answer begins inside a token."""

    ids: np.ndarray
    is_trained: np.ndarray
    begins_inside_token: bool


class Marker:
    """Turns instructions into tokens that know whether they are trained on.

    A prompt is followed by the separator, the completion and end-of-text. A chat becomes what the
    template makes of it; an answer lasts from where the template would let the assistant begin to
    its last special token, or to the next turn where there is none. A chat that ends in no
    special token gets end-of-text, so that there is always an end to learn.

    Args:
        tokenizer: with a chat template where there are chats.
        train_on: answers only, or all.
        separator: between a prompt and its completion.
        max_prompt: tokens of a prompt, its beginning included, from which on it loses the end of
            what shrinks; none cuts nothing.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        train_on: TrainOn,
        separator: str,
        max_prompt: int | None = None,
    ) -> None:
        self.tokenizer, self.train_on, self.separator = tokenizer, train_on, separator
        self.max_prompt = max_prompt
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added if token.special)
        self.special_behind = re.compile(rf"\s*({'|'.join(map(re.escape, self.special))})")

    def marked(self, row: Instruction) -> MarkedText:
        """Return the text of one instruction.

        Raises:
            ValueError: the template refuses the messages, or rewrites earlier turns.
        """
        if row.messages:
            return self._chat(row.messages)
        before = row.prompt + self.separator
        text = before + row.completion
        start = 0 if self.train_on == "all" else len(before)
        return MarkedText(text, [(start, len(text))], False, True, True, row.shrinks)

    def check_template(self, row: Instruction) -> None:
        """Raise ValueError where the row is a chat and the tokenizer cannot write any."""
        if row.messages and self.tokenizer.chat_template is None:
            self.tokenizer.render(row.messages)  # names the way out

    def holds_special_token(self, row: Instruction) -> bool:
        """Whether somebody wrote a special token; it counts as one."""
        return any(token in text for text in row.texts for token in self.special)

    def tokens(self, marked: Sequence[MarkedText]) -> list[TrainedTokens]:
        """Return the tokens of each text; one that lies partly in an answer belongs to it."""
        encodings = self.tokenizer.encode_with_offsets([text.text for text in marked])
        return [
            self._trained(text, np.array(e.ids, np.int64), np.array(e.offsets).reshape(-1, 2))
            for text, e in zip(marked, encodings, strict=True)
        ]

    def _chat(self, messages: tuple[dict, ...]) -> MarkedText:
        text = self.tokenizer.render(messages)
        ends = not text.rstrip().endswith(self.special)
        if self.train_on == "all":
            return MarkedText(text, [(0, len(text))], True, ends, True)
        spans = [
            self._answer(messages, i, text)
            for i, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        return MarkedText(text, spans, True, ends, messages[-1]["role"] == ASSISTANT)

    def _answer(self, messages: tuple[dict, ...], i: int, text: str) -> tuple[int, int]:
        """Return where answer i of the chat stands in its text."""
        through, said = self.tokenizer.render(messages[: i + 1]), messages[i]["content"].strip()
        if i or not said:
            before = self.tokenizer.render(messages[:i], add_generation_prompt=True)
        else:  # nothing to render yet: the answer begins with what it says
            before = through.partition(said)[0]
        if text.startswith(before):
            start = len(before)
            if text.startswith(through) and through.startswith(before):
                return start, len(through)
            # Some templates write the last answer in another way, with room for thoughts.
            place = text.find(said, start)
            end = self.special_behind.match(text, place + len(said)) if place >= 0 else None
            if end is not None:
                return start, end.end()
        raise ValueError(
            f"the chat template writes the turns before message {i + 1} in another way once it is "
            "there, so that its answer cannot be told apart; name another template with "
            "data.tokenizer.chat_template, or set data.train_on to all."
        )

    def _trained(self, text: MarkedText, ids: np.ndarray, offsets: np.ndarray) -> TrainedTokens:
        if self.max_prompt is not None:
            most = self.max_prompt - (self.tokenizer.begin_id is not None)
            kept = kept_tokens(offsets, text.spans[0][0], text.shrinks, most)
            ids, offsets = ids[kept], offsets[kept]
        is_trained, is_inside = np.zeros(len(ids), bool), False
        for start, end in text.spans:
            found = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
            if not len(found):
                continue
            is_inside |= bool(offsets[found[0], 0] < start)
            special = np.flatnonzero(np.isin(ids[found], self.tokenizer.special_ids))
            if text.is_chat and self.train_on == "answers" and len(special):
                last = found[special[-1]]
                if not text.text[offsets[last, 1] : end].strip():  # a template's line break
                    found = found[found <= last]
            is_trained[found] = True
        begin_id = self.tokenizer.begin_id
        if not text.is_chat and begin_id is not None:
            ids, is_trained = np.append(begin_id, ids), np.append(False, is_trained)
        if text.ends:
            ids = np.append(ids, self.tokenizer.end_id)
            is_trained = np.append(is_trained, text.is_end_trained)
        return TrainedTokens(ids, is_trained, is_inside)
