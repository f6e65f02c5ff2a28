"""Pages that a language model cites among the results, before and after one is rewritten."""

import json

import numpy as np
import pytest
import torch

from datamodules.search.formats import TextRecord
from lit_models.seo.visibility import PROMPT, Citing, Seen, Texts, Visibility, main, rankings, table
from tests.causal_lm.folders import saved_with_bytes
from tests.search_collections import write_lines, write_qrels
from tests.toy import csv_rows

DOCUMENTS = {
    "pie": "apple pie with a crust of butter",
    "soup": "a soup of leek and apple",
    "roof": "how a roof of slate is laid",
    "bread": "bread of rye, baked at night",
}
BEGIN = 256  # of the tokenizer of bytes
QUERIES = ["apple crust", "slate roof", "rye"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A language model with random weights that tells bytes apart, in the form of transformers."""
    made = tmp_path_factory.mktemp("visibility")
    torch.manual_seed(0)
    return saved_with_bytes(made / "model", "Llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def citing(folder):
    return Citing(folder, words=3)


def texts() -> Texts:
    return Texts([TextRecord(id, "", text) for id, text in DOCUMENTS.items()], "four")


def test_shares_are_the_mean_of_what_transformers_gives_each_number_in_each_order(folder, citing):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sources, short = list(DOCUMENTS.values())[:3], ["apple pie with", "a soup of", "how a roof"]
    expected = np.zeros(3)
    for first in range(3):
        order = [(first + place) % 3 for place in range(3)]
        listed = "\n".join(f"[{n}] {short[i]}" for n, i in enumerate(order, start=1))
        prompt = PROMPT.format(sources=listed, query="apple")
        nats = []
        for number in "123":
            ids = torch.tensor([[BEGIN, *citing.tokenizer.encode(f"{prompt}{number}]")]])
            with torch.no_grad():
                logits = model(ids).logits[0].double().log_softmax(-1)
            size = 1 + len(prompt.encode())
            nats.append(float(sum(logits[i - 1, ids[0, i]] for i in (size, size + 1))))
        expected[order] += np.exp(nats) / np.exp(nats).sum() / 3
    shares = citing.shares("apple", sources)
    assert shares == pytest.approx(expected, abs=1e-5)
    assert shares.sum() == pytest.approx(1)
    assert shares.std() > 1e-4
    # The order of sources changes nothing, as each source stands in each place once.
    turned = citing.shares("apple", sources[1:] + sources[:1])
    assert turned == pytest.approx(np.roll(shares, -1), abs=1e-6)


def test_a_rewrite_moves_the_page_and_what_is_cited_of_it(citing):
    page = Visibility(texts(), "soup", QUERIES, citing, sources=2)
    assert page.before.rank.tolist() == [2, np.inf, np.inf]
    assert (page.before.share > 0).tolist() == [True, False, False]
    after = page.after("rye crust and apple, apple")
    assert after.rank.tolist() == [1, np.inf, 1] or after.rank[2] <= 2
    assert (after.share > 0).tolist() == (after.rank <= 2).tolist()
    same = page.after(DOCUMENTS["soup"])
    assert all(np.array_equal(a, b) for a, b in zip(same, page.before, strict=True))
    assert rankings(texts(), QUERIES)[:, 0].tolist() == [0, 2, 3]


def test_the_table_by_hand():
    before = Seen(np.array([1.0, np.inf]), np.array([0.5, 0.0]))
    after = Seen(np.array([2.0, 4.0]), np.array([0.25, 0.0]))
    head, *rows = table(before, after, 3)
    assert "2 queries" in head
    cells = [row[28:].split()[:3] for row in rows]
    assert cells[0] == ["0.500", "0.375", "-0.125"]
    assert cells[1:] == [["0.500", "0.500", "+0.000"], ["0.250", "0.125", "-0.125"]]
    assert all(len(row) <= 80 for row in (head, *rows))


def test_the_command_reads_a_collection_and_writes_a_row_per_query(tmp_path, folder, capsys):
    rows = [{"_id": id, "title": "", "text": text} for id, text in DOCUMENTS.items()]
    write_lines(tmp_path / "corpus.jsonl", *map(json.dumps, rows))
    write_lines(tmp_path / "queries.jsonl", '{"_id": "q", "text": "apple"}')
    for part in ("train", "test"):
        write_qrels(tmp_path / "qrels" / f"{part}.tsv", [("q", "pie", "1")])
    (tmp_path / "asked.txt").write_text("\n".join(QUERIES))
    page = "<title>soup</title><p class='slate roof'>a soup of leek, apple and rye, purée"
    (tmp_path / "new.html").write_bytes(page.encode("cp1252"))
    words = ["--collection", tmp_path, "--page", "soup", "--rewrite", tmp_path / "new.html"]
    words += ["--queries", tmp_path / "asked.txt", "--model", folder, "--sources", 2]
    main([*map(str, words), "--words=4", f"--csv={tmp_path / 'seen.csv'}"])
    assert "share of the citations" in capsys.readouterr().out
    written = csv_rows(tmp_path / "seen.csv")
    assert [row["query"] for row in written] == QUERIES
    assert [row["rank_before"] for row in written] == ["2", "", ""]
    assert written[1]["rank_after"] == ""  # a tag's content is not text
    assert written[2]["rank_after"] in ("1", "2")
    with pytest.raises(FileExistsError, match="never replaced"):  # before the model is loaded
        main([*map(str, words), "--model=none", f"--csv={tmp_path / 'seen.csv'}"])


def test_wrong_values_are_refused(citing):
    given = (QUERIES, citing)
    with pytest.raises(ValueError, match='no document has the id "cake"; ids are such as'):
        Visibility(texts(), "cake", *given)
    with pytest.raises(ValueError, match="visibility.sources must be 2 to 9, got 1"):
        Visibility(texts(), "pie", *given, sources=1)
    with pytest.raises(ValueError, match="there is no query"):
        Visibility(texts(), "pie", [], citing)
    with pytest.raises(ValueError, match="the rewritten page has no text"):
        Visibility(texts(), "pie", *given).after(" \n")
