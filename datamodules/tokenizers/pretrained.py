"""The tokenizer of a local Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from datamodules.tokenizers.hugging_face import CONFIG_FILE, PIPELINE_FILE
from datamodules.tokenizers.text_tokenizer import TextTokenizer

SPECIAL_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def folder_tokenizer(folder: Path, chat_template: str | None = None) -> TextTokenizer:
    """Return the tokenizer of a folder.

    Args:
        folder: with tokenizer.json, or files from which transformers builds it.
        chat_template: wins over that of the folder.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
        ValueError: its files are damaged, or name no end-of-text token.
    """
    tokenizer_files(str(folder))
    config = {**_json(folder / SPECIAL_FILE), **_json(folder / CONFIG_FILE)}
    backend = _backend(folder)
    backend.no_truncation()  # tokenizer.json may hold both, and would cut texts in silence
    backend.no_padding()
    special = {name: _content(config[name]) for name in NAMES if config.get(name)}
    end = "eos_token" if "eos_token" in special else "sep_token"  # BERT has the latter alone
    if end not in special:
        raise ValueError(
            f"{folder} names no end-of-text token, which ends documents and answers; add "
            f'"eos_token" to its {CONFIG_FILE}, a token of the vocabulary.'
        )
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    end_id = ids[end]
    if end_id is None:
        raise ValueError(
            f'{folder}: the end-of-text token "{special[end]}" of {CONFIG_FILE} is not '
            f"in the vocabulary; name one that is."
        )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    # A template writes them into the text, where they must be found.
    backend.add_special_tokens(
        [t for n, t in special.items() if ids[n] is not None and t not in known]
    )
    return TextTokenizer(
        backend,
        end_id,
        ids.get("bos_token"),
        chat_template or _template(folder, config),
        tuple((name, token) for name, token in special.items() if ids[name] is not None),
    )


def tokenizer_files(path: str) -> list[Path]:
    """Return the files of a folder on which its tokenizer depends.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"tokenizer.path: {folder} is no folder; name the local folder of a Hugging Face "
            "tokenizer. Nothing is downloaded."
        )
    vocabulary = [folder / name for name in (PIPELINE_FILE, *MODEL_FILES)]
    if not any(file.is_file() for file in vocabulary):
        raise FileNotFoundError(
            f"tokenizer.path: {folder} holds no tokenizer ({PIPELINE_FILE}, "
            f"{', '.join(MODEL_FILES)}); copy its files there."
        )
    others = [folder / name for name in (CONFIG_FILE, SPECIAL_FILE, TEMPLATE_FILE)]
    return [file for file in (*vocabulary, *others) if file.is_file()]


def _backend(folder: Path) -> Tokenizer:
    path = folder / PIPELINE_FILE
    if not path.is_file():
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not hasattr(made, "backend_tokenizer"):
            raise ValueError(
                f"{folder}: transformers reads it as a {type(made).__name__} without a fast "
                f"pipeline; save one with a {PIPELINE_FILE}."
            )
        return made.backend_tokenizer
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"{path} cannot be read by the tokenizers library ({error}); copy it again."
        ) from error


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON in UTF-8 ({error}); copy it again.") from error
