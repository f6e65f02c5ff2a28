"""The audit of a language model's data: hand-counted figures, and how they look."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from datamodules import (
    InstructionDataModule,
    PagesDataModule,
    TextDataModule,
    TextSplit,
    TokenizerOptions,
)
from datamodules.audits import WIDTH, show_bad_rows
from datamodules.text_audit import PartAudit, Run, TextAudit, runs_of
from datamodules.text_audit_view import show_audit
from datamodules.tokenizers.trained import byte_tokenizer

CHATS = TokenizerOptions("bytes", chat_template="plain")


def written(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def instructions(folder: Path, *rows: dict, **options: Any) -> TextAudit:
    options = {"tokenizer": CHATS, "split": TextSplit(validation_share=0), **options}
    audit = InstructionDataModule(written(folder / "mine.jsonl", *rows), **options).audit()
    assert isinstance(audit, TextAudit)
    return audit


def sample(prompt: str, completion: str) -> dict:
    return {"prompt": prompt, "completion": completion}


def shown(audit: TextAudit, colours: bool = False) -> str:
    out = io.StringIO()
    system = "standard" if colours else None
    console = Console(file=out, width=WIDTH, force_terminal=colours, color_system=system)
    show_audit(console, audit)
    return out.getvalue()


def test_samples_tokens_targets_and_rows_are_counted(tmp_path: Path) -> None:
    rows = [sample("ab", "cde"), sample("é", "f"), sample("ab", "cde")]
    (part,) = instructions(tmp_path, *rows, context_length=10).parts
    assert part.lengths.tolist() == [7, 5, 7]  # begin, prompt, completion, end; é is two bytes
    assert part.num_bytes == 5 + 3 + 5
    assert part.num_targets == 4 + 2 + 4
    assert (part.num_rows, part.used_share) == (2, (6 + 4 + 6) / 20)
    assert part.num_duplicates == 1


def test_losses_are_counted(tmp_path: Path) -> None:
    user = {"role": "user", "content": "u" * 40}
    chat = {"messages": [{"role": "assistant", "content": "a"}, user]}
    rows = [sample("p" * 9, "c"), sample("p", "c" * 30), chat]
    (part,) = instructions(tmp_path, *rows, context_length=10).parts
    assert [loss.label for loss in part.losses] == ["too long", "no target"]
    assert "3 train samples exceed data.context_length 10" in part.losses[0].sentence
    assert "2 lose a part of an answer" in part.losses[0].sentence  # the second and the chat
    assert "1 train samples have no target" in part.losses[1].sentence
    audit = instructions(tmp_path, *rows, context_length=10, too_long="error")
    assert [(row.line, row.kind) for row in audit.bad_rows] == [
        (1, "too long"),
        (2, "too long"),
        (3, "too long"),
    ]
    assert "more than data.context_length 10. Raise it, or" in audit.bad_rows[0].rule


def test_overlap_counts_different_samples(tmp_path: Path) -> None:
    same, other = sample("a", "b"), sample("c", "d")
    validation = written(tmp_path / "validation.jsonl", same, same, other, sample("e", "f"))
    audit = instructions(tmp_path, same, other, sample("x", "y"), validation_files=validation)
    train, held = audit.parts
    assert (audit.overlap(held), held.num_duplicates, train.num_duplicates) == (2, 1, 0)
    assert "2 different validation samples are also in training" in shown(audit)


def test_parts_that_share_documents_overlap_where_their_texts_do(tmp_path: Path) -> None:
    rows = ["abcd", "cdab", "qrst"]
    path = written(tmp_path / "mine.jsonl", *({"text": text} for text in rows))
    audit = TextDataModule(path, split=TextSplit(0.5, by="tail")).audit()
    train, held = audit.parts
    assert audit.overlap(held) == 2  # "cd" and "ab"; "st" is new
    assert len(set(train.keys.tolist())) == 3


def test_documents_are_counted_and_none_is_lost(tmp_path: Path) -> None:
    rows = ["hen " * 5, "cow", "cow"]
    path = written(tmp_path / "mine.jsonl", *({"text": text} for text in rows))
    data = TextDataModule(path, context_length=8, split=TextSplit(validation_share=0))
    (part,) = data.audit().parts
    assert part.lengths.tolist() == [22, 5, 5]
    assert (part.num_bytes, part.num_targets, part.num_duplicates) == (26, 29, 1)
    assert (part.num_rows, part.used_share) == (4, 29 / 32)  # 8, 8, 5, 4 + 4
    (loss,) = part.losses
    assert loss.sentence == "1 train documents exceed the context; they are cut into pieces"


def test_prompts_that_end_inside_a_token_and_written_special_tokens_are_named(
    tmp_path: Path,
) -> None:
    words = [sample("the hen sat ", "the mat"), sample("the hen sat", " the mat<|endoftext|>")]
    options = TokenizerOptions("bpe", 300)
    audit = instructions(tmp_path, *words, *[sample("the", " the hen")] * 5, tokenizer=options)
    assert len(audit.warnings) == 2
    assert audit.warnings[0].startswith("1 samples have an answer that begins inside a token")
    assert audit.warnings[1].startswith("1 samples have a special token written in their text")


def test_what_is_trained_on_is_marked_in_colour_and_without(tmp_path: Path) -> None:
    audit = instructions(tmp_path, sample("What?", " That."), context_length=32)
    assert audit.excerpt == [
        Run("<|endoftext|>What?", False),
        Run(" That.<|endoftext|>", True),
    ]
    assert "<|endoftext|>What?⟦ That.<|endoftext|>⟧" in shown(audit)
    assert "\x1b[1;32m⟦ That.<|endoftext|>⟧\x1b[0m" in shown(audit, colours=True)


def test_a_long_excerpt_is_cut_and_brackets_are_no_markup(tmp_path: Path) -> None:
    audit = instructions(tmp_path, sample("[bold]x[/bold]", "y" * 3000), context_length=4096)
    text = shown(audit)
    assert "[bold]x[/bold]⟦yyy" in text
    assert text.count("y") < 1250
    assert "…⟧" in text


def wide() -> TextAudit:
    """Return an audit of a large corpus."""
    audit = TextAudit("documents", [], 50257, 1024, "packed")
    for name in ("train", "validation"):
        part = PartAudit(name, np.array([9_035_582_198]), np.zeros(1), 2**35, [], 9_035_582_198)
        part.num_rows, part.used_share = 8_823_810, 1.0
        audit.parts.append(part)
    return audit


def test_samples_that_are_too_long_name_the_option_that_helps(tmp_path: Path) -> None:
    rows = [sample("p" * 9, "c"), sample("p", "c" * 30)]
    audit = instructions(tmp_path, *rows, context_length=10, too_long="error")
    out = io.StringIO()
    show_bad_rows(Console(file=out, width=WIDTH), audit.bad_rows)
    assert "on_bad_rows" not in out.getvalue()
    assert "set data.too_long to cut" in " ".join(out.getvalue().split())


def test_pages_with_a_long_target_are_not_told_to_cut_it(tmp_path: Path) -> None:
    path = written(tmp_path / "pages.jsonl", {"text": "a" * 9, "title": "b" * 99})
    sizes = {"context_length": 64, "max_target_tokens": 24, "split": TextSplit(validation_share=0)}
    out = io.StringIO()
    audit = PagesDataModule(train_files=path, **sizes).audit()
    show_bad_rows(Console(file=out, width=WIDTH), audit.bad_rows)
    said = " ".join(out.getvalue().split())
    assert "Raise data.max_target_tokens, with data.context_length, or set data.too_long" in said
    assert "cut" not in said


@pytest.mark.parametrize("layout", ["packed", "documents"])
def test_it_fits_80_columns_and_the_longest_bar_is_the_fullest_bin(
    tmp_path: Path, layout: Any
) -> None:
    rows = [sample("x" * (i % 30), "y" * (1 + i * i)) for i in range(60)]
    text = shown(instructions(tmp_path, *rows, layout=layout, context_length=1000))
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    bars = {line: line.count("█") for line in lines if "█" in line}
    assert bars
    fullest = max(bars, key=bars.__getitem__)
    assert bars[fullest] == 40
    assert "1,025–2,048" in fullest  # 32² to 45²: 14 of the 60
    assert fullest.endswith(" 14 *")
    assert "* longer than the context of 1,000 positions" in text
    assert "\n validation " in shown(wide())
    assert "9,035,582,198" in shown(wide())
    assert ("–" in next(line for line in lines if "train " in line)) == (layout == "documents")


def test_runs_begin_where_training_does() -> None:
    from datamodules.text.batches import Piece

    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("abcd")
    inner = Piece(ids[:-1], np.array([-100, ids[2], -100]))
    assert runs_of([inner], tokenizer) == [Run("ab", False), Run("c", True)]  # d is unknown
