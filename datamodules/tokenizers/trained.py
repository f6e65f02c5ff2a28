"""Tokenizers whose vocabulary needs no download: bytes, and what the own text is made of.

That is its characters, its words or its byte pairs.
"""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from datamodules.tokenizers.spelling import words_of
from datamodules.tokenizers.text_tokenizer import TextTokenizer

END_OF_TEXT = "<|endoftext|>"
UNKNOWN_WORD = "<|unknown|>"


def byte_tokenizer(chat_template: str | None = None) -> TextTokenizer:
    """Return the tokenizer whose tokens are the 256 bytes of UTF-8, and end-of-text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _with_end(backend, chat_template)


def character_tokenizer(texts: Iterable[str], chat_template: str | None = None) -> TextTokenizer:
    """Return the tokenizer whose tokens are the characters of these texts, and end-of-text.

    Raises:
        ValueError: there is no text.
    """
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    if not alphabet:
        raise ValueError(_no_text("characters"))
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(sorted(alphabet))}, []))
    backend.decoder = decoders.Fuse()
    return _with_end(backend, chat_template)


def word_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    chat_template: str | None = None,
    min_count: int | None = None,
) -> TextTokenizer:
    """Return the tokenizer whose tokens are the words of these texts, and end-of-text.

    A word is what stands between white space; a decoded text has one space between two words.

    Args:
        texts: any number, read once.
        vocab_size: the most tokens, end-of-text included.
        chat_template: see `TextTokenizer`.
        min_count: words of fewer texts, and unknown ones, become one token of their own; none
            keeps all words and refuses unknown ones.

    Raises:
        ValueError: there is no word, or there are more than vocab_size.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(set(words_of(text.replace(END_OF_TEXT, " "))))
        if min_count is None and len(counts) >= vocab_size:
            raise ValueError(_too_many_words(vocab_size, "data.tokenizer.min_count"))
    words = sorted(word for word, count in counts.items() if count >= (min_count or 1))
    if not words:
        raise ValueError(_no_text("words"))
    if len(words) + 2 > vocab_size and min_count is not None:
        raise ValueError(_too_many_words(vocab_size, f"data.tokenizer.min_count {min_count}"))
    vocabulary = {word: i for i, word in enumerate(words)}
    # No word is empty: without a token for the unknown, such a word is refused.
    unknown = "" if min_count is None else UNKNOWN_WORD
    if unknown:
        vocabulary[unknown] = len(vocabulary)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_end(backend, chat_template, unknown)


def bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, chat_template: str | None = None
) -> TextTokenizer:
    """Return the tokenizer of the most frequent byte pairs of these texts, and end-of-text.

    Texts are cut into words as GPT-2 does it; the same texts in any order give the same tokens.

    Args:
        texts: any number, read once.
        vocab_size: end-of-text included; fewer tokens where the texts have no more pairs.
        chat_template: see `TextTokenizer`.

    Raises:
        ValueError: there is no text.

    Source: Sennrich, Haddow, Birch 2016; bytes as in Radford et al. 2019, section 2.2.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    num_characters = 0

    def counted() -> Iterable[str]:
        nonlocal num_characters
        for text in texts:
            num_characters += len(text)
            yield text

    backend.train_from_iterator(counted(), trainer)
    if not num_characters:
        raise ValueError(_no_text("bpe"))
    return _with_end(backend, chat_template)


def _with_end(backend: Tokenizer, chat_template: str | None, unknown: str = "") -> TextTokenizer:
    backend.add_special_tokens([END_OF_TEXT, *([unknown] if unknown else [])])
    end_id = backend.token_to_id(END_OF_TEXT)
    assert end_id is not None
    special = [(name, END_OF_TEXT) for name in ("bos_token", "eos_token", "pad_token")]
    special += [("unk_token", unknown)] if unknown else []
    return TextTokenizer(backend, end_id, end_id, chat_template, tuple(special))


def _too_many_words(vocab_size: int, option: str) -> str:
    return (
        f"the training text has more different words than there is room for beside the special "
        f"tokens in tokenizer.vocab_size {vocab_size}; raise it, raise {option}, which makes rare "
        "words unknown, or use data.tokenizer.kind bpe, which spells rare words in pieces."
    )


def _no_text(kind: str) -> str:
    return (
        f"tokenizer.kind {kind} takes its vocabulary from the training text, and there is none; "
        "name files with data.train_files, or use tokenizer.kind bytes."
    )
