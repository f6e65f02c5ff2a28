"""Network blocks that two or more families use; no Lightning."""
