"""TokenisedDataModule: training and evaluation of the language models read a store of tokens."""

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.core.checkpoint_recipe import checkpoint_to_load, read_recipe
from datamodules.core.planned import PlannedDataModule
from datamodules.files.splitting import TEST, TRAIN, VALIDATION
from datamodules.text.token_store import TokenisedFolder
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions
from datamodules.tokenizers.wanted import TEXT_RECIPE_KEY, model_options, trained_tokenizer

Files = str | list[str] | None


class TokenisedDataModule(PlannedDataModule):
    """Makes the store of a stage, with the tokenizer of the model where that is trained.

    Attributes:
        files: of training, validation and test, as the user gave them.
        tokenizer_options: of the user; none leaves the choice to the model.
        context_length: most positions of a row.
        store: of tokens; none before `setup`, and in prediction.
    """

    files: dict[int, Files]
    tokenizer_options: TokenizerOptions | None
    context_length: int
    store: Any

    @abstractmethod
    def paths(self, part: int) -> list[Path]:
        """Return the files of one part; FileNotFoundError where one does not exist."""

    @abstractmethod
    def store_request(self, may_lack_training: bool = False) -> Any:
        """Return what is read and how; arguments and errors as `named_files`."""

    @abstractmethod
    def make_store(self, request: Any) -> Any:
        """Return the store of a request, made at first use."""

    def named_files(self, may_lack_training: bool) -> dict[int, list[Path]]:
        """Return the files of training, validation and test.

        Args:
            may_lack_training: those of training may be missing where validation has its own.

        Raises:
            FileNotFoundError: a named file does not exist.
        """
        files = {part: self.paths(part) for part in (VALIDATION, TEST)}
        try:
            return {TRAIN: self.paths(TRAIN), **files}
        except FileNotFoundError:
            if may_lack_training and files[VALIDATION]:
                return files
            raise

    def open_store(self, stage: str) -> Any:
        """Return the tokens that a stage of training or evaluation reads, in a `folder`."""
        options = model_options(self.trainer, self.tokenizer_options)
        given = self.given_tokenizer(stage, options)
        if given is None and stage != "fit" and self.store is not None:
            return self.store
        is_evaluation = given is not None and stage != "fit"
        request = self.store_request(is_evaluation)
        # The training on the same files has most likely made the store with this tokenizer.
        if given is not None and not _is_made(request, options, given):
            needed = {**request.files}
            if is_evaluation and needed[VALIDATION]:
                needed.pop(TRAIN, None)  # nothing of it is held out
            request = replace(request, files=needed, given=given)
        return self.make_store(request)

    def setup(self, stage: str) -> None:
        """Open the store and build the datasets of the stage; prediction needs no store."""
        if stage != "predict":
            store = self.open_store(stage)
            if self.store is None or store.folder != self.store.folder:
                self.store = store
                self.datasets.clear()
        super().setup(stage)

    def model_recipe(self) -> dict[str, Any] | None:
        """Return what the model knows of its data: the tokenizer, and the network's shape; none
        where it is not trained yet.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged, or of another family.
        """
        path = checkpoint_to_load(self.trainer)
        if path:
            return read_recipe(Path(path), TEXT_RECIPE_KEY, "text", "LitCausalLM")
        return getattr(getattr(self.trainer, "lightning_module", None), "recipe", None)

    def check_training(self) -> None:
        """Refuse options of training that are wrong for every family.

        Raises:
            ValueError: no context, or files of validation alone.
        """
        if self.context_length < 1:
            raise ValueError(f"context_length must be at least 1, got {self.context_length}.")
        if not self.files[TRAIN] and self.files[VALIDATION] and not self.files[TEST]:
            raise ValueError("validation_files are given without train_files; name both.")

    def given_tokenizer(self, stage: str, options: TokenizerOptions) -> TextTokenizer | None:
        """Return a trained model's tokenizer in evaluation, and in a training whose tokenizer's
        folder has gone; none where the options make one."""
        if stage == "fit" and not _has_gone(options):
            return None
        return trained_tokenizer(self.trainer)


def _is_made(request: Any, options: TokenizerOptions, given: TextTokenizer) -> bool:
    """Return whether a store with the given tokenizer is where the options' own would be."""
    if _has_gone(options):
        return False
    folder = request.folder()
    return folder.exists() and TokenisedFolder(folder).tokenizer.digest == given.digest


def _has_gone(options: TokenizerOptions) -> bool:
    """Return whether options name a folder that does not exist."""
    return options.path is not None and not Path(options.path).expanduser().exists()
