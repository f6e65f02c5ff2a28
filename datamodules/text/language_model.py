"""Base of the language models' datamodules: stores of tokens, and prediction from prompts."""

import json
import logging
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.batches import IGNORED, TERM
from datamodules.core.checkpoint_recipe import checkpoint_to_load, read_recipe
from datamodules.core.planned import PlannedDataModule
from datamodules.files.audit import AuditPart
from datamodules.files.rows import SUFFIXES
from datamodules.files.splitting import TEST, TRAIN, VALIDATION
from datamodules.files.tables import expand_files
from datamodules.text.prompts import (
    ChoiceDataset,
    PromptDataset,
    PromptRequest,
    check_output,
    read_rows,
    write_completions,
    write_scores,
)
from datamodules.text.store import TokenisedFolder
from datamodules.tokenizers.text import (
    TEXT_RECIPE_KEY,
    TextTokenizer,
    TokenizerOptions,
    make_tokenizer,
    model_options,
    trained_tokenizer,
)

log = logging.getLogger(__name__)
Files = str | list[str] | None


class LanguageModelDataModule(PlannedDataModule):
    """Makes the store of a stage, with the tokenizer of the model where that is trained, and reads
    prompts for prediction. A subclass says which files it trains on, and their datasets.

    Attributes:
        files: of training, validation and test, as the user gave them.
        tokenizer_options: of the user; `None` leaves the choice to the model.
        context_length: most positions of a row.
        layout: how rows are filled.
        store: of tokens; `None` before `setup`, and in prediction.

    Args:
        predict_files: jsonl, json or parquet; rows with a prompt or a chat; mode score: choices.
        predict_output: jsonl; `None` makes mine.jsonl mine.completed.jsonl (mine.scored.jsonl) in
            the run folder.
        prompt_column: of the prompt, a text or messages; `None` takes `prompt` or `messages`.
        planned: batch sizes, plan and loader, see `PlannedDataModule`.

    Raises:
        ValueError: predict_output is of another kind.
    """

    files: dict[int, Files]
    tokenizer_options: TokenizerOptions | None
    context_length: int
    layout: Any
    store: Any

    def __init__(
        self,
        predict_files: Files = None,
        predict_output: str | None = None,
        prompt_column: str | None = None,
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.predict_files, self.predict_output = predict_files, predict_output
        self.prompt_column = prompt_column
        if predict_output is not None:
            check_output(Path(predict_output))  # not after hours of prediction

    def predict_hint(self, command: str) -> str:
        """Return the command with a first prompt."""
        row = json.dumps({self.prompt_column or "prompt": "The"})
        return f"echo '{row}' > prompts.jsonl && {command} --data.predict_files=prompts.jsonl"

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
        has_gone = options.path is not None and not Path(options.path).expanduser().exists()
        # A trained model's, in evaluation and in a training whose tokenizer's folder has gone.
        given = trained_tokenizer(self.trainer) if stage != "fit" or has_gone else None
        if given is None and stage != "fit" and self.store is not None:
            return self.store
        is_evaluation = given is not None and stage != "fit"
        request = self.store_request(is_evaluation)
        is_made = False
        if given is not None and not has_gone:
            # The training on the same files has most likely made the store with this tokenizer.
            folder = request.folder()
            is_made = folder.exists() and TokenisedFolder(folder).tokenizer.digest == given.digest
        if given is not None and not is_made:
            needed = {**request.files}
            if is_evaluation and needed[VALIDATION]:
                needed.pop(TRAIN, None)  # nothing of it is held out
            request = replace(request, files=needed, given=given)
        return self.make_store(request)

    def setup(self, stage: str) -> None:
        """Open the store and build the datasets of the stage; prediction reads prompts anew."""
        if stage == "predict":
            self.datasets.pop("predict", None)
        else:
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

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the data, the model's in prediction; there after `setup`."""
        if self.store is None:
            return self.prompt_tokenizer()
        return self.store.tokenizer

    @property
    def is_predicting(self) -> bool:
        """Whether the trainer predicts: the files of training are then not needed."""
        state = getattr(self.trainer, "state", None)
        return state is not None and state.fn == "predict"

    def prompt_tokenizer(self) -> TextTokenizer:
        """Return the model's tokenizer: of its checkpoint, or of its pretrained folder.

        Raises:
            ValueError: there is no trained model, or the user's tokenizer is not the model's.
        """
        trained = trained_tokenizer(self.trainer)
        if trained is not None:
            return trained
        if self.trainer.lightning_module.wanted_tokenizer() is None:
            raise ValueError(
                "predict needs a trained model: give --ckpt_path or --model.pretrained, in a "
                "script predict(ckpt_path=…) or LitCausalLM.load_from_checkpoint(path)."
            )
        return make_tokenizer(model_options(self.trainer, self.tokenizer_options), iter(()))

    def build_prompts(self, separator: str = "") -> PromptDataset:
        """Return the dataset of prediction.

        Args:
            separator: that training put between a prompt and its completion.

        Raises:
            ValueError: there is no trained model, no file, or a row breaks a rule.
        """
        files = self._predict_paths()
        model = self.trainer.lightning_module
        options = model.generation
        request = PromptRequest(
            files,
            self.prompt_tokenizer(),
            self.prompt_column,
            separator,
            options.mode,
            model.max_positions(self.model_recipe()),
            options.max_new_tokens,
            cuts=options.context == "recent",
        )
        dataset = (ChoiceDataset if options.mode == "score" else PromptDataset)(request)
        num_cut = int((dataset.num_cut > 0).sum())
        if num_cut and self.trainer.is_global_zero:
            log.warning(
                "%d of %d prompts are longer than the network's %s positions: their beginning is "
                "cut.",
                num_cut,
                len(dataset.num_cut),
                request.max_positions,
            )
        return dataset

    def audit_part(
        self, name: str, lengths: np.ndarray, keys: np.ndarray, num_bytes: int | None, dataset: Any
    ) -> AuditPart:
        """Return what is in one part, and in the rows of a batch that it fills.

        Args:
            name: of the part.
            lengths: [N] tokens of each document or sample.
            keys: [N] equal for equal ones.
            num_bytes: of UTF-8 that the tokens spell; `None` where they do not spell the text.
            dataset: of its rows.
        """
        num_tokens, num_rows = int(lengths.sum()), len(dataset.lengths)
        columns: dict[str, int | str] = {
            "tokens": num_tokens,
            "trained on": int(dataset.target_counts[TERM].sum()),
            "bytes/token": "–" if num_bytes is None else f"{num_bytes / num_tokens:.2f}",
            "rows": num_rows,
        }
        if self.layout != "documents":
            share = dataset.lengths.sum() / (num_rows * self.context_length)
            columns["used"] = f"{100 * share:.1f} %"
        return AuditPart(name, lengths, keys, columns)

    @property
    def predict_output_path(self) -> Path:
        """Where the completions or scores go."""
        if self.predict_output is not None:
            return Path(self.predict_output).expanduser()
        is_scoring = self.trainer.lightning_module.generation.mode == "score"
        name = f"{self._predict_paths()[0].stem}.{'scored' if is_scoring else 'completed'}.jsonl"
        return Path(self.trainer.default_root_dir) / name

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the completions or scores; `results` as `complete` returns them."""
        dataset = self.datasets["predict"]
        assert isinstance(dataset, PromptDataset)
        rows = read_rows(self._predict_paths())
        if isinstance(dataset, ChoiceDataset):
            write_scores(rows, results, path, dataset.num_cut)
        else:
            write_completions(rows, results, path, self.prompt_tokenizer(), dataset.num_cut)

    def _predict_paths(self) -> list[Path]:
        files = expand_files(self.predict_files, "data.predict_files", SUFFIXES)
        if not files:
            raise ValueError(
                "predict needs prompts: name them with --data.predict_files=prompts.jsonl."
            )
        return files


def trained_pieces(dataset: Any, tokenizer: TextTokenizer) -> list[tuple[str, bool]]:
    """Return a row from the middle of a dataset, cut where training begins and ends: the text of
    each piece, and whether it is trained on."""
    found: list[tuple[str, bool]] = []
    for piece in dataset.example(len(dataset.lengths) // 2, 0):
        tokens = np.append(piece.input_ids, np.maximum(piece.labels[-1:], 0))
        is_trained = np.append(False, piece.labels != IGNORED)
        if piece.labels[-1] == IGNORED:  # nobody knows this token
            tokens, is_trained = tokens[:-1], is_trained[:-1]
        borders = np.flatnonzero(np.diff(is_trained)) + 1
        for ids, flags in zip(
            np.split(tokens, borders), np.split(is_trained, borders), strict=True
        ):
            decode = tokenizer.decode_continuation if found else tokenizer.decode
            found.append((decode(ids, skip_special_tokens=False), bool(flags[0])))
    return found
