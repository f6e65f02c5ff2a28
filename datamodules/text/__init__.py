"""Texts, chats, pages and prompts as batches of tokens for language models."""
