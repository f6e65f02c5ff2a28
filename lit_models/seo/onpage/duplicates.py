"""Pages of one site that repeat each other: the same title or description, or nearly one text."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

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

    Similarity is exact: shared over all different runs of five words, and 1 for equal texts that
    are shorter than one run. Texts are compared only where `earlier_candidates` names them.

    Args:
        texts: words of each.
    """
    numbers: defaultdict[tuple[str, ...], int] = defaultdict()
    numbers.default_factory = numbers.__len__  # a new run gets the next number
    runs = [frozenset(numbers[run] for run in shingles(words)) for words in texts]
    originals: dict[frozenset[int], int] = {}
    found = {i: (originals[r], 1.0) for i, r in enumerate(runs) if originals.setdefault(r, i) != i}
    firsts = [i for i in originals.values() if runs[i]]
    for i, others in earlier_candidates({i: runs[i] for i in firsts}).items():
        shared = {other: len(runs[i] & runs[other]) for other in others}
        similar = {o: n / (len(runs[o]) + len(runs[i]) - n) for o, n in shared.items()}
        best = max(similar, key=lambda o: (similar[o], -o), default=None)
        if best is not None and similar[best] >= NEAR:
            found[i] = (best, similar[best])
    return found


def earlier_candidates(runs: Mapping[int, frozenset[int]]) -> dict[int, set[int]]:
    """Return for each set the earlier ones that may be as similar as `NEAR`; none is missed.

    Such sets share at least `NEAR` of the runs of either, so that of all but one fewer of them,
    taken from one order, at least one is common (Chaudhuri, Ganti and Kaushik 2006, prefix
    filter). The order is from rare to frequent: a menu that all pages share comes last, and names
    no candidates unless it is most of a page.

    Args:
        runs: sets, each different from the others, in order.
    """
    frequency = Counter(run for own in runs.values() for run in own)
    holders: dict[int, list[int]] = defaultdict(list)
    found: dict[int, set[int]] = {}
    for i, own in runs.items():
        size = len(own)
        prefix = sorted(own, key=lambda run: (frequency[run], run))[: size - int(NEAR * size) + 1]
        near = set().union(*(holders[run] for run in prefix))
        sizes = {o: len(runs[o]) for o in near}
        found[i] = {o for o, n in sizes.items() if min(size, n) / max(size, n) >= NEAR}
        for run in prefix:
            holders[run].append(i)
    return found


def shingles(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the different runs of five words, without case; a shorter text is one run."""
    folded = [word.casefold() for word in words]
    if not folded:
        return set()
    size = min(WORDS_PER_SHINGLE, len(folded))
    return {tuple(folded[i : i + size]) for i in range(len(folded) - size + 1)}
