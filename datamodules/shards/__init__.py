"""Language models on token data of any size: shards, their indices and the order of their rows."""
