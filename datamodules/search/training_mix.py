"""How often each kind of training pair comes, and the tokens that pairs are made of."""

from dataclasses import dataclass
from typing import NamedTuple

from datamodules.search.collection import Collection
from datamodules.search.collection_tokens import is_among, kept_documents, kept_queries
from datamodules.search.document_parts import DocumentParts, PartsOptions, kept_parts
from datamodules.search.judged_queries import JudgedQueries
from datamodules.search.negatives import HardNegatives
from datamodules.text.encoding import TextEncoding
from datamodules.text.store import TokenRows


@dataclass(frozen=True)
class TrainingMix:
    """How often each kind of pair comes in an epoch: the ratio of a mixed training.

    Args:
        judged: times that each judged query is taken, with one of its relevant documents, drawn
            anew each time in proportion to its grade.
        triples: times that each triple is taken, where the collection has some.
        titles: times that each document gives its title as query and its text as answer.
        sentences: times that each document gives one of its sentences as query, drawn anew each
            time, and itself as answer.
        removal: probability that such a sentence is then missing from the document.
        token_dropout: probability that a distinct token is missing from a query or a document in
            this epoch; a text of one token keeps it.

    Raises:
        ValueError: a negative number, nothing at all, or a removal or dropout that is no
            probability.
    """

    judged: int = 1
    triples: int = 1
    titles: int = 0
    sentences: int = 0
    removal: float = 0.9
    token_dropout: float = 0.0

    def __post_init__(self) -> None:
        times = {name: getattr(self, name) for name in KINDS}
        for name, value in times.items():
            if value < 0:
                raise ValueError(f"mix.{name} must be 0 or more, got {value}.")
        if not any(times.values()):
            raise ValueError(
                f"mix takes no pair at all; give one of {', '.join(KINDS)} a number above 0."
            )
        for name in ("removal", "token_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"mix.{name} must be 0 to 1, got {getattr(self, name)}.")

    @property
    def reads_whole(self) -> bool:
        """Whether texts are read beyond the encoder's lengths: tokens are dropped from all."""
        return self.token_dropout > 0


KINDS = ("judged", "triples", "titles", "sentences")


class PairTokens(NamedTuple):
    """The tokens of all that pairs are made of, documents and queries by their numbers in the
    collection; none of the parts of documents where the mix takes none."""

    documents: TokenRows
    queries: TokenRows
    parts: DocumentParts | None


def pair_counts(collection: Collection, judged: JudgedQueries, mix: TrainingMix) -> dict[str, int]:
    """Return kind -> how many pairs of it there are, each counted once.

    Args:
        collection: of the texts.
        judged: queries that have a relevant document.
        mix: which pairs are made.

    Raises:
        ValueError: nothing is left to train on.
    """
    counts = {
        "judged": len(judged.queries),
        "triples": 0 if collection.triples is None else len(collection.triples.query),
        "titles": collection.num_documents,
        "sentences": collection.num_documents,
    }
    if not any(counts[kind] and getattr(mix, kind) for kind in KINDS):
        raise ValueError(
            "there is no pair to train on: the training part has no relevant document and the "
            "collection no triples. Name judgements in data.collection, or let the documents "
            "teach themselves with data.mix.sentences."
        )
    return counts


def pair_tokens(
    collection: Collection,
    encoding: TextEncoding,
    judged: JudgedQueries,
    mix: TrainingMix,
    negatives: HardNegatives,
) -> PairTokens:
    """Return the tokens that pairs are made of, tokenised once into the cache.

    Args:
        collection: of the texts.
        encoding: of the texts.
        judged: queries of the training part.
        mix: which pairs are made; what is dropped of a text is drawn from all of it.
        negatives: any document may be one where they are searched for.
    """
    triples = collection.triples if mix.triples else None
    sides = () if triples is None else (triples.positive, triples.negative)
    of_triples = () if triples is None else (triples.query,)
    is_searched = negatives.count > 0 and negatives.source != "judged"
    has_parts = mix.titles > 0 or mix.sentences > 0
    documents = None
    if not (is_searched or has_parts):
        documents = is_among(collection.num_documents, judged.judgements.document, *sides)
    queries = is_among(collection.num_queries, judged.queries, *of_triples)
    limits, is_whole = encoding.limits, mix.reads_whole
    texts = (
        kept_documents(collection, encoding, documents, is_whole),
        kept_queries(collection, encoding, queries, is_whole),
    )
    if not has_parts:
        return PairTokens(*texts, None)
    most = (None, None) if is_whole else (limits.max_length, limits.max_query_length)
    options = PartsOptions(mix.titles > 0, mix.removal > 0, *most)
    return PairTokens(*texts, kept_parts(collection, encoding, options))
