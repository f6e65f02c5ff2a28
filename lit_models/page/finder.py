"""What each way of searching finds in a collection."""

from typing import Any

from datamodules.search.candidates import FIRST_DEPTH, Bm25Options, open_bm25

MOST_ASKED = 64  # queries that an index is tuned by


class Finder:
    """What each way finds in a collection: BM25, a LitRetriever, which encodes it here, and both
    fused, or a LitRanker. `grades`: text of a judged query -> number of a document -> grade."""

    def __init__(self, module: Any, data: Any) -> None:
        self.module, self.data, self.documents = module, data, data.collection.documents
        self.bm25 = open_bm25(data.collection, data.bm25 or Bm25Options())
        self.grades: dict[str, dict[int, float]] = {}
        for judged in (data.judged("validation", True), data.judged("test", True)):
            for place, query in enumerate(data.queries(judged.queries)):
                self.grades[query.text] = dict(zip(*judged.judged(place), strict=True))
        if hasattr(module, "encode"):
            vectors = module.encode([document.whole for document in self.documents], False)
            asked = [query.text for query in data.collection.queries][:MOST_ASKED]
            self.index = module.index(vectors, module.encode(asked, True), FIRST_DEPTH)

    def find(self, query: str) -> dict[str, Any]:
        """Return way -> what the datamodule shows of its ten best documents."""
        found: dict[str, Any] = {"BM25": (first := self.bm25.search([query], FIRST_DEPTH))}
        if hasattr(self.module, "encode"):
            found["Retriever"] = own = self.module.search([query], self.index, FIRST_DEPTH)
            if (weight := self.module.fusion_weight()) is not None:
                found[f"Fused, BM25 weighs {weight:g}"] = self.module.fuse(own, first)
        elif size := min(self.data.candidates.top, (first.documents >= 0).sum()):
            numbers, prior = (values[0, :size] for values in first)
            texts = [self.documents[number].whole for number in numbers]
            scores = self.module.rank(query, texts, prior if self.module.adds_prior else None)
            order = scores.argsort(descending=True).tolist()
            found["Re-ranked"] = numbers[None, order], scores[None, order]
        for way, hits in found.items():
            best = zip(*(values[0, :10].tolist() for values in hits), strict=True)
            found[way] = [self.data.shown(query, *hit) for hit in best if hit[0] >= 0]
        return found
