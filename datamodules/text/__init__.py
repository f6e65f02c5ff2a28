"""Texts, chats, pages, pairs and prompts as token batches for models that generate text."""
