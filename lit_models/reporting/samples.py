"""The worst of a run: confusions, queries that were answered worst, samples of text.

They stand in these places of the run folder: TensorBoard texts (tables in Markdown, or plain text),
`ranking_queries.csv`, `retrieval-SPLIT.json`, and `errors-SPLIT.csv`, which `ErrorTable` writes.
"""

import csv
import json
from pathlib import Path
from typing import Any

from lit_models.reporting.board import BoardText, board_texts
from lit_models.reporting.markup import Html, joined, table, tag
from lit_models.reporting.reading import RunRecord
from lit_models.reporting.wording import shown

MOST_ROWS, MOST_TEXTS, MOST_CHARACTERS = 12, 8, 300
SPLITS = {"val": "validation", "test": "the test"}
FENCE = "```"


def worst_samples(run: RunRecord) -> list[Html]:
    """Return a block for each thing there is; a file that cannot be read becomes a note."""
    blocks = [_board_block(text) for text in _chosen(board_texts(run.folder, run.notes))]
    readers = (("ranking_queries.csv", _ranking), ("retrieval-*.json", _retrieval),
               ("errors-*.csv", _errors))  # fmt: skip
    for pattern, reader in readers:
        for path in _of_tests(sorted(run.folder.glob(pattern))):
            try:
                blocks.append(reader(path))
            except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
                run.notes.append(f"{path.name} is not what it should be ({error!r}); not shown.")
    if (run.folder / "examples.html").exists():
        words = "examples.html in the run folder shows explanations word by word."
        blocks.append(tag("p", words, class_="note"))
    return blocks


def _of_tests(paths: list[Path]) -> list[Path]:
    """Return the files without those of a validation of which there is the same of a test."""
    tested = {path.name.replace("-test.", "-val.") for path in paths if "-test." in path.name}
    return [path for path in paths if path.name not in tested]


def _chosen(texts: list[BoardText]) -> list[BoardText]:
    """Return some texts: those of a test in place of the same of a validation."""
    names = {text.name for text in texts}
    texts = [text for text in texts if not text.name.endswith("/errors")]  # their files are shown
    kept = [t for t in texts if not (t.name.startswith("val/") and f"test{t.name[3:]}" in names)]
    return kept[:MOST_TEXTS]


def _board_block(text: BoardText) -> Html:
    title = text.name.replace("_", " ")
    return _block(f"{title}, step {shown(text.step)}", markdown(text.text))


def _block(title: str, content: Html) -> Html:
    return tag("div", tag("h3", title), content)


def markdown(text: str) -> Html:
    """Return a table of Markdown as a table, anything else as the text it is."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if len(lines) > 2 and all(line.startswith("|") for line in (lines[0], lines[1])):
        rows = [[cell.strip() for cell in ln.strip().strip("|").split("|")] for ln in lines]
        heads, body = rows[0], rows[2:]
        body = [row for row in body if len(row) == len(heads)]
        # A count comes first there; numbers stand at the right, after the words.
        order = sorted(range(len(heads)), key=lambda i: all(_is_number(row[i]) for row in body))
        texts = sum(not all(_is_number(row[i]) for row in body) for i in order)
        cells = [[row[i] for i in order] for row in body[:MOST_ROWS]]
        return table([heads[i] for i in order], cells, "table", texts)
    if lines and lines[0].startswith(FENCE) and lines[-1].startswith(FENCE):
        return tag("pre", text.strip().removeprefix(FENCE).removesuffix(FENCE).strip("\n"))
    return tag("pre", text)


def _ranking(path: Path) -> Html:
    """Return the queries whose first metric is lowest for the ranker."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    metric = next(name for name in rows[0] if name not in ("query", "system"))
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(row["query"], {})[row["system"]] = float(row[metric])
    return _queries(f"Queries ranked worst ({metric})", values, systems)


def _retrieval(path: Path) -> Html:
    """Return the queries whose first metric is lowest for the retriever."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found = content["per_query"]
    systems = list(found)
    metric = next(iter(found[systems[0]]))
    values: dict[str, dict[str, float]] = {}
    for system in systems:
        for query, value in found[system][metric].items():
            values.setdefault(query, {})[system] = float(value)
    told = {one["query"]: one for one in content.get("worst", [])}
    return _queries(f"Queries answered worst ({metric}, {path.stem})", values, systems, told)


def _queries(
    title: str,
    values: dict[str, dict[str, float]],
    systems: list[str],
    told: dict[str, dict[str, Any]] | None = None,
) -> Html:
    """Return the queries that are lowest for the first system.

    Args:
        title: of the block.
        values: query -> system -> metric.
        systems: in the order of the columns.
        told: query -> its text and the rank of its first relevant document, where known.
    """
    own = systems[0]
    worst = sorted(values, key=lambda query: (values[query].get(own, 0.0), query))[:MOST_ROWS]
    rows = [[query, *(shown(values[query].get(s), 3) for s in systems)] for query in worst]
    heads = ["query", *systems]
    if told:
        of = [told.get(query, {}) for query in worst]
        rows = [[row[0], one.get("text", ""), *row[1:], shown(one.get("first_relevant"))]
                for row, one in zip(rows, of, strict=True)]  # fmt: skip
        heads = ["query", "text", *systems, "rank of the first relevant"]
    return _block(title, table(heads, rows, title, 2 if told else 1))


def _errors(path: Path) -> Html:
    with path.open(newline="", encoding="utf-8") as file:
        heads, *rows = csv.reader(file)
    if any(len(row) != len(heads) for row in rows):
        raise ValueError("rows of other lengths than its head")
    cells = [[cell[:MOST_CHARACTERS] for cell in row] for row in rows[:MOST_ROWS]]
    split = path.stem.removeprefix("errors-")
    title = f"Errors of {SPLITS.get(split, split)}, the worst first"
    words = f"{min(len(rows), MOST_ROWS)} of {len(rows)} rows; all of them: "
    link = tag("p", words, tag("a", path.name, href=path.name), class_="note")
    return _block(title, joined([table(heads, cells, title, max(1, len(heads) - 2)), link]))


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdigit()
