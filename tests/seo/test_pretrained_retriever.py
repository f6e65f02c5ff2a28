"""A retriever on a Hugging Face folder: a tiny BERT with random weights."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from datamodules.text.encoding import TextEncoding
from lit_models import LitRetriever
from lit_models.causal_lm.adapters import LoraOptions
from tests.distributed.seo_retriever import adamw, retriever
from tests.seo.retrieval_collection import WORDS, write_collection
from tests.toy import toy_trainer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]


def bert_folder(folder: Path, pieces: list[str] = PIECES, **sizes: int) -> Path:
    """Write a BERT with random weights and a tokenizer of whole words."""
    import tokenizers
    import transformers

    torch.manual_seed(0)
    numbers = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    marks = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **marks)
    tokenizer.save_pretrained(folder)
    default = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    }
    config = transformers.BertConfig(
        vocab_size=len(pieces),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **{**default, **sizes},
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    write_collection(folder / "collection")
    bert_folder(folder / "bert")
    return folder


def test_its_vectors_are_those_of_transformers_pooled_over_tokens(
    folder: Path, tmp_path: Path
) -> None:
    import transformers

    _, data = retriever(folder / "run", {})
    data.tokenizer_options = None
    frozen = LitRetriever(optimizer=adamw, pretrained=str(folder / "bert"))
    toy_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(frozen, data)
    fitted = LitRetriever.load_from_checkpoint(tmp_path / "checkpoints/last.ckpt").eval()
    texts = ["salt bread", "old iron boat sold by weight. cheap wool"]
    found = fitted.encode(texts, is_query=True)
    model = transformers.AutoModel.from_config(fitted.network.encoder.model.config)
    weights = fitted.network.encoder.model.state_dict()
    model.load_state_dict(weights, strict=False)
    encoding = TextEncoding(fitted.recipe)
    for text, vector in zip(texts, found, strict=True):
        ids = torch.from_numpy(encoding.framing.query(encoding.ids(text)).ids)[None]
        assert ids[0, 0] == PIECES.index("[CLS]")
        assert ids[0, -1] == PIECES.index("[SEP]")
        hidden = model.eval().to(vector.dtype)(input_ids=ids).last_hidden_state
        expected = F.normalize(hidden.mean(1), dim=1)[0].detach()
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-5)


def test_adapters_learn_and_the_folder_s_weights_stand_still(folder: Path, tmp_path: Path) -> None:
    _, data = retriever(folder / "run", {})
    data.tokenizer_options = None
    module = LitRetriever(
        optimizer=adamw,
        pretrained=str(folder / "bert"),
        lora=LoraOptions(["query", "value"], rank=2),
        encode_chunk=4,
    )
    toy_trainer(tmp_path, max_steps=2, limit_val_batches=0).fit(module, data)
    learning = [name for name, p in module.named_parameters() if p.requires_grad]
    assert all("lora" in name or "temperature" in name for name in learning), learning
    assert any("lora" in name for name in learning)
