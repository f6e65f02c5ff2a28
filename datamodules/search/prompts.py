"""Words that an encoder wants before a query or a document, from its folder."""

import json
from pathlib import Path
from typing import Any

PROMPTS_FILE = "config_sentence_transformers.json"
NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


def prompts_of(folder: str | None) -> dict[str, Any]:
    """Return `prompts` for a recipe, by "query" and "document", of a folder of
    sentence-transformers; nothing where it has none.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder or "") / PROMPTS_FILE
    if folder is None or not path.is_file():
        return {}
    try:
        stored = {**(json.loads(path.read_text("utf-8")).get("prompts") or {})}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); copy the folder again.") from error
    found = {
        name: next((stored[theirs] for theirs in names if stored.get(theirs)), "")
        for name, names in NAMES.items()
    }
    return {"prompts": found} if any(found.values()) else {}
