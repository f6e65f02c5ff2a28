"""The files of a Hugging Face tokenizer folder."""

import json
from typing import Any

from tokenizers import Tokenizer

PIPELINE_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


def files_of(
    backend: Tokenizer, special_tokens: dict[str, str], chat_template: str | None
) -> dict[str, str]:
    """Return file name -> content, see `TextTokenizer.hugging_face_files`."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    return {
        PIPELINE_FILE: backend.to_str(pretty=True) + "\n",
        CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
