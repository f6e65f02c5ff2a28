"""A page of examples: one file that needs no network, and sorts itself."""

from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #5c6570; --paper: #fff; --line: #d8dde3;
  --mark: #ffe08a; --tint: 214, 90, 20; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --dim: #9aa4af; --paper: #15181c; --line: #333a42; --mark: #6b5300;
    --tint: 255, 140, 60; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .5rem; }
p { margin: 0 0 1rem; color: var(--dim); max-width: 48rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem .4rem 0;
  overflow-wrap: anywhere; border-bottom: 1px solid var(--line); }
td { white-space: pre-wrap; }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0;
  padding: 0; cursor: pointer; text-align: left; white-space: nowrap; }
th button::after { content: " \\2195"; color: var(--dim); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.context { color: var(--dim); min-width: 18rem; }
mark { background: var(--mark); color: var(--ink); border-radius: 2px; }
.word { background: rgba(var(--tint), var(--share)); border-radius: 2px; }
@media (max-width: 45rem) {
  thead tr { display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
  table, thead, tbody, td { display: block; }
  tbody tr { display: block; border-bottom: 1px solid var(--line); padding: .6rem 0; }
  th, td { border: 0; padding: .1rem 0; }
  .context { min-width: 0; }
  td[data-name]::before { content: attr(data-name) ": "; color: var(--dim); font-size: .85rem; }
}
"""

SCRIPT = """
const table = document.querySelector("table"), body = table.tBodies[0];
table.querySelectorAll("th button").forEach((button, column) => {
  button.addEventListener("click", () => {
    const head = button.parentElement, falls = head.getAttribute("aria-sort") === "ascending";
    const key = row => row.cells[column].dataset.key;
    const isNumber = head.dataset.kind === "number";
    const compared = (a, b) => isNumber ? key(a) - key(b) : key(a).localeCompare(key(b));
    const rows = [...body.rows].sort((a, b) => falls ? compared(b, a) : compared(a, b));
    table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    body.append(...rows);
  });
});
"""

# Heading, and whether it is sorted as a number.
COLUMNS = (
    *(("error", True), ("context", False), ("explanation", False)),
    *(("nearest control", False), ("its error", True), ("document", False), ("position", True)),
)


def page(examples: list[dict[str, Any]], number: int) -> str:
    """Return the page as HTML.

    Args:
        examples: as `examples` returns them, by rising error.
        number: of all activations among which they were chosen.
    """
    heads = "".join(_head(name, is_number, name == "error") for name, is_number in COLUMNS)
    largest = max((s for line in examples for _, s in line["words"]), default=0.0)
    rows = "\n".join(_row(line, largest) for line in examples)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>Explanations of activations</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Explanations of activations</h1>
<p>{len(examples)} of {number} activations of the test part, at even distances from the best rebuilt
to the worst. The marked token is the last that the activation knows of. A word is the more
coloured, the more the error grows when the word that another explanation has in its place stands
there. Errors are squared, in units of the training part's variance: 1 is as bad as the mean.</p>
<table>
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _head(name: str, is_number: bool, is_sorted: bool) -> str:
    kind = "number" if is_number else "text"
    order = ' aria-sort="ascending"' if is_sorted else ""
    return f'<th scope="col" data-kind="{kind}"{order}><button type="button">{name}</button></th>'


def _row(line: dict[str, Any], largest: float) -> str:
    nearest, nearest_error = next(iter(line["nearest_controls"].items()))
    others = [f"{name} {error:.3f}" for name, error in line["nearest_controls"].items()]
    context = (
        f"{escape(line['before'].lstrip())}<mark>{escape(line['token']) or '&nbsp;'}</mark>"
        f"{escape(line['after'])}"
    )
    words = "".join(_word(text, salience, largest) for text, salience in line["words"])
    contents = (
        (line["error"], f"{line['error']:.3f}", "number"),
        (line["before"] + line["token"], context, "context"),
        (line["explanation"], words, ""),
        (nearest, f'<span title="{escape(", ".join(others))}">{escape(nearest)}</span>', ""),
        (nearest_error, f"{nearest_error:.3f}", "number"),
        (line["document"], escape(line["document"]), ""),
        (line["position"], str(line["position"]), "number"),
    )
    cells = (
        f'<td class="{kind}" data-name="{name}" data-key="{escape(str(key))}">{shown}</td>'
        for (name, _), (key, shown, kind) in zip(COLUMNS, contents, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _word(text: str, salience: float, largest: float) -> str:
    share = min(1.0, max(0.0, salience / largest)) if largest > 0 else 0.0
    shade = f'style="--share: {0.75 * share:.2f}" title="{salience:+.3f}"'
    return f'<span class="word" {shade}>{escape(text)}</span>'
