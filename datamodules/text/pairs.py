"""Datamodule of sequence-to-sequence models: tables of source and target texts.

Shapes: B samples in the micro-batch, S and T positions of its longest source and target.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from datamodules import demo
from datamodules.core.batches import IGNORED, TERM, PlannedBatch, padded, padded_texts
from datamodules.core.plan import check_range
from datamodules.core.planned import PlannedDataset, own_files_hint
from datamodules.core.store import cache_folder, made_once, text_hash
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.rows import (
    BadRows,
    OnBadRows,
    RowFault,
    check_characters,
    hand_over_rejected,
    read_rejected,
)
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN
from datamodules.files.tables import ROW_SUFFIXES, Files, TableOptions, cell_text, value_rows
from datamodules.scored.store import ScoredRequest, ScoredStore, TextColumns, open_store, write_with
from datamodules.text.encoding import TokenRows, write_token_rows
from datamodules.text.instructions import (
    Instruction,
    InstructionRequest,
    MarkedText,
    Marker,
    count_trained,
)
from datamodules.text.prompts import NO_TOKEN
from datamodules.text.store import TokenStore
from datamodules.text.texts import LanguageModelDataModule
from datamodules.tokenizers.text import TextTokenizer

log = logging.getLogger(__name__)
PAIRS_VERSION = 2  # raised when the tokens of a row change
TEXTS_AT_ONCE = 4096
CUT_OFF = "their ends are cut off"


class PairBatch(PlannedBatch):
    """Source texts and, except in prediction, their target texts."""

    input_ids: Tensor  # [B, S] int64, padded at the right with 0
    attention_mask: Tensor  # [B, S] bool
    labels: NotRequired[Tensor]  # [B, T] int64, tokens of the target; -100 = padding
    sample_index: NotRequired[Tensor]  # [B, T] int64, sample of each position
    targets: NotRequired[list[str]]  # [B] texts, evaluation only


@dataclass(frozen=True)
class PairColumns:
    """Which columns hold the texts.

    Args:
        source: column of the input text.
        target: column of the output text; prediction needs none.
    """

    source: str = "source"
    target: str = "target"


class PairMarker(Marker):
    """Turns pairs into tokens, source then target; only the target's are trained on. Each text ends
    with end-of-text and begins with begin-of-text if the tokenizer has a separate token for it."""

    def marked(self, row: Instruction) -> MarkedText:
        return MarkedText(row, f"{row.prompt}\n{row.completion}", [])

    def tokens(self, marked: Sequence[MarkedText]) -> list[tuple[np.ndarray, np.ndarray]]:
        places = [f"{text.row.file}:{text.row.line}" for text in marked]
        sources = text_ids(self.tokenizer, [text.row.prompt for text in marked], places)
        targets = text_ids(self.tokenizer, [text.row.completion for text in marked], places)
        pairs = zip(sources, targets, strict=True)
        return [(np.append(s, t), np.arange(len(s) + len(t)) >= len(s)) for s, t in pairs]


def text_ids(
    tokenizer: TextTokenizer, texts: Sequence[str], places: Sequence[str] = ()
) -> list[np.ndarray]:
    """Return the token ids of each stripped text, [n] int64, with begin and end tokens."""
    begin, end = tokenizer.begin_id, tokenizer.end_id
    before, texts = [] if begin is None or begin == end else [begin], [t.strip() for t in texts]
    return [np.array([*before, *ids, end]) for ids in tokenizer.encode_batch(texts, places)]


def cut(ids: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` tokens: a longer text loses its end, and keeps the end token."""
    return ids if len(ids) <= most else np.append(ids[: most - 1], ids[-1])


@dataclass(frozen=True)
class PairRequest(InstructionRequest):
    """`InstructionRequest` for text pairs."""

    columns: PairColumns = PairColumns()
    table: TableOptions = TableOptions()  # noqa: RUF009 - frozen
    kind = "pairs"

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "pairs": PAIRS_VERSION}

    def marker(self, tokenizer: TextTokenizer) -> Marker:
        return PairMarker(tokenizer, "")

    def samples(self, path: Path, bad_rows: BadRows) -> Iterator[Instruction]:
        names = (self.columns.source, self.columns.target)
        for line, values in value_rows(path, names, bad_rows.add, self.table):
            try:
                source, target = (_text(values, name) for name in names)
            except RowFault as fault:
                bad_rows.add_fault(path, line, fault)
                continue
            # The split keeps rows of one source in one part.
            row = Instruction(str(path), line, source, target)
            yield row._replace(group=source, extra=json.dumps([source, target]))


