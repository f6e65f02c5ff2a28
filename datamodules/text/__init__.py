"""Texts, chats, pages, pairs and prompts as batches of tokens for models that write."""
