"""Data, ranker and BERT for a collection so small that a run takes a second."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from datamodules import RankingDataModule
from datamodules.core.planned import LoaderOptions
from datamodules.search.collection import CollectionRequest
from datamodules.text.encoding import TextLimits
from lit_models import LitRanker
from lit_models.seo.encoders import TransformerEncoder
from tests.search_collections import WORDS

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "title", *WORDS]
adamw = partial(torch.optim.AdamW, lr=0.01)
small_encoder = partial(TransformerEncoder, width=16, num_layers=2, num_heads=2, feed_forward=32)


def ranking_data(folder: Path, **options: Any) -> RankingDataModule:
    """Return the datamodule of `write_collection(folder)`."""
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
