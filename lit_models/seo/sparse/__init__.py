"""A retriever whose vectors are weights of a vocabulary's tokens, searched by an inverted index."""
