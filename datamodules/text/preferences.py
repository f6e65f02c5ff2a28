"""Preference pairs, prompts with a chosen and a rejected answer: rows, token store, datamodule.

Shapes: B pairs, N tokens of all answers, T positions of all texts.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import demo
from datamodules.core.batches import IGNORED
from datamodules.core.plan import Plan, iterate_whole_batches
from datamodules.core.planned import PlannedDataset
from datamodules.core.store import array_digest
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.rows import BadRows, JsonRow, RowFault, sound_rows
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import Files
from datamodules.text.instructions import (
    EMPTY,
    Instruction,
    InstructionDataModule,
    InstructionRequest,
)
from datamodules.text.packing import Piece, joined_rows
from datamodules.text.prompts import is_answer, objects_of, row_prompt
from datamodules.text.store import TokenStore

PAIRS = "pairs"  # name of the loss term, a mean over samples
SIDES = ("chosen", "rejected")
SHAPES = (
    '{"prompt": "…", "chosen": "…", "rejected": "…"}, or "chosen" and "rejected" as lists of '
    'messages, which go on from a list "prompt", or begin alike'
)
PAIRS_AT_ONCE = 8  # per batch of a pass without gradients, on any number of devices


@dataclass(frozen=True)
class PreferenceRequest(InstructionRequest):
    """`InstructionRequest` for pairs: each row gives two samples, chosen and rejected."""

    kind = "preferences"

    def pair(self, row: JsonRow) -> list[Instruction]:
        """Return the two samples of a row; RowFault if it breaks a rule."""
        prompt, answers = row.values.get("prompt"), [row.values.get(side) for side in SIDES]
        chat = answers[0] if isinstance(answers[0], list) else []
        if any(isinstance(one, dict) and prompt in one.values() for one in chat):
            prompt = None  # UltraFeedback repeats the prompt as the first message of each chat
        is_text = all(isinstance(content, str) for content in (prompt, *answers))
        is_chat = all(isinstance(content, list) for content in (prompt or [], *answers))
        if not (is_text or is_chat):
            names = ", ".join(row.values) or "nothing"
            raise RowFault("keys", names, f"the row has {names}; write {SHAPES}.")
        if answers[0] == answers[1]:
            rule = '"chosen" and "rejected" are the same: nothing could be learnt; delete the row.'
            raise RowFault("equal answers", str(answers[0]), rule)
        texts, place, tools = [], (str(row.file), row.line), objects_of(row.values, "tools")
        more = {name: row.values.get(name) for name in ("system", "tools")}
        for side, content in zip(SIDES, answers, strict=True):
            if isinstance(content, str):
                row_prompt({"prompt": prompt, "completion": content, **more})
                text, answer = Instruction(*place, str(prompt), content), content
            else:
                _, messages = row_prompt({"messages": [*(prompt or []), *(content or [])], **more})
                assert messages is not None
                if not is_answer(last := messages[-1]):
                    rule = f'"{side}" must end with a message of the assistant.'
                    raise RowFault("no answer", str(content), rule)
                text, answer = Instruction(*place, "", "", messages, tools=tools), last["content"]
            if not answer.strip():
                raise RowFault("empty answer", str(prompt or content), EMPTY.format(f'"{side}"'))
            texts.append(text)
        if texts[0].messages[:-1] != texts[1].messages[:-1]:
            rule = '"chosen" and "rejected" must be alike up to the last message, which is judged.'
            raise RowFault("other contexts", str(answers[1]), rule)
        # The split keeps rows of one prompt together; a chat's prompt is all but its last message.
        group = json.dumps(prompt or texts[0].messages[:-1], sort_keys=True)
        return [text._replace(group=group) for text in texts]

    def samples(self, path: Path, bad_rows: BadRows) -> Iterator[Instruction]:
        return chain.from_iterable(sound_rows(path, self.pair, bad_rows))


def last_run(is_trained: np.ndarray) -> tuple[int, int]:
    """Return start and end (exclusive) of the last run of true values: the answer of a text."""
    end = int(np.flatnonzero(is_trained)[-1]) + 1
    before = np.flatnonzero(~is_trained[:end])
    return (int(before[-1]) + 1 if len(before) else 0), end


class PreferenceDataset(PlannedDataset):
    """One part of a store, each pair a sample. If one text of a pair exceeds the context, both lose
    equally much of the prompt's beginning; a pair with an answer that does not fit is left out."""

    is_padded = False

    def __init__(self, store: TokenStore, part: int, context_length: int) -> None:
        self.store, stream = store, store.stream(part)
        self.stream: Any = stream
        files, lines = np.asarray(stream.files), np.asarray(stream.lines)
        # Two successive texts of one line are a pair; a template may have refused one of them.
        firsts = np.flatnonzero((files[1:] == files[:-1]) & (lines[1:] == lines[:-1]))
        texts = np.stack([firsts, firsts + 1], axis=1)  # [B, 2]
        starts, stops = stream.starts[texts], (stream.starts + stream.num_positions)[texts] + 1
        answers = [
            [last_run(stream.is_trained[a:b]) for a, b in zip(*pair, strict=True)]
            for pair in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        begins, ends = np.array(answers, np.int64).reshape(-1, 2, 2).transpose(2, 0, 1)  # [B, 2]
        begins = np.maximum(begins, 1)  # nothing precedes the first token
        cuts = np.maximum((ends - 1).max(1, initial=0) - context_length, 0)
        fits = cuts < begins.min(1, initial=np.iinfo(np.int64).max)
        self.firsts, self.cuts = firsts[fits], cuts[fits]
        self.starts, self.begins, self.ends = starts[fits], begins[fits], ends[fits]
        self.lengths = (self.ends - 1 - self.cuts[:, None]).sum(1)
        self.losses = []  # a sentence for each kind of pair that is cut or left out
        long = f"{PART_NAMES[part]} pairs exceed data.context_length {context_length:,}"
        if num_cut := int((self.cuts > 0).sum()):
            self.losses.append(f"{num_cut:,} {long}: the beginnings of their prompts are cut off")
        if num_lost := int((~fits).sum()):
            self.losses.append(f"{num_lost:,} {long} by an answer: they are left out")
        self.fingerprint = f"{store.fingerprint}-{part}-pairs-{context_length}"
        places = np.stack([self.starts + self.cuts[:, None], self.begins, self.ends])
        self.content = array_digest(places, stream.tokens)  # digest of this part's pairs alone
        self.target_counts = {PAIRS: None}

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return the chosen and the rejected text; only their answers have labels."""
        cut, pieces = int(self.cuts[sample_id]), []
        bounds = (array[sample_id].tolist() for array in (self.starts, self.begins, self.ends))
        for start, begin, end in zip(*bounds, strict=True):
            ids = self.stream.tokens[start + cut : start + end].astype(np.int64)
            labels = ids[1:].copy()
            labels[: begin - cut - 1] = IGNORED
            pieces.append(Piece(ids[:-1], labels))
        return pieces

    def collate(self, examples: list[list[Piece]]) -> dict[str, Any]:
        """Return all texts in one row as a ChoiceBatch with two choices per sample, and for each
        token of an answer its position in the row, `places` [N], and its text, `place_text` [N],
        int64."""
        batch = joined_rows(examples, in_one_row=True)
        places = (batch["labels"][0] != IGNORED).nonzero()[:, 0]
        texts = batch["document_ids"][0, places]
        choices = torch.arange(2 * len(examples)).view(-1, 2)
        return {**batch, "choice_documents": choices, "places": places, "place_text": texts}

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return place, prompt and both answers."""
        decode, pieces = self.store.tokenizer.decode, self.example(sample_id, epoch)
        prompt = pieces[0].input_ids[: int((pieces[0].labels == IGNORED).sum()) + 1]
        first = self.firsts[sample_id]
        file = self.store.facts["files"][self.stream.files[first]]
        shown = {"place": f"{file}:{self.stream.lines[first]}", "prompt": decode(prompt, False)}
        pairs = zip(SIDES, pieces, strict=True)
        return shown | {s: decode(p.labels[p.labels != IGNORED], False) for s, p in pairs}


class PreferenceDataModule(InstructionDataModule):
    """Reads prompts with a chosen and a rejected answer. Without any file it uses demo data, whose
    rejected answers have their words in reverse order. Training files are split by prompt.

    `global_batch_size` counts pairs, `context_length` the positions of a prompt with one answer.

    Args:
        train_files: jsonl, json or parquet; a path, a pattern, or a list of them. A row has prompt,
            chosen and rejected as texts, or chosen and rejected as lists of messages that begin
            alike or continue the messages in prompt. Chats need a tokenizer with a chat template.
        instructions: see `InstructionDataModule`.
    """

    noun = "pairs"
    request_class = PreferenceRequest
    demo_file = demo.demo_preferences

    def __init__(self, train_files: Files = None, **instructions: Any) -> None:
        super().__init__(train_files, **instructions)

    def part_dataset(self, part: int) -> Any:
        """Return the pairs of a part that fit."""
        return PreferenceDataset(self.store, part, self.context_length)

    def part_datasets(self) -> dict[str, PreferenceDataset]:
        """Return the dataset of each part that has pairs, by name."""
        datasets = {name: self.part_dataset(part) for part, name in enumerate(PART_NAMES)}
        return {name: dataset for name, dataset in datasets.items() if len(dataset.lengths)}

    def passes(self, dataset: PreferenceDataset) -> Iterator[dict[str, Any]]:
        """Yield this replica's batches of one pass over a dataset. The batches do not depend on the
        number of devices; a replica with fewer repeats its last one with weight 0."""
        plan = Plan(np.arange(len(dataset.lengths)), PAIRS_AT_ONCE)
        for batch in iterate_whole_batches(plan, *self._replicas()):
            yield dataset.collated(batch)

    def audit(self) -> Audit:
        audit = super().audit()
        audit.limit = 2 * self.context_length
        return audit

    def audit_part(self, number: int, dataset: PreferenceDataset) -> AuditPart:
        tokens, bounds = dataset.stream.tokens, dataset.starts + [0, 1] * dataset.ends
        keys = [hash(tokens[start:end].tobytes()) for start, end in bounds]  # of both texts
        of_answers = int((dataset.ends - dataset.begins).sum())
        columns: dict[str, int | str] = {"tokens of answers": of_answers}
        questions = dataset.stream.questions[dataset.firsts]
        return AuditPart(PART_NAMES[number], dataset.lengths, keys, columns, questions)
