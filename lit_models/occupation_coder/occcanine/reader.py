"""Reader of OccCANINE models, from folders in the hub's layout and from local files."""

import json
import re
import string
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from datamodules.files.tables import Table
from datamodules.occupations.store import RECIPE_VERSION, UNKNOWN
from datamodules.tokenizers.codes import (
    CONTROL_SYMBOLS,
    MOST_CODES,
    SYSTEMS,
    CodeBook,
    CodeSystem,
    TextOptions,
)
from lit_models.occupation_coder.occcanine import network
from lit_models.run_files import damage, plain_data
from lit_models.training.hyperparameters import plain_values

LANGUAGES = ("ca", "da", "de", "el", "en", "es", "fr", "is", "it", "nl", "no", "pt", "sv")
POSITIONS, LONGEST_TEXT = 128, 119  # 128 less "en[SEP]" and two marks
DECODER_HEADS = 8
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
KEYS = ("key.json", "Key.csv", "key.csv")
FIRST_SYMBOLS = [0, 2, 3, 1]  # OccCANINE's ids of our symbols pad, begin, end and empty
OTHERS_CODES = 4  # default maximum of codes per record in systems other than HISCO
CANINE, LAYER = "network.encoder.canine.", "network.decoder.layers."
SIZES = {  # of CANINE -> weight whose first dimension has this size
    "hidden_size": "char_embeddings.LayerNorm.weight",
    "num_hash_buckets": "char_embeddings.char_position_embeddings.weight",
    "type_vocab_size": "char_embeddings.token_type_embeddings.weight",
    "intermediate_size": "encoder.layer.0.intermediate.dense.weight",
}


def content_of(path: Path) -> dict[str, Any] | None:
    """Return the result of `read_other` for a folder or file that may be an OccCANINE model."""
    folder = path if path.is_dir() else path.parent
    config = _json(folder / "config.json") if (folder / "config.json").is_file() else {}
    content = _weights(path)
    state = content.get("model", content) if isinstance(content, Mapping) else {}
    state = {str(n): v for n, v in state.items() if isinstance(v, Tensor)}
    is_flat = "basemodel.pooler.dense.weight" in state
    if not is_flat and "decoder.token_emb.embedding.weight" not in state:
        if path.is_file():
            return None
        raise ValueError(
            f"{path} has OccCANINE's config, but its weights are of another layout; copy it again."
        )
    base, head = ("basemodel.", "out") if is_flat else ("encoder.", "linear_decoder")
    num_rows = len(state.get(f"{head}.bias", ()))
    key, descriptions = _key(path, folder, content)
    codes, place = _codes(path, key, num_rows)
    vocab_size = 0 if is_flat else len(state["decoder.head.bias"])
    book = _book(path, codes, descriptions, content.get("chars"), folder, vocab_size, config)
    weights = {f"{CANINE}{n[len(base) :]}": v for n, v in state.items() if n.startswith(base)}
    weights.pop(f"{CANINE}char_embeddings.position_ids", None)  # a buffer of older versions
    canine = {name: len(weights[f"{CANINE}{of}"]) for name, of in SIZES.items()}
    width = canine["hidden_size"]
    if not num_rows:  # a flat head that is still to be trained
        place = torch.arange(len(codes))
        state[f"{head}.weight"] = torch.zeros(len(codes), width)
        state[f"{head}.bias"] = torch.full((len(codes),), network.NEW_LOGIT)
    for part in ("weight", "bias"):
        weights[f"network.flat.codes.{part}"] = state[f"{head}.{part}"][place]
    decoder, layers = _decoder(state, len(book.symbols), width)
    deep = f"{CANINE}encoder.layer."
    canine["num_hidden_layers"] = len(
        {name[len(deep) :].partition(".")[0] for name in weights if name.startswith(deep)}
    )
    canine["num_hash_functions"] = sum("HashBucket" in name for name in weights)
    inner = len(state["decoder.decoder.layers.0.linear1.bias"]) if layers else width
    # If one of the heads is not trained, decode and train with the other.
    method, share = ("mixed", 0.5) if num_rows else ("beam", 1.0)
    method, share = ("flat", 0.0) if is_flat else (method, share)
    hyperparameters: dict[str, Any] = {
        "_class_path": "lit_models.LitOccupationCoder",
        "decoding": {"method": method},
        "loss": {"seq2seq_weight": share},
        "optimizer": partial(torch.optim.AdamW, lr=2e-5),
        "encoder": partial(network.OccCanineEncoder, canine=canine, positions=POSITIONS),
        "decoder": partial(
            network.OccCanineDecoder,
            num_layers=layers,
            num_heads=DECODER_HEADS,
            feed_forward=inner,
            dropout=config.get("dropout_rate") or 0.0,
            repeats=bool(book.system.specials),  # which only HISCO has
        ),
    }
    return {
        "state_dict": {**weights, **decoder},
        "hyper_parameters": plain_values(hyperparameters),
        "occupation_recipe": {
            "version": RECIPE_VERSION,
            **TextOptions(fold_accents=True, max_length=LONGEST_TEXT).to_recipe(),
            "languages": [UNKNOWN, *LANGUAGES],
            "default_language": UNKNOWN,
            "code_book": book.to_dict(),
            "temperature": {"seq2seq": 1.0, "flat": 1.0},
        },
        "global_step": 0,
        "epoch": 0,
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); copy the folder again.") from error


