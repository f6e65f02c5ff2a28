"""Data preparation on one machine or many: files of text become shards of tokens."""
