"""Source texts to target texts by an encoder and a decoder."""
