"""Options of documents beside a store: it holds the documents, so that they would change nothing.

An option that is refused here has another value than its default, or than the store.
"""

from inspect import signature
from typing import Any

from datamodules.activations.documents import DocumentsDataModule
from datamodules.activations.store import ActivationStore

OF_THE_DUMP = (
    *("train_files", "validation_files", "test_files", "tokenizer", "split"),
    *("text_column", "attributes_column", "documents_by"),
)
IN_THE_SCHEMA = ("context_length", "positions")


def check_no_documents(options: dict[str, Any]) -> None:
    """Refuse options that belong to the dump.

    Args:
        options: as a `DocumentsDataModule` takes them.

    Raises:
        ValueError: one is given.
    """
    for name in OF_THE_DUMP:
        if name in options and options[name] != _default(name):
            raise ValueError(
                f"data.{name} is {options[name]}, and the documents are in data.activations "
                f"already: it would change nothing. Leave data.{name} out, or give it to the dump."
            )


def check_agrees(options: dict[str, Any], store: ActivationStore) -> None:
    """Refuse options that a store was not dumped with.

    Raises:
        ValueError: one differs.
    """
    for name in IN_THE_SCHEMA:
        given, stored = options.get(name, _default(name)), getattr(store, name)
        if given not in (_default(name), stored):
            raise ValueError(
                f"data.{name} is {given}, and {store.folder} was dumped with {stored}: leave it "
                "out, or dump the activations again with it."
            )


def _default(name: str) -> Any:
    return signature(DocumentsDataModule).parameters[name].default
