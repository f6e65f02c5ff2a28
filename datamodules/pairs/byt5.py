"""The tokenizer of ByT5, whose folders hold none: bytes of UTF-8 behind three special tokens."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from datamodules.core.store import cache_root, made_once
from datamodules.tokenizers.text import CONFIG_FILE, PIPELINE_FILE, TextTokenizer

SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # 0, 1, 2
NUM_EXTRA = 125  # sentinels of pretraining, the last tokens


def byt5_folder(folder: str | Path) -> str | None:
    """Return the folder of a tokenizer.json for a folder of ByT5, made at first use; `None` for
    another one."""
    path = Path(folder).expanduser()
    if (path / PIPELINE_FILE).exists() or not (path / CONFIG_FILE).is_file():
        return None
    if (
        json.loads((path / CONFIG_FILE).read_text("utf-8")).get("tokenizer_class")
        != "ByT5Tokenizer"
    ):
        return None

    def write(made: Path) -> None:
        for name, content in byt5_tokenizer().hugging_face_files().items():
            (made / name).write_text(content, "utf-8")

    return str(made_once(cache_root() / "tokenizers" / "byt5-1", write))


def byt5_tokenizer() -> TextTokenizer:
    """Return it. Source: Xue et al. 2022, section 3.1."""
    tokens = [*SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    # Blanks beside the first three belong to them.
    special = [AddedToken(token, lstrip=True, rstrip=True) for token in SPECIAL.values()]
    backend.add_special_tokens([*special, *(f"<extra_id_{n}>" for n in range(NUM_EXTRA))])
    return TextTokenizer(backend, vocabulary["</s>"], None, None, SPECIAL)
