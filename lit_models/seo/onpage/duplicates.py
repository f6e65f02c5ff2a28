"""Pages of one site that repeat each other: the same title or description, or nearly one text."""

from collections import defaultdict
from collections.abc import Sequence

from lit_models.seo.onpage.page import Finding, Page, shown

WORDS_PER_SHINGLE = 5
NEAR = 0.8  # Jaccard similarity of the sets of shingles (Broder 1997)


def duplicates(pages: Sequence[Page], facts: Sequence[dict]) -> list[list[Finding]]:
    """Return for each page the findings of what it shares with the pages before it.

    Args:
        pages: of one site.
        facts: of each page, with its title and description.
    """
    found: list[list[Finding]] = [[] for _ in pages]
    for name in ("title", "description"):
        first: dict[str, int] = {}
        for i, fact in enumerate(facts):
            key = " ".join((fact[name] or "").casefold().split())
            if key and first.setdefault(key, i) != i:
                rule = f"the same {name} as {pages[first[key]].name}"
                found[i].append(Finding("duplicates", rule, shown(fact[name]), f"<{name}>"))
    for i, (other, share) in near_duplicates([page.words for page in pages]).items():
        rule = f"{100 * share:.0f} % of the text is that of {pages[other].name}"
        found[i].append(Finding("duplicates", rule, shown(" ".join(pages[i].words)), "text"))
    return found


def near_duplicates(texts: Sequence[Sequence[str]]) -> dict[int, tuple[int, float]]:
    """Return for each text that nearly repeats earlier ones the most similar one, and how similar.

    Texts that share no run of words are never compared. Similarity is exact: shared over all
    different runs of five words, and 1 for equal texts that are shorter than one run.

    Args:
        texts: words of each.
    """
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes, found = [], {}
    for i, words in enumerate(texts):
        runs = shingles(words)
        shared: dict[int, int] = defaultdict(int)
        for run in runs:
            for other in holders[run]:
                shared[other] += 1
            holders[run].append(i)
        sizes.append(len(runs))
        similar = {o: n / (sizes[o] + sizes[i] - n) for o, n in shared.items()}
        best = max(similar, key=lambda o: (similar[o], -o), default=None)
        if best is not None and similar[best] >= NEAR:
            found[i] = (best, similar[best])
    return found


def shingles(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the different runs of five words, without case; a shorter text is one run."""
    folded = [word.casefold() for word in words]
    if not folded:
        return set()
    size = min(WORDS_PER_SHINGLE, len(folded))
    return {tuple(folded[i : i + size]) for i in range(len(folded) - size + 1)}