def _text(values: dict[str, Any], name: str) -> str:
    """Return one text of a row; RowFault if it is missing, empty or not a text."""
    value = values.get(name)
    if isinstance(value, list | dict):
        raise RowFault("type", str(value), f'"{name}" must be a text, got {value!r}.')
    text = cell_text(value).strip()
    if not text:
        raise RowFault("empty", "", f'"{name}" holds no text; fill it in, or delete the row.')
    check_characters(text)
    return text


class TextPairDataset(PlannedDataset):
    """The pairs of one part. A sample is its source and its target, token ids [n] int64 each.

    Args:
        part: 0 train, 1 validation, 2 test.
        max_source_tokens: limit with the end token; a longer source loses its end.
        max_target_tokens: limit with the end token; a pair with a longer target is left out.
    """

    def __init__(
        self, store: TokenStore, part: int, max_source_tokens: int, max_target_tokens: int
    ) -> None:
        self.store, self.stream, self.part = store, store.stream(part), part
        self.max_source_tokens = max_source_tokens
        starts, sizes = self.stream.starts, self.stream.num_positions + 1
        targets = count_trained(self.stream.is_trained, starts, sizes)
        fits, sources = targets <= max_target_tokens, sizes - targets
        self.samples = np.flatnonzero(fits)  # [N] int64, used samples of the part
        self.starts, self.sources = starts[self.samples], sources[self.samples]
        self.targets = targets[self.samples]
        self.losses = []  # a sentence for each kind of pair that is cut or left out
        for num_lost, what, most, so in (
            ((~fits).sum(), "target", max_target_tokens, "the pairs are left out"),
            ((self.sources > max_source_tokens).sum(), "source", max_source_tokens, CUT_OFF),
        ):
            if num_lost:
                words = f"{num_lost:,} {PART_NAMES[part]} {what}s exceed data.max_{what}_tokens"
                self.losses.append(f"{words} {most:,}: {so}")
        self.lengths = np.minimum(self.sources, max_source_tokens) + self.targets
        self.target_counts = {TERM: self.targets}
        self.fingerprint = f"{store.fingerprint}-{part}-{max_source_tokens}-{max_target_tokens}"

    def example(self, sample_id: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of source and target."""
        start, size = int(self.starts[sample_id]), int(self.sources[sample_id])
        tokens = self.stream.tokens[start : start + size + int(self.targets[sample_id])]
        source, target = np.split(tokens.astype(np.int64), [size])
        return cut(source, self.max_source_tokens), target

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the padded batch of samples [B]; in evaluation with the target texts."""
        batch = super().batch(sample_ids, epoch)
        if self.part != TRAIN:
            texts = [self.stream.extra(i) for i in self.samples[sample_ids].tolist()]
            batch["targets"] = [json.loads(text)[1] for text in texts]
        return batch

    def collate(self, examples: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
        """Return sources and targets, each padded to its longest."""
        sources, targets = zip(*examples, strict=True)
        labels = torch.from_numpy(padded(targets, IGNORED))  # [B, T]
        index = torch.arange(len(labels))[:, None].expand(labels.shape).contiguous()
        return {**padded_texts(sources), "labels": labels, "sample_index": index}

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return place and texts as the network reads them."""
        sample = self.samples[sample_id]
        file = self.store.facts["files"][self.stream.files[sample]]
        texts = map(self.store.tokenizer.decode, self.example(sample_id, epoch))
        names = ("place", "text", "target")
        return dict(zip(names, (f"{file}:{self.stream.lines[sample]}", *texts), strict=True))


def source_rows(store: ScoredStore, tokenizer: TextTokenizer) -> TokenRows:
    """Return the tokens of a store's texts, cached at first use."""

    def rows() -> Iterator[np.ndarray]:
        texts = map(store.text, range(len(store.num_bytes)))
        while some := list(islice(texts, TEXTS_AT_ONCE)):
            yield from text_ids(tokenizer, some, [f'"{text[:40]}"' for text in some])

    facts, size = [PAIRS_VERSION, store.fingerprint, tokenizer.digest], tokenizer.vocab_size
    folder = cache_folder("source_tokens", facts)
    return TokenRows(made_once(folder, lambda new: write_token_rows(new, size, rows())))


class SourceDataset(PlannedDataset):
    """The distinct source texts of the prediction files."""

    noun = "different texts"

    def __init__(self, store: ScoredStore, tokenizer: TextTokenizer, most: int) -> None:
        self.rows, self.most = source_rows(store, tokenizer), most
        sizes = self.rows.sizes
        self.lengths, self.is_cut = np.minimum(sizes, most), sizes > most
        self.fingerprint = f"{store.fingerprint}-{tokenizer.digest}-{most}"
        self.target_counts = {}

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the padded sources [B, S]."""
        texts = (self.rows[number].astype(np.int64) for number in sample_ids.tolist())
        return padded_texts([cut(ids, self.most) for ids in texts])


class Seq2SeqDataModule(LanguageModelDataModule):
    """Reads pairs of a source and a target text. Without any file it uses spellings of job titles.

    Training files are split by source text; rows with equal sources stay together.

    Args:
        train_files: csv, tsv, parquet, xlsx or jsonl; a path, a pattern, or a list of them.
        predict_files: the same kinds; they need only the source column.
        predict_output: `None` turns mine.csv into mine.translated.csv in the run folder.
        columns: names of the text columns.
        table: separator, encoding and sheet of tables, if they cannot be detected.
        max_source_tokens: a longer source loses its end; a warning counts them.
        max_target_tokens: a pair with a longer target is left out; a warning counts them.
        on_bad_rows: `error` fails and names the first, `reject` skips all (see rejected.csv).
        language_model: other files, tokenizer and split, see `LanguageModelDataModule`.
    """

    suffixes = predict_suffixes = output_suffixes = ROW_SUFFIXES
    noun, output_mark = "pairs", "translated"
    request_class, predict_hint = PairRequest, own_files_hint
    demo_file = demo.demo_titles

    def __init__(
        self,
        train_files: Files = None,
        predict_files: Files = None,
        predict_output: str | None = None,
        columns: PairColumns = PairColumns(),
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
        max_source_tokens: int = 256,
        max_target_tokens: int = 128,
        on_bad_rows: OnBadRows = "error",
        **language_model: Any,
    ) -> None:
        super().__init__(
            train_files=train_files,
            predict_files=predict_files,
            predict_output=predict_output,
            layout="documents",
            context_length=max_source_tokens + max_target_tokens,
            **language_model,
        )
        limits = {"max_source_tokens": max_source_tokens, "max_target_tokens": max_target_tokens}
        check_range("data", 2, **limits)  # one token and the end token
        self.columns, self.table, self.on_bad_rows = columns, table, on_bad_rows
        self.max_source_tokens, self.max_target_tokens = max_source_tokens, max_target_tokens

    def part_dataset(self, part: int) -> Any:
        """Return the pairs of a part that fit."""
        return TextPairDataset(self.store, part, self.max_source_tokens, self.max_target_tokens)

    def sources(self, on_bad_rows: OnBadRows | None = None) -> ScoredStore:
        """Return the distinct texts of the prediction files."""
        columns, files = TextColumns(self.columns.source), {TEST: self.predict_paths}
        request = ScoredRequest(files, columns, {}, self.table)
        return open_store(request, on_bad_rows or self.on_bad_rows)

    def prepare_data(self) -> None:
        """Tokenise into the cache; prediction needs no training files."""
        super().prepare_data()
        if self._trainer_stage() == "predict":
            hand_over_rejected(self.sources().folder, self.run_folder)

    def build_prompts(self) -> Any:
        """Return the dataset of prediction."""
        recipe = self.model.recipe  # `None` for a pretrained model that was not fine-tuned
        most = self.max_source_tokens if recipe is None else recipe["max_source_tokens"]
        dataset = SourceDataset(self.sources(), self.prompt_tokenizer(), most)
        if num_cut := int(dataset.is_cut.sum()):
            what = f"{num_cut:,} texts exceed the {most:,} tokens of a source: {CUT_OFF}"
            rank_zero_only(log.warning)(what)
        return dataset

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the input rows in order with `translation`, `confidence` (its probability under the
        model) and `truncated` (whether the source was cut). `results` are what the module's
        `predict_step` returns."""
        decode = self.prompt_tokenizer().decode
        translations = [decode(ids[ids != NO_TOKEN]).strip() for ids in results["token_ids"]]
        confidence = np.exp(results["log_probability"].astype(np.float64)).round(6)
        is_cut = self.datasets["predict"].is_cut

        def added(texts: np.ndarray) -> dict[str, pa.Array]:
            is_rejected = texts < 0
            return {
                "translation": pa.array([translations[text] for text in texts], mask=is_rejected),
                "confidence": pa.array(confidence[texts], mask=is_rejected),
                "truncated": pa.array(is_cut[texts], mask=is_rejected),
            }

        write_with(self.sources(), added, path, self.table, translations)

    def audit_predict(self, audit: Audit) -> None:
        store = self.sources("reject")
        texts = store.text_of_row[store.text_of_row >= 0]
        lengths = source_rows(store, self.tokenizer).sizes[texts]
        keys = [text_hash(store.text(text).strip()) for text in texts]
        audit.parts.append(AuditPart("predict", lengths, np.array(keys, np.uint64)))
        audit.bad_rows += read_rejected(store.folder)
