"""A collection so small that a run on it takes a second; a ranker and a small BERT for it."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import RankingDataModule
from datamodules.core.planned import LoaderOptions
from datamodules.search.collection import CollectionRequest
from datamodules.text.encoding import TextLimits
from lit_models import LitRanker
from lit_models.seo.encoders import TransformerEncoder

WORDS = ["salt", "bread", "wool", "iron", "ship", "hay", "ale", "clay"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "title", *WORDS]
PARTS = {"train": 30, "validation": 9, "test": 11}
NUM_DOCUMENTS = 40
adamw = partial(torch.optim.AdamW, lr=0.01)
small_encoder = partial(TransformerEncoder, width=16, num_layers=2, num_heads=2, feed_forward=32)


def relevance_files(folder: Path) -> Path:
    """Write documents of 2 to 6 words, and queries of two; judged is by shared words, and only
    some documents are. The last document of each query has grade 0."""
    rng = np.random.default_rng(0)
    bags = [rng.choice(WORDS, rng.integers(2, 7)).tolist() for _ in range(NUM_DOCUMENTS)]
    documents = [{"_id": f"d{i}", "title": "", "text": " ".join(b)} for i, b in enumerate(bags)]
    documents[3]["title"] = "a title"
    queries = []
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for part, number in PARTS.items():
        lines = ["query-id\tcorpus-id\tscore"]
        for _ in range(number):
            asked, id = rng.choice(WORDS, 2, replace=False).tolist(), f"q{len(queries)}"
            queries.append({"_id": id, "text": " ".join(asked)})
            by_grade = sorted(range(NUM_DOCUMENTS), key=lambda i: -len({*asked} & {*bags[i]}))
            judged = [*rng.choice(by_grade[:8], rng.integers(1, 5), replace=False), by_grade[-1]]
            lines += [f"{id}\td{i}\t{len({*asked} & {*bags[i]})}" for i in judged]
        (folder / "qrels" / f"{part}.tsv").write_text("\n".join(lines) + "\n")
    for name, rows in (("corpus", documents), ("queries", queries)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def ranking_data(folder: Path, **options: Any) -> RankingDataModule:
    """Return the datamodule of `relevance_files(folder)`."""
    defaults = {
        "collection": CollectionRequest(str(folder)),
        "text": TextLimits(max_length=48, max_query_length=16),
        "loader": LoaderOptions(num_workers=0),
        "global_batch_size": 8,
    }
    return RankingDataModule(**defaults | options)


def ranker(**options: Any) -> LitRanker:
    """Return a ranker of two narrow layers."""
    return LitRanker(**{"optimizer": adamw, "encoder": small_encoder, **options})


def bert_folder(folder: Path, pieces: Sequence[str] = VOCABULARY, **sizes: int) -> Path:
    """Write a small BERT with random weights, and its WordPiece tokenizer of whole words."""
    import tokenizers
    import transformers

    torch.manual_seed(0)
    options = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        **sizes,
    }
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(vocab_size=len(pieces), **options, **rates)
    transformers.BertModel(config).save_pretrained(folder)
    numbers = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    marks = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.BertTokenizerFast(tokenizer_object=backend, **marks).save_pretrained(folder)
    return folder
