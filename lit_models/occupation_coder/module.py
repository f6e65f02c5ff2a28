"""The occupation coder as a LightningModule. Batch: OccupationBatch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from datamodules.core.batches import OccupationBatch
from datamodules.core.checkpoint_recipe import checkpoint_to_load
from datamodules.occupations.batches import padded_texts
from datamodules.occupations.rows import language_code
from datamodules.tokenizers.characters import TextNormalisation, encode
from datamodules.tokenizers.codes import CodeBook
from lit_models.blocks import layer_depths
from lit_models.occupation_coder.decoding import (
    TERMS,
    Decoded,
    DecodingOptions,
    TemperatureSearch,
    answers,
    decode,
    given_temperature,
    nats_by_temperature,
)
from lit_models.occupation_coder.encoders import (
    CharacterEncoder,
    Encoder,
    freeze_encoder,
    language_rows,
)
from lit_models.occupation_coder.linear import refuse_other_features, solve
from lit_models.occupation_coder.loss import (
    OccupationLossOptions,
    check_num_codes,
    linear_examples,
    occupation_losses,
    record_losses,
    row_weights,
)
from lit_models.occupation_coder.metrics import (
    ConfusedPairs,
    LossMetrics,
    OccupationFigures,
    OccupationMetrics,
    set_scores,
)
from lit_models.occupation_coder.network import BlockDecoder, CodeTrie, Memory, OccupationNetwork
from lit_models.training.exact import ExactModule, LossSum
from lit_models.training.metrics import SampleResult
from lit_models.training.optim import configured, parameter_groups

EncoderFactory = Callable[[int], Encoder]  # number of languages -> encoder
DecoderFactory = Callable[
    [int, CodeTrie], BlockDecoder
]  # width of the memory, code book -> decoder


def new_network(
    book: CodeBook,
    num_languages: int,
    encoder_factory: EncoderFactory,
    decoder_factory: DecoderFactory,
    loss: OccupationLossOptions,
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


TEXTS_AT_ONCE = 256


class CodedText(NamedTuple):
    """Codes of one text, the likeliest first, with their descriptions and probabilities.

    With `k_best`, `next_sets` are the next sets of codes with their probabilities; with
    `probabilities`, that is the flat head's probability of every code.
    """

    text: str
    codes: list[str]
    descriptions: list[str]
    confidences: list[float]
    set_confidence: float
    is_truncated: bool
    next_sets: Sequence[tuple[list[str], float]] = ()
    probabilities: dict[str, float] | None = None


class TextCoder:
    """Codes texts with a LitOccupationCoder outside a trainer.

    Args:
        module: with its network built.
        recipe: of its checkpoint.
        options: fields of the module's DecodingOptions that shall differ.

    Raises:
        RuntimeError: the module has no network yet.
    """

    def __init__(self, module: Any, recipe: dict[str, Any] | None, options: dict[str, Any]) -> None:
        if recipe is None or module.network is None:
            raise RuntimeError(
                "this LitOccupationCoder has not been trained: load one with "
                "LitOccupationCoder.load_from_checkpoint(path), or fit it first."
            )
        self.module, self.recipe = module, recipe
        self.options = replace(module.decoding, **options)
        self.book = CodeBook.from_dict(recipe["code_book"])

    def code(
        self, texts: Sequence[str], language: str | Sequence[str] | None = None
    ) -> list[CodedText]:
        """Return one result per text, in order; arguments as in `LitOccupationCoder.code`.

        Raises:
            ValueError: a single string instead of a list, or not one language per text.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts must be a list of texts, got one string: write [{texts!r}].")
        language_ids = self._language_ids(language, len(texts))
        normalise = TextNormalisation.from_dict(self.recipe["normalisation"])
        encoded = [encode(normalise(text), self.recipe["max_length"]) for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(encoded[i].code_points))
        results: dict[int, CodedText] = {}
        was_training = self.module.training
        self.module.eval()
        for start in range(0, len(order), TEXTS_AT_ONCE):
            rows = order[start : start + TEXTS_AT_ONCE]
            decoded = self._decode([encoded[i].code_points for i in rows], language_ids[rows])
            for place, index in enumerate(rows):
                found = {name: values[place].tolist() for name, values in decoded.items()}
                results[index] = self._result(texts[index], found, encoded[index].is_truncated)
        self.module.train(was_training)
        return [results[i] for i in range(len(texts))]

    def _language_ids(self, language: str | Sequence[str] | None, count: int) -> np.ndarray:
        default = self.recipe.get("default_language") or "unk"
        given = default if language is None else language
        names = [given] * count if isinstance(given, str) else list(given)
        if len(names) != count:
            raise ValueError(
                f"language has {len(names)} names for {count} texts: give one for all, or one each."
            )
        known = {name: index for index, name in enumerate(self.recipe["languages"])}
        return np.array([known.get(language_code(name, "unk"), 0) for name in names], np.int64)

    @torch.inference_mode()
    def _decode(self, texts: list[np.ndarray], language_ids: np.ndarray) -> dict[str, Tensor]:
        module = self.module
        batch = {**padded_texts(texts), "language_id": torch.from_numpy(language_ids)}
        batch = {name: value.to(module.device) for name, value in batch.items()}
        found = module.answers(*module(batch), self.options)
        return {name: values.cpu() for name, values in found.items()}

    def _result(self, text: str, found: dict[str, Any], is_truncated: bool) -> CodedText:
        ids = [code_id for code_id in found["code_ids"] if code_id >= 0]
        following = zip(found.get("next_ids", ()), found.get("next_confidence", ()), strict=True)
        probabilities = found.get("probabilities")
        return CodedText(
            text,
            self._codes(ids),
            [self.book.descriptions[i] for i in ids],
            found["code_confidence"][: len(ids)],
            found["set_confidence"],
            is_truncated,
            [(self._codes(codes), p) for codes, p in following if codes[0] >= 0],
            probabilities and dict(zip(self.book.codes, probabilities, strict=True)),
        )

    def _codes(self, ids: Sequence[int]) -> list[str]:
        return [self.book.codes[i] for i in ids if i >= 0]


