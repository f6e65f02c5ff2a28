"""A cross-encoder on a folder of transformers: as it comes, with adapters, frozen below."""

import json
from functools import partial

import pytest
import torch

from lit_models import LitRanker
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.commands.export import export_checkpoint
from lit_models.seo.encoders import PretrainedEncoder
from lit_models.training.checkpoints import read_checkpoint
from tests.seo.small_collection import WORDS, ranker, ranking_data, relevance_files
from tests.toy import toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "title", *WORDS]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
sgd = partial(torch.optim.SGD, lr=0.1)


def bert_folder(folder):
    """Write a small BERT with random weights, and its WordPiece tokenizer."""
    import tokenizers
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(VOCABULARY), **SIZES)
    transformers.BertModel(config).save_pretrained(folder)
    pieces = {piece: number for number, piece in enumerate(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    marks = {f"{name}_token": token for name, token in names.items()}
    transformers.BertTokenizerFast(tokenizer_object=backend, **marks).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = relevance_files(tmp_path_factory.mktemp("relevance"))
    bert_folder(folder / "bert")
    return folder


def fitted(folder, root, steps=2, **options):
    module = ranker(**{"pretrained": str(folder / "bert"), "optimizer": sgd, **options})
    torch.manual_seed(1)
    trainer = toy_trainer(root, max_steps=steps, limit_val_batches=0, precision=32)
    trainer.fit(module, ranking_data(folder))
    return module


def changes(folder, module):
    """Return parameter -> how far it is from the folder's."""
    content = json.loads((folder / "bert" / "config.json").read_text())
    before = PretrainedEncoder.loaded(folder / "bert", content).state_dict()
    after = {n.removeprefix("network.encoder."): p for n, p in module.named_parameters()}
    after = {n.replace(".base.", "."): p for n, p in after.items()}
    return {n: float((after[n].detach() - p).abs().max()) for n, p in before.items() if n in after}


def test_a_row_is_framed_and_scored_as_the_folder_says(folder, tmp_path):
    module = fitted(folder, tmp_path).eval()
    data = ranking_data(folder)
    ids = [2, *(VOCABULARY.index(w) for w in ("salt", "wool")), 3, VOCABULARY.index("hay"), 3]
    rows = torch.tensor([ids])
    model = module.network.encoder.model
    with torch.no_grad():
        types = torch.tensor([[0, 0, 0, 0, 1, 1]])
        hidden = model(input_ids=rows, token_type_ids=types).last_hidden_state
        expected = module.network.score(torch.tanh(module.network.dense(hidden.mean(1)))).squeeze(
            -1
        )
    torch.testing.assert_close(module.rank("Salt wool", ["HAY"]), expected)
    assert data.recipe is None
    moved = changes(folder, module)
    assert all(change > 0 for name, change in moved.items() if "key.bias" not in name), moved


def test_frozen_layers_stand_still_and_lower_layers_learn_more_slowly(folder, tmp_path):
    frozen = ["encoder.model.embeddings.*"]
    module = fitted(folder, tmp_path, freeze=frozen, layer_decay=0.5)
    moved = {n: c for n, c in changes(folder, module).items() if "key.bias" not in n}
    assert all((change == 0) == ("embeddings" in name) for name, change in moved.items()), moved
    factors = {group["lr_factor"] for group in module.trainer.optimizers[0].param_groups}
    assert factors == {1.0, 0.5, 0.25, 0.125}  # the head, and three layers from the top down


def test_adapters_alone_are_trained_and_survive_checkpoint_and_export(folder, tmp_path):
    lora = LoraOptions(["query", "value"], rank=2)
    module = fitted(folder, tmp_path / "run", steps=4, lora=lora)
    learning = {name for name, p in module.named_parameters() if p.requires_grad}
    assert all(".query." in n or ".value." in n or "network.encoder" not in n for n in learning), (
        learning
    )
    assert len(learning) == 2 * 2 * 3 + 3
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert read_checkpoint(path)["text_encoder_recipe"]["lora"] is not None
    texts = ["hay", "salt bread", "clay clay wool"]
    expected = module.eval().rank("salt", texts)
    loaded = LitRanker.load_from_checkpoint(path).eval()
    assert torch.equal(loaded.rank("salt", texts), expected)
    export_checkpoint(path, tmp_path / "out", class_path="lit_models.LitRanker")
    (folder / "bert").rename(folder / "gone")  # neither needs the folder again
    try:
        assert torch.equal(LitRanker.from_exported(tmp_path / "out").rank("salt", texts), expected)
    finally:
        (folder / "gone").rename(folder / "bert")
