"""Visibility of a page to a language model that answers from search results, before and after a
rewrite. It is measured for a set of queries and promises nothing:

    python -m lit_models.seo.visibility --help

BM25 or a retriever ranks the page. The model reads the best K documents as numbered sources; their
shares of citations are the probabilities of their numbers after the prompt, normalised over K. As
earlier sources are cited more often, a share is the mean over K prompts, which rotate the sources
by one place each. Nothing is random: repeated measurements give the same numbers.

Source of the question: Aggarwal et al. 2024, "GEO: Generative Engine Optimization", which reads
written answers instead. Shapes: Q queries, D documents, K sources.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch

from datamodules.core.plan import check_range
from datamodules.core.store import digest_of
from datamodules.files.documents import decoded_html, page_bytes
from datamodules.files.rows import kind_of
from datamodules.files.tables import write_batches
from datamodules.search.candidates import FIRST_DEPTH, open_bm25
from datamodules.search.collection import Collection, CollectionRequest, open_collection
from datamodules.search.formats import HTML_SUFFIXES, TextRecord, page_record
from datamodules.search.queries import file_queries
from datamodules.text.prompts import ChoiceDataset, read_prompts, rows_in_memory
from datamodules.tokenizers.text import TokenizerOptions, make_tokenizer
from lit_models.causal_lm.generation import score
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.pretrained import load_network, most_positions, read_recipe
from lit_models.errors import run_guarded
from lit_models.run_files import OWN_CONFIG
from lit_models.seo.metrics import paired_bootstrap
from lit_models.seo.retriever import LitRetriever
from lit_models.training.metrics import evaluating

PROMPT = "Answer the question from the sources and cite them by number.\n\n{sources}\n\n"
PROMPT += "Question: {query}\nAnswer, from source ["


class Texts(NamedTuple):
    """Documents to search, and a fingerprint of their content."""

    documents: list[TextRecord]
    fingerprint: str


def rankings(
    texts: Texts, queries: Sequence[str], retriever: LitRetriever | None = None
) -> np.ndarray:
    """Return the best documents of each query [Q, k] int64, padded with -1, by a retriever or, if
    it is `None`, by BM25; k is `FIRST_DEPTH`, at most D."""
    depth = min(FIRST_DEPTH, len(texts.documents))
    if retriever is None:
        return open_bm25(cast(Collection, texts)).search(queries, depth).documents
    vectors = retriever.encode([record.whole for record in texts.documents], False)
    return retriever.search(queries, vectors, depth).documents.numpy()


class Citing:
    """Language model that cites sources.

    Args:
        path: a checkpoint of LitCausalLM, its exported folder, or a Hugging Face model folder.
        words: number of first words of each source that it reads.

    Raises:
        FileNotFoundError: the checkpoint or folder does not exist.
        ValueError: it is damaged, or of another kind.
    """

    def __init__(self, path: Path, words: int = 60) -> None:
        check_range("visibility", 1, words=words)
        self.words = words
        if (path / "config.json").exists() and not (path / OWN_CONFIG).exists():
            self.tokenizer = make_tokenizer(TokenizerOptions("folder", path=str(path)), iter(()))
            self.network: Any = load_network(path)
            self.most = most_positions(read_recipe(path))
        else:
            module = LitCausalLM.load_from_checkpoint(path)
            self.tokenizer, self.network = module.tokenizer, module.network
            self.most = most_positions(module.recipe["network"])

    @torch.no_grad()
    def shares(self, query: str, sources: Sequence[str]) -> np.ndarray:
        """Return each of K sources' share of the citations [K] float64, with sum 1. ValueError if a
        prompt is longer than the model's positions."""
        number, rows = len(sources), []
        short = [" ".join(source.split()[: self.words]) for source in sources]
        for turn in range(number):
            listed = "\n".join(f"[{n}] {t}" for n, t in enumerate(short[turn:] + short[:turn], 1))
            prompt = PROMPT.format(sources=listed, query=query)
            rows.append({"prompt": prompt, "choices": [f"{n + 1}]" for n in range(number)]})
        prompts = read_prompts(rows_in_memory(rows), self.tokenizer, "", "score", self.most)
        data, total = ChoiceDataset(prompts), np.zeros(number)
        with evaluating(self.network):
            for turn in range(number):
                batch: Any = data.batch(np.array([turn]), 0)
                place = (batch["input_ids"], batch["position_ids"], batch["document_ids"])
                hidden = self.network(*place, batch["has_single_documents"])
                scores = score(hidden, self.network.head.weight, batch)["scores"]
                total += np.roll(scores[0].softmax(0).numpy(), turn)
        return total / number


class Seen(NamedTuple):
    """Visibility of a page per query: `rank` from 1, infinite beyond `FIRST_DEPTH`, and `share` of
    the citations, 0 if it is not among the sources; [Q] float64 each."""

    rank: np.ndarray
    share: np.ndarray