RECIPE_KEY = "occupation_recipe"
REVIEW_BELOW = 0.5


class LitOccupationCoder(ExactModule):
    """Job descriptions to sets of occupation codes. Logs losses in nats per record.

    Args:
        optimizer: factory; it has no default, so that a rate is always chosen in the YAML.
        lr_scheduler: factory; none keeps the rate constant.
        encoder: factory of the text encoder, given the number of languages.
        decoder: factory of the decoder, given the memory's width and the code book.
        loss: weights of the two heads and of the training rows.
        decoding: how codes are read in validation, test and prediction.
        temperature: of `seq2seq` and `flat`, by which the heads' logits are divided; 1 where not
            given. What a validation finds takes its place and stays with the weights; so an
            evaluation takes the checkpoint's.
        freeze: `none`, `encoder`, or the number of encoder layers from the lowest, embeddings too.
        layer_decay: factor of the learning rate per encoder layer below the top.
        lr_scaling: how the rate follows a global batch that grows with the devices.
        base_global_batch_size: the global batch for which the rate was chosen.
        init_from: checkpoint to take weights from.
        init_from_part: `encoder` takes the encoder alone.
    """

    monitor: ClassVar[str] = "val/f1"
    monitor_mode: ClassVar[str] = "max"
    row_weights: Tensor | None
    # Only micro-batches with several codes per record search for the best order of them.
    calls_blocks_evenly: ClassVar[bool] = False
    export_keys: ClassVar[tuple[str, ...]] = (RECIPE_KEY,)
    settled_options: ClassVar[tuple[str, ...]] = ("temperature",)

    def __init__(
        self,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        encoder: EncoderFactory = CharacterEncoder,
        decoder: DecoderFactory = BlockDecoder,
        loss: OccupationLossOptions | None = None,
        decoding: DecodingOptions | None = None,
        temperature: dict[str, float] | None = None,
        freeze: Literal["none", "encoder"] | int = "none",
        layer_decay: float = 1.0,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        base_global_batch_size: int | None = None,
        init_from: str | None = None,
        init_from_part: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.encoder_factory, self.decoder_factory = encoder, decoder
        self.loss, self.decoding = loss or OccupationLossOptions(), decoding or DecodingOptions()
        self.init_from, self.init_from_part = init_from, init_from_part
        self.recipe: Any = None  # a dict of plain values, from the data or a checkpoint
        self.temperature = given_temperature(temperature or {})
        # limit of `review_for_precision`, and the temperature of the sets that it was found on
        self.review: dict[str, Any] | None = None
        # [training rows], where they are not all 1
        self.register_buffer("row_weights", None, persistent=False)
        self.network: Any = None  # an OccupationNetwork once the code book is known

    def blocks(self) -> list[nn.Module]:
        return self.network.blocks()

    def own_callbacks(self) -> list[Callback]:
        return [*super().own_callbacks(), OccupationFigures()]

    def setup(self, stage: str) -> None:
        """Take the recipe (code book, languages, normalisation) that the data was read with."""
        super().setup(stage)
        no_validation = stage == "fit" and self.trainer.limit_val_batches == 0
        if no_validation and self.decoding.review_for_precision is not None:
            raise ValueError(
                "model.decoding.review_for_precision finds its limit on validation rows, and "
                "trainer.limit_val_batches is 0; give --trainer.limit_val_batches=1.0 and "
                "--data.split.validation_share=0.1, or leave it out."
            )
        if self.recipe is None:
            self._take_recipe(self.trainer.datamodule.recipe)
        if stage == "fit" and self.loss.weighs_rows:
            weights = row_weights(self.trainer.datamodule.store, self.loss)
            self.register_buffer("row_weights", weights, persistent=False)

    def configure_model(self) -> None:
        if self.network is None and self.recipe is not None:
            self._build()
            if self.trainer.state.fn == "fit":
                self.configure_model_from()
                if self.loss.linear and checkpoint_to_load(self.trainer) is None:
                    self._solve_linear_head()

    def forward(self, batch: OccupationBatch) -> tuple[Memory, Tensor]:
        """Return the encoded texts and the flat logits [B, C]."""
        return self.network(batch["input_ids"], batch["attention_mask"], batch["language_id"])

    def training_terms(self, batch: OccupationBatch) -> dict[str, LossSum]:
        weights = None if self.row_weights is None else self.row_weights[batch["sample_id"]]
        options = (self.loss.label_smoothing, self._used_class_weights, weights)
        memory, flat_logits = self(batch)
        return occupation_losses(memory, flat_logits, self.network.decoder, batch, *options)

    def term_weights(self) -> dict[str, float]:
        return self.loss.term_weights

    def validation_step(self, batch: OccupationBatch, batch_idx: int) -> SampleResult:
        (memory, flat_logits), judged = self._evaluate("val", batch)
        nats = nats_by_temperature(self.network, memory, flat_logits, batch)
        for term in TERMS:
            self.temperature_search[term].update(nats[term], batch["weight"])
        return judged

    def on_validation_epoch_end(self) -> None:
        found = {term: float(search.compute()) for term, search in self.temperature_search.items()}
        review = self._found_review()
        for metric in (self.val_confused, *self.temperature_search.values()):
            metric.reset()
        if self._is_training and not self.trainer.sanity_checking:
            self.temperature, self.review = found, review

    def test_step(self, batch: OccupationBatch, batch_idx: int) -> SampleResult:
        return self._evaluate("test", batch)[1]

    def on_test_epoch_end(self) -> None:
        self.test_confused.reset()  # after the callbacks have seen it

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        codes = self.recipe["code_book"]["codes"]
        return {n: " ".join(codes[int(i)] for i in ids if i >= 0) for n, ids in answers.items()}

    def predict_step(self, batch: OccupationBatch, batch_idx: int) -> dict[str, Tensor]:
        memory, flat_logits = self(batch)
        found = self.answers(memory, flat_logits, self.decoding)
        # not "<": a confidence that is no number is one to look at
        return {**found, "needs_review": ~(found["set_confidence"] >= self.review_limit)}

    def answers(
        self, memory: Memory, flat_logits: Tensor, options: DecodingOptions
    ) -> dict[str, Tensor]:
        """Return what `decoding.answers` does.

        Raises:
            ValueError: probabilities are asked of a flat head that was not trained.
        """
        if options.probabilities and self.loss.seq2seq_weight == 1:
            raise ValueError(
                "probabilities are those of the flat head, which seq2seq_weight: 1 left untrained; "
                "leave them out, or train with a lower model.loss.seq2seq_weight."
            )
        return answers(self.network, memory, flat_logits, options, self.used_temperature)

    @property
    def review_limit(self) -> float:
        """The confidence of a set below which a person shall look at it."""
        if self.decoding.review_below is not None:
            return self.decoding.review_below
        return self.review["below"] if self.review else REVIEW_BELOW

    @property
    def used_temperature(self) -> dict[str, float]:
        """The temperature of the heads: outside training that of the limit of review, if any."""
        if self.review is None or self._is_training:
            return self.temperature
        return self.review["temperature"]

    def configure_optimizers(self) -> Any:
        depths = layer_depths(self, self.network.encoder)
        groups = parameter_groups(self, layer_decay=self.hparams.layer_decay, depths=depths)
        return configured(self, self.optimizer(groups), self.lr_scheduler)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        thresholds = {"flat": self.decoding.flat_threshold}
        found = {"temperature": self.temperature, "thresholds": thresholds}
        checkpoint[RECIPE_KEY] = {**self.recipe, **found, "review": self.review}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if RECIPE_KEY not in checkpoint:
            raise ValueError(
                "the checkpoint holds no occupation recipe: it is of another family; give one of "
                "LitOccupationCoder."
            )
        given, before = self.hparams.temperature, checkpoint.get("hyper_parameters", {})
        if isinstance(before.get("loss"), dict):  # else given anew in Python, and none is known
            refuse_other_features(self.loss.linear, before["loss"].get("linear"))
        self._take_recipe(checkpoint[RECIPE_KEY])
        if self._is_training and given != before.get("temperature"):
            self.temperature = given_temperature(given or {})  # as of every option, the run's
        if self.network is None:
            self._build()

    def adapted_weights(self, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
        """Return the weights with the rows of the language embedding that the new data needs."""
        weights, name = checkpoint["state_dict"], "network.encoder.languages.weight"
        trained = checkpoint.get(RECIPE_KEY, {}).get("languages")
        if trained is None or name not in weights:
            return weights
        return {**weights, name: language_rows(weights[name], trained, self.recipe["languages"])}

    def code(
        self, texts: Sequence[str], language: str | Sequence[str] | None = None, **options: Any
    ) -> list[CodedText]:
        """Return codes, descriptions and confidences of each text.

        Args:
            texts: job descriptions as they were written.
            language: of all texts or of each; none takes the recipe's default.
            options: fields of DecodingOptions that shall differ, such as method="beam".
        """
        return TextCoder(self, self.recipe, options).code(texts, language)

    def _take_recipe(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe
        self.temperature = dict(recipe.get("temperature") or self.temperature)
        self.review = recipe.get("review")

    def _build(self) -> None:
        book, languages = CodeBook.from_dict(self.recipe["code_book"]), self.recipe["languages"]
        factories = (self.encoder_factory, self.decoder_factory)
        self.network = new_network(book, len(languages), *factories, self.loss)
        freeze_encoder(self.network.encoder, self.hparams.freeze)
        weights = class_weights(book, self.loss.class_weights)
        self.register_buffer("class_weights", weights, persistent=False)
        for split in ("val", "test"):
            self.add_module(f"{split}_metrics", OccupationMetrics(book, languages))
            self.add_module(f"{split}_confused", ConfusedPairs(len(book.codes)))
            self.add_module(f"{split}_losses", LossMetrics(self.loss.term_weights))
        self.temperature_search = torch.nn.ModuleDict({t: TemperatureSearch() for t in TERMS})

    def _solve_linear_head(self) -> None:
        examples = linear_examples(self.trainer.datamodule.store, self.loss)
        solve(self.network.flat, *examples, self._used_class_weights)

    def _found_review(self) -> dict[str, Any] | None:
        """The limit for `review_for_precision`; an evaluation says it."""
        wanted = self.decoding.review_for_precision
        if wanted is None:
            return None
        bins = self.val_metrics["calibration_error"]
        with bins.sync_context(should_sync=self.trainer.world_size > 1):
            limit, share, right = bins.limit(wanted)
        if not self._is_training and limit > 1:
            rank_zero_info(
                f"no confidence of the validation rows reaches a precision of {wanted:.0%}: every "
                "row is one to look at"
            )
        elif not self._is_training:
            rank_zero_info(
                f"review_below {limit:.2f}: {share:.0%} of the validation rows are at or above it, "
                f"{right:.1%} of them exactly right; predict with "
                f"--model.decoding.review_below={limit:.2f}"
            )
        return {"below": limit, "temperature": self.used_temperature}

    @property
    def _is_training(self) -> bool:
        return self._trainer is not None and self.trainer.state.fn == "fit"

    @property
    def _used_class_weights(self) -> Tensor | None:
        return self.class_weights if self.loss.class_weights else None

    def _decode(self, memory: Memory, flat_logits: Tensor) -> Decoded:
        return decode(self.network, memory, flat_logits, self.decoding, self.used_temperature)

    def _evaluate(
        self, split: str, batch: OccupationBatch
    ) -> tuple[tuple[Memory, Tensor], SampleResult]:
        memory, flat_logits = self(batch)
        decoder, weights = self.network.decoder, self._used_class_weights
        true_ids, decoded = batch["code_ids"], self._decode(memory, flat_logits)
        each = record_losses(memory, flat_logits, decoder, batch, class_weights=weights)
        losses: LossMetrics = getattr(self, f"{split}_losses")
        loss = losses.add_batch(each, batch["weight"])
        metrics, confused = getattr(self, f"{split}_metrics"), getattr(self, f"{split}_confused")
        metrics.update(decoded, batch)
        confused.update(true_ids, decoded.code_ids, batch["weight"])
        for name, metric in (*losses.items(), *metrics.items()):
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
        is_wrong = set_scores(true_ids, decoded.code_ids)["exact_match"] == 0
        answers, sure = {"given": decoded.code_ids}, decoded.set_confidence
        result = SampleResult(loss, answers, is_wrong, sure, batch.get("is_seen_text"))
        return (memory, flat_logits), result
