"""The network of a run, from its options and the code book that its data were read with."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from datamodules.tokenizers.codes import CodeBook
from lit_models.occupation_coder.encoders import Encoder
from lit_models.occupation_coder.loss import LossOptions, check_num_codes
from lit_models.occupation_coder.network import BlockDecoder, OccupationNetwork
from lit_models.occupation_coder.trie import CodeTrie

EncoderFactory = Callable[[int], Encoder]  # number of languages -> encoder
DecoderFactory = Callable[
    [int, CodeTrie], BlockDecoder
]  # width of the memory, code book -> decoder


def new_network(
    book: CodeBook,
    num_languages: int,
    encoder_factory: EncoderFactory,
    decoder_factory: DecoderFactory,
    loss: LossOptions,
) -> OccupationNetwork:
    """Return an untrained network.

    Args:
        book: the codes that it writes.
        num_languages: the unknown one included.
        encoder_factory: see `LitOccupationCoder`.
        decoder_factory: see `LitOccupationCoder`.
        loss: says how its flat head is trained.

    Raises:
        ValueError: more codes per record than can be matched in all their orders.
    """
    trie = CodeTrie.from_code_book(book)
    check_num_codes(trie)
    encoder = encoder_factory(num_languages)
    decoder = decoder_factory(encoder.width, trie)
    return OccupationNetwork(encoder, decoder, loss.flat_dropout, loss.linear)


def class_weights(book: CodeBook, weights: Mapping[str, float]) -> Tensor:
    """Return the weight of each code's presence in the flat loss [C].

    Args:
        book: of C codes.
        weights: code -> weight; 1 where not given.

    Raises:
        ValueError: a code that the book has not.
    """
    found = torch.ones(len(book.codes))
    for code, weight in weights.items():
        found[book.index(code)] = weight
    return found