def _weights(path: Path) -> Any:
    """Return the content of a local file, or the tensors of a folder by name."""
    files = [path] if path.is_file() else [path / name for name in WEIGHTS]
    if not (existing := [file for file in files if file.is_file()]):
        raise FileNotFoundError(f"{path} lacks {' and '.join(WEIGHTS)}; copy the whole folder.")
    path = existing[0]
    if path.suffix == ".bin":
        if fault := damage(path):
            raise ValueError(f"{path} is damaged: {fault}. Copy it again.")
        return plain_data(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy the folder again.") from error


def _key(
    path: Path, folder: Path, content: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, str]]:
    """Return code -> row of the flat head, and code -> description where the key has them."""
    if isinstance(content.get("key"), Mapping):
        return {str(code): int(row) for code, row in content["key"].items()}, {}
    file = next((folder / name for name in KEYS if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(
            f"{path} names no codes: put key.json (code -> row of the flat head) beside the "
            "weights; for HISCO, Key.csv of the OccCANINE repository (histocc/Data)."
        )
    if file.suffix == ".json":
        return {str(code): int(row) for code, row in _json(file).items()}, {}
    table = Table(file)
    code = "system_code" if "system_code" in table.names else "hisco"
    table.check(["code", code])
    rows = [row for _, row in table.rows()]
    text = next((name for name in ("desc", "en_hisco_text") if name in table.names), code)
    sound = [row for row in rows if row["code"].isdecimal()]
    described = {row[code]: row[text] for row in sound} if text != code else {}
    return {row[code]: int(row["code"]) for row in sound}, described


def _codes(path: Path, key: Mapping[str, int], num_rows: int) -> tuple[list[str], Tensor]:
    """Return the codes in the order of the flat head, and the row [C] of each.

    If the head has one row more than there are codes, row 0 is the empty code's.
    """
    pairs = sorted((row, code) for code, row in key.items() if code.strip())
    rows = torch.tensor([row for row, _ in pairs])
    if num_rows and len(pairs) and num_rows == len(pairs) + 1 and int(rows[-1]) == num_rows - 2:
        rows = rows + 1
    if (
        not pairs
        or len(set(rows.tolist())) < len(pairs)
        or (num_rows and int(rows[-1]) >= num_rows)
    ):
        raise ValueError(
            f"{path}: the key has {len(pairs)} codes with rows up to "
            f"{int(rows.max()) if len(pairs) else 'none'}, and the flat head has {num_rows} rows; "
            "give the key that the model was trained with."
        )
    return [code for _, code in pairs], rows


def _book(
    path: Path,
    codes: list[str],
    descriptions: Mapping[str, str],
    chars: Any,
    folder: Path,
    vocab_size: int,
    config: Mapping[str, Any],
) -> CodeBook:
    """Return the code book with the decoder's symbols in order; `vocab_size` 0: no decoder."""
    if (folder / "chars.json").is_file() and chars is None:
        chars = json.loads((folder / "chars.json").read_text(encoding="utf-8"))
    is_hisco = chars is None and all(re.fullmatch(r"-[123]|\d{4,5}", code) for code in codes)
    texts = [descriptions.get(code, "") for code in codes]
    if is_hisco:
        codes = [code if code.startswith("-") else code.zfill(5) for code in codes]
        symbols = [str(value) for value in range(-3, 10)]
        system = CodeSystem(**SYSTEMS["hisco"])
    else:
        others = [*range(-999, 1000), *string.ascii_letters, *string.punctuation]
        symbols = [str(s) for s in (chars or [c for c in others if c not in ("&", ",")])]
        cut = "," if any("," in code for code in codes) else None
        size = max(len(CodeSystem(symbol_separator=cut).split(code)) for code in codes)
        positions = len(config.get("num_classes") or []) - 2
        most = positions // size if positions > 0 else OTHERS_CODES
        system = CodeSystem(max_codes=max(1, min(most, MOST_CODES)), symbol_separator=cut)
    unknown = sorted({s for code in codes for s in system.split(code)} - set(symbols))
    if unknown:
        raise ValueError(f"{path}: its codes hold {unknown[0]}, which is none of its symbols.")
    symbols = [*CONTROL_SYMBOLS, "<separator>", *symbols]
    if vocab_size and len(symbols) > vocab_size:
        raise ValueError(
            f"{path}: the decoder has {vocab_size} symbols and the codes {len(symbols)}; give "
            "the chars.json that the model was trained with."
        )
    symbols += [f"<{i}>" for i in range(len(symbols), vocab_size)]
    return CodeBook(system, codes, texts, symbols)


def _decoder(
    state: Mapping[str, Tensor], num_symbols: int, width: int
) -> tuple[dict[str, Tensor], int]:
    """Return the decoder's weights and number of layers; zeros and 0 for a flat model."""
    symbols, output = "network.decoder.symbols.weight", "network.decoder.output."
    if "decoder.head.weight" not in state:
        zeros = torch.zeros(num_symbols, width)
        return {symbols: zeros, f"{output}weight": zeros.clone(), f"{output}bias": zeros[:, 0]}, 0
    order = [*FIRST_SYMBOLS, *range(len(FIRST_SYMBOLS), num_symbols)]
    weights = {symbols: state["decoder.token_emb.embedding.weight"][order]}
    weights |= {
        f"{output}{part}": state[f"decoder.head.{part}"][order] for part in ("weight", "bias")
    }
    layers = 0
    while f"decoder.decoder.layers.{layers}.linear1.weight" in state:
        theirs, ours = f"decoder.decoder.layers.{layers}.", f"{LAYER}{layers}."
        for part in ("weight", "bias"):
            read = state[f"{theirs}multihead_attn.in_proj_{part}"]
            weights[f"{ours}self_qkv.{part}"] = state[f"{theirs}self_attn.in_proj_{part}"]
            weights[f"{ours}cross_query.{part}"] = read[:width]
            weights[f"{ours}cross_kv.{part}"] = read[width:]
            for our_name, their_name in NAMES.items():
                weights[f"{ours}{our_name}.{part}"] = state[f"{theirs}{their_name}.{part}"]
        layers += 1
    return weights, layers


NAMES = {  # of a decoder layer: our name -> OccCANINE's name
    "self_output": "self_attn.out_proj",
    "cross_output": "multihead_attn.out_proj",
    "expand": "linear1",
    "contract": "linear2",
    **{f"norms.{i}": f"norm{i + 1}" for i in range(3)},
}
