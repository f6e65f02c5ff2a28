"""Which token an attribute's word is known by."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from datamodules.activations.documents import NONE, first_tokens
from datamodules.tokenizers.text import TextTokenizer


def sentence_piece() -> TextTokenizer:
    """A space is the sign \u2581; it joins only a word whose piece with it is known."""
    pieces = ["</s>", "\u2581", "o", "w", "l", "ow", "owl", "c", "\u2581c"]
    merges = [("o", "w"), ("ow", "l"), ("\u2581", "c")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["</s>"])
    return TextTokenizer(backend, end_id=0)


def test_a_token_of_white_space_alone_is_passed_over() -> None:
    tokenizer = sentence_piece()
    assert tokenizer.encode(" owl").tolist() == [1, 6]
    assert tokenizer.encode(" cow").tolist() == [8, 5]
    assert first_tokens(["owl", "cow", ""], tokenizer) == {"owl": 6, "cow": 8, "": NONE}