@dataclass
class Visibility:
    """Measures the visibility of the document with id `page`; BM25 ranks if `retriever` is `None`.

    Raises:
        ValueError: there is no such page, no query, or `sources` (K) is not 2 to 9.
    """

    texts: Texts
    page: str
    queries: Sequence[str]
    citing: Citing
    retriever: LitRetriever | None = None
    sources: int = 5

    def __post_init__(self) -> None:
        check_range("visibility", 2, 9, sources=self.sources)
        if not self.queries:
            raise ValueError("there is no query; give one or more.")
        ids = [record.id for record in self.texts.documents]
        if self.page not in ids:
            raise ValueError(f'no document has the id "{self.page}"; ids are such as {ids[:3]}.')
        self.place = ids.index(self.page)

    @cached_property
    def before(self) -> Seen:
        """Visibility of the unchanged page."""
        return self._seen(self.texts)

    def after(self, rewrite: str) -> Seen:
        """Return the visibility of the page with another text, which also replaces its title;
        ValueError if the text is empty."""
        if not rewrite.strip():
            raise ValueError("the rewritten page has no text; write what it shall say.")
        documents, name = [*self.texts.documents], [self.texts.fingerprint, self.place, rewrite]
        documents[self.place] = documents[self.place]._replace(title="", text=rewrite)
        return self._seen(Texts(documents, digest_of(name)))

    def _seen(self, texts: Texts) -> Seen:
        rank, share = (np.zeros(len(self.queries)) for _ in range(2))
        ranked = rankings(texts, self.queries, self.retriever)
        for number, (query, documents) in enumerate(zip(self.queries, ranked, strict=True)):
            is_page = documents == self.place
            rank[number] = is_page.argmax() + 1 if is_page.any() else np.inf
            if rank[number] <= self.sources:
                best = [int(n) for n in documents[: self.sources] if n >= 0]
                shares = self.citing.shares(query, [texts.documents[n].whole for n in best])
                share[number] = shares[best.index(self.place)]
        return Seen(rank, share)


def table(before: Seen, after: Seen, sources: int) -> Iterator[str]:
    """Yield the lines of a table of means over queries, with 95 % intervals of the changes."""
    yield f"{'mean over ' + format(len(before.rank), ',') + ' queries':28}before  after   change"
    rows = {
        "reciprocal rank": (1 / before.rank, 1 / after.rank),
        f"among the {sources} sources": (before.rank <= sources, after.rank <= sources),
        "share of the citations": (before.share, after.share),
    }
    for name, (old, new) in rows.items():
        old, new = old.astype(np.float64), new.astype(np.float64)
        change, low, high = paired_bootstrap(new, old, seed=0)
        interval = f"{change:+.3f} ({low:+.3f} to {high:+.3f})"
        yield f"{name:28}{old.mean():.3f}   {new.mean():.3f}   {interval}"


def write_csv(path: Path, queries: Sequence[str], before: Seen, after: Seen) -> None:
    """Write a row per query, with an empty rank if the page is not found."""
    columns: dict[str, Any] = {"query": list(queries)}
    for when, seen in (("before", before), ("after", after)):
        ranks = [None if rank == np.inf else int(rank) for rank in seen.rank]
        columns[f"rank_{when}"] = pa.array(ranks, pa.int64())
        columns[f"share_{when}"] = seen.share
    write_batches(path, [pa.RecordBatch.from_pydict(columns)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure how visible a page is to a language model, before and after a rewrite."""
    program = "python -m lit_models.seo.visibility"
    parser = argparse.ArgumentParser(program, description=main.__doc__)
    add = parser.add_argument
    add("--collection", help="folder of pages, or of BEIR's files; by default the demo")
    add("--page", required=True, help="id of the page; in a folder of pages its path")
    add("--rewrite", required=True, type=Path, help="the page's other text: .txt, .md or .html")
    add("--queries", required=True, type=Path, help="lines of .txt, or a table with query")
    add("--model", required=True, type=Path, help="checkpoint or folder of a language model")
    add("--retriever", type=Path, help="checkpoint of a LitRetriever; by default BM25 finds")
    add("--sources", type=int, default=5, help="documents that the model reads, 2 to 9")
    add("--words", type=int, default=60, help="words of each that it reads")
    add("--csv", type=Path, default=Path("visibility.csv"), help="table of the queries, new")
    options = parser.parse_args(arguments)
    if (path := options.csv).exists():  # checked before anything is computed
        raise FileExistsError(f"{path} is there and is never replaced; name another with --csv.")
    collection = open_collection(CollectionRequest(options.collection))
    texts = Texts([*collection.documents], collection.fingerprint)
    queries = [query.text for query in file_queries(options.queries)]
    found_by = options.retriever and LitRetriever.load_from_checkpoint(options.retriever).eval()
    citing = Citing(options.model, options.words)
    page = Visibility(texts, options.page, queries, citing, found_by, options.sources)
    text, rewrite = decoded_html(page_bytes(options.rewrite)), options.rewrite
    if kind_of(rewrite) in (*HTML_SUFFIXES, ".md"):  # read like the collection's pages
        text = page_record(rewrite, rewrite.parent).whole
    after = page.after(text)
    write_csv(options.csv, queries, page.before, after)
    print("\n".join([*table(page.before, after, options.sources), f"each query: {options.csv}"]))


if __name__ == "__main__":
    sys.exit(run_guarded(main))
