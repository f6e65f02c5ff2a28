"""Collections of documents, queries and judgements, and what is made of them."""
