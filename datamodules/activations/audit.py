"""What `unisono check` says of documents that are to be dumped, and of a store of activations.

Shapes: D documents of a part, A attributes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from datamodules.activations.attributes import NONE, DocumentFacts
from datamodules.activations.pieces import Pieces
from datamodules.activations.positions import PositionRule
from datamodules.activations.store import ActivationStore
from datamodules.audits import WIDTH, say
from datamodules.files.bad_rows import BadRow
from datamodules.files.splitting import PART_NAMES
from datamodules.text.token_store import TokenStore

if TYPE_CHECKING:
    from rich.console import Console


class PartCounts(NamedTuple):
    """One part.

    num_short: documents too short for an activation. num_cut: those that are read in several
    pieces. num_repeated: those whose text is there before. attribute_share: of the documents, the
    share of which any attribute is known, 0 to 1.
    """

    name: str
    num_documents: int
    num_tokens: int
    num_short: int
    num_cut: int
    num_repeated: int
    num_activations: int
    attribute_share: float


@dataclass
class ActivationAudit:
    """Findings over all parts.

    Args:
        parts: train, validation and test.
        rule: how positions are drawn.
        context_length: tokens of the longest piece.
        attributes: their names.
        facts: label and sentence of what is known of a store alone.
    """

    parts: list[PartCounts]
    rule: PositionRule
    context_length: int
    attributes: list[str]
    facts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bad_rows(self) -> Sequence[BadRow]:
        """None: what breaks a rule here is an error of its own."""
        return []

    def show(self, console: "Console") -> None:
        """Print the findings."""
        _show_parts(console, self.parts)
        rule = self.rule
        say(
            console,
            "positions",
            f"up to {rule.per_document} of each document, from {rule.min_position} on, seed "
            f"{rule.seed}; documents of more than {self.context_length:,} tokens are cut",
        )
        say(console, "split", "no document is in two parts, by the hash of its text")
        _show_attributes(console, self.attributes, self.parts)
        for label, sentence in self.facts:
            say(console, label, sentence)


Place = tuple[Pieces, np.ndarray, np.ndarray]  # of a part: its documents, piece [N], position [N]


def audit_documents(
    store: TokenStore,
    places: Callable[[int], Place],
    facts_of: Callable[[int], DocumentFacts],
    rule: PositionRule,
) -> ActivationAudit:
    """Return what the parts of a store of tokens, or of activations, hold.

    Args:
        store: of the documents.
        places: returns the activations of a part.
        facts_of: returns what is known of its documents.
        rule: how positions are drawn.
    """
    parts, names, context_length = [], [], 0
    for part in range(len(PART_NAMES)):
        pieces, piece, _ = places(part)
        facts, context_length = facts_of(part), pieces.context_length
        parts.append(_counts(store, part, pieces, piece, facts))
        names += [name for name in facts.names if name not in names]
    return ActivationAudit(parts, rule, context_length, names)


def store_facts(store: ActivationStore) -> list[tuple[str, str]]:
    """Return label and sentence of what a store alone has; every file of it is read.

    Raises:
        ValueError: the content of a file is not the one that was written.
    """
    damaged = store.damaged()
    if damaged:
        names = ", ".join(path.name for path in damaged[:3])
        raise ValueError(
            f"{store.folder} is damaged: {len(damaged)} files do not hold what was written "
            f"({names}); copy the store again, or dump the activations again."
        )
    subject, statistics, files = store.subject, store.statistics, store.schema["files"]
    mean, deviation, largest = statistics.norms
    kept = "kept" if store.has_activations else "computed again in every run"
    size = sum(facts["bytes"] for facts in files.values())
    return [
        (
            "subject",
            f"block {subject.layer} of 0 to {subject.num_layers - 1}, {subject.site}, "
            f"{subject.hidden_size:,} features, {store.schema['dtype']}; digest {subject.digest}",
        ),
        ("values", kept),
        (
            "norms",
            f"mean {mean:.4g}, deviation {deviation:.4g}, largest {largest:.4g}; mean variance of "
            f"a feature {statistics.variance:.4g}",
        ),
        ("files", f"{len(files)} files, {size / 1e6:,.1f} MB, hold what was written"),
    ]


def _counts(
    store: TokenStore, part: int, pieces: Pieces, piece: np.ndarray, facts: DocumentFacts
) -> PartCounts:
    hashes, num_documents = store.hashes(part), len(facts.group)
    is_read = np.zeros(num_documents, bool)
    is_read[pieces.document[piece]] = True
    is_known = (facts.attributes != NONE).any(1)
    return PartCounts(
        PART_NAMES[part],
        num_documents,
        store.part_facts(part).num_tokens,
        int((~is_read).sum()),
        int((np.bincount(pieces.document, minlength=num_documents) > 1).sum()),
        num_documents - len(np.unique(hashes)),
        len(piece),
        float(is_known.mean()) if num_documents else 0.0,
    )


def _show_parts(console: "Console", parts: list[PartCounts]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(width=WIDTH, box=SIMPLE_HEAD, padding=0)
    table.add_column("part", no_wrap=True)
    for name in ("documents", "tokens", "too short", "cut", "repeated", "activations"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        counts = (
            *(part.num_documents, part.num_tokens, part.num_short),
            *(part.num_cut, part.num_repeated, part.num_activations),
        )
        table.add_row(part.name, *(f"{count:,}" for count in counts))
    console.print(table)


def _show_attributes(console: "Console", names: list[str], parts: list[PartCounts]) -> None:
    if not names:
        say(console, "attributes", "none; recall of known attributes is not reported")
        return
    shares = ", ".join(_shares(parts))
    listed = ", ".join(names[:12]) + (" …" if len(names) > 12 else "")
    say(console, "attributes", f"{len(names)} ({listed}); documents with any: {shares}")


def _shares(parts: list[PartCounts]) -> Iterator[str]:
    for part in parts:
        yield f"{part.name} {100 * part.attribute_share:.1f} %"
