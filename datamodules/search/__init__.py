"""Collections of documents, queries and judgements; batches for rankers and retrievers."""
