"""The occupation coder as a LightningModule. Batch: OccupationBatch."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from datamodules.core.batches import OccupationBatch, padded_texts
from datamodules.occupations.store import ENCODING_KEYS, language_code
from datamodules.tokenizers.codes import CodeBook, TextOptions, encode
from lit_models.blocks import layer_rates
from lit_models.occupation_coder.decoding import (
    TERMS,
    DecodingOptions,
    PlausibleSets,
    TemperatureSearch,
    answers,
    code_marginals,
    decode,
    least_likely,
    nats_by_temperature,
    packed,
)
from lit_models.occupation_coder.encoders import CharacterEncoder, Encoder, freeze_encoder
from lit_models.occupation_coder.linear import describe, refuse_other_features, solve
from lit_models.occupation_coder.loss import (
    OccupationLossOptions,
    linear_examples,
    record_losses,
    row_weights,
    summed,
)
from lit_models.occupation_coder.metrics import SET_SCORES, OccupationMetrics, set_scores
from lit_models.occupation_coder.network import BlockDecoder, CodeTrie, Memory, OccupationNetwork
from lit_models.occupation_coder.occcanine.network import OccCanineDecoder, renumbered
from lit_models.training.exact import ExactModule, flops_per_position
from lit_models.training.metrics import LossSum, SampleResult, SumCount, evaluating, texts_for
from lit_models.training.optim import configured, parameter_groups

EncoderFactory = Callable[[int], Encoder]  # number of languages -> encoder
DecoderFactory = Callable[[int, CodeTrie], BlockDecoder]  # memory's width, code book -> decoder
RECIPE_KEY = "occupation_recipe"
TEXTS_AT_ONCE = 256


class CodedText(NamedTuple):
    """Codes of one text, the likeliest first, with their descriptions and probabilities.

    An empty text has no codes. With `k_best`, `next_sets` holds the next likeliest sets of codes
    and their probabilities; with `coverage`, `plausible` is a set, likeliest code first, that holds
    all true codes in that share of texts.
    """

    text: str
    codes: list[str]
    descriptions: list[str]
    confidences: list[float]
    set_confidence: float
    is_truncated: bool
    next_sets: Sequence[tuple[list[str], float]] = ()
    plausible: Sequence[str] = ()


class LitOccupationCoder(ExactModule):
    """Job descriptions to sets of occupation codes. Logs losses in nats per record.

    Args:
        optimizer: factory; it has no default, so that a rate is always chosen in the YAML.
        lr_scheduler: factory; `None` keeps the rate constant.
        encoder: factory of the text encoder.
        decoder: factory of the decoder.
        loss: weights of the two heads and of the training rows.
        decoding: how codes are read in validation, test and prediction.
        temperature: divisors of the logits of the heads `seq2seq` and `flat`, 1 by default. Each
            validation in training replaces them; checkpoints keep the result.
        freeze: `none`, `encoder`, or how many of its lowest layers to freeze with the embeddings.
        layer_decay: factor of the learning rate per encoder layer below the top.
        init_from: checkpoint to take weights from.
        init_from_part: `encoder` takes only the encoder.

    Raises:
        ValueError: `temperature` names an unknown head, or is not above 0.
    """

    monitor: ClassVar[str] = "val/f1"
    monitor_mode: ClassVar[str] = "max"
    row_weights: Tensor | None
    # The search for the best order runs only in micro-batches with several codes per record.
    calls_blocks_evenly: ClassVar[bool] = False
    takes_half_weights: ClassVar[bool] = True
    recipe_key: ClassVar[str] = RECIPE_KEY
    learnt_facts: ClassVar[tuple[str, ...]] = ("temperature", "set_limits")
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
        init_from: str | None = None,
        init_from_part: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.encoder_factory, self.decoder_factory = encoder, decoder
        self.loss, self.decoding = loss or OccupationLossOptions(), decoding or DecodingOptions()
        self.init_from, self.init_from_part = init_from, init_from_part
        self.first_temperature = {**dict.fromkeys(TERMS, 1.0), **(temperature or {})}
        is_finite = all(0 < value < math.inf for value in self.first_temperature.values())
        if not is_finite or set(self.first_temperature) != set(TERMS):
            raise ValueError(
                f"temperature holds numbers above 0 of {' and '.join(TERMS)}, got {temperature}; 1 "
                "changes nothing."
            )
        # [training rows]; `None` means that all are 1
        self.register_buffer("row_weights", None, persistent=False)
        self.network: Any = None  # an OccupationNetwork once the code book is known

    @property
    def temperature(self) -> dict[str, float]:
        """Temperature of each head: from the last validation, else the constructor's."""
        return (self.recipe or {}).get("temperature") or self.first_temperature

    def blocks(self) -> list[nn.Module]:
        return self.network.blocks()

    def flops(self, lengths: np.ndarray) -> float:
        """As in ExactModule; counts the decoder on the symbols of one code and the end symbol."""
        network, written = self.network, len(lengths) * (1 + self.network.trie.block_size)
        of_decoder = flops_per_position(network.decoder) * written
        return flops_per_position(network.encoder) * float(lengths.sum()) + of_decoder

    def recipe_of(self, data: Any, trained: dict[str, Any] | None) -> dict[str, Any]:
        """Return the data's recipe (code book, languages, normalisation) and the temperatures."""
        return {"temperature": self.first_temperature, **data.recipe}

    def meanings(self, recipe: dict[str, Any]) -> dict[str, Any]:
        return {name: recipe[name] for name in ENCODING_KEYS}

    def build(self, recipe: dict[str, Any], data: Any) -> None:
        book, languages = CodeBook.from_dict(recipe["code_book"]), recipe["languages"]
        trie = CodeTrie(book.table, len(book.symbols), book.max_codes)
        encoder = self.encoder_factory(len(languages))
        encoder.name_languages(languages)
        decoder = self.decoder_factory(encoder.width, trie)
        self.network = OccupationNetwork(encoder, decoder, self.loss.flat_dropout, self.loss.linear)
        freeze_encoder(self.network.encoder, self.hparams.freeze)
        # The layer returns keys and values, which nothing changes in place.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPDecoderLayer\)")
        for split in ("val", "test"):
            metrics = OccupationMetrics(trie, languages, self.loss.term_weights)
            self.add_module(f"{split}_metrics", metrics)
        self.sets = None if self.decoding.coverage is None else PlausibleSets(self.decoding)
        for name in () if self.sets is None else SET_SCORES:
            self.test_metrics[name] = SumCount()
        self.temperature_search = torch.nn.ModuleDict({t: TemperatureSearch() for t in TERMS})

    def prepare(self, data: Any, is_new: bool) -> None:
        """Weigh the training rows, and solve the linear head of a new network."""
        if self.is_training_run and (self.loss.repeats < 1 or not self.loss.unused_codes):
            weights = row_weights(data.store, self.loss)
            self.register_buffer("row_weights", weights, persistent=False)
        if self.is_training_run and is_new and self.loss.linear:
            texts, has_code, weight = linear_examples(data.store, self.loss)
            solve(self.network.flat, texts, has_code, weight)
            if self.loss.linear.descriptions:
                describe(self.network.flat, self.recipe, np.asarray(has_code.any(0)))

    def forward(self, batch: OccupationBatch) -> tuple[Memory, Tensor]:
        """Return the encoded texts and the flat logits [B, C]."""
        return self.network(batch["input_ids"], batch["attention_mask"], batch["language_id"])

    def training_terms(self, batch: OccupationBatch) -> dict[str, LossSum]:
        weights = 1.0 if self.row_weights is None else self.row_weights[batch["sample_id"]]
        memory, flat = self(batch)
        losses = record_losses(memory, flat, self.network.decoder, batch, self.loss.label_smoothing)
        return summed(losses, batch["weight"], weights)

    def term_weights(self) -> dict[str, float]:
        return self.loss.term_weights

    def validation_step(self, batch: OccupationBatch, batch_idx: int) -> None:
        (memory, flat_logits), _ = self._evaluate("val", batch)
        nats = nats_by_temperature(self.network, memory, flat_logits, batch)
        for term in TERMS:
            self.temperature_search[term].update(nats[term], batch["weight"])
        if self.sets is not None:
            marginals = code_marginals(self.network, memory, flat_logits, self.decoding)
            self.sets.update(least_likely(marginals, batch["code_ids"]), batch["weight"])

    def on_validation_epoch_end(self) -> None:
        searches = self.temperature_search.items()
        facts = {"temperature": {term: float(search.compute()) for term, search in searches}}
        for search in self.temperature_search.values():
            search.reset()
        if self.sets is not None:
            facts["set_limits"] = {self.sets.name: float(self.sets.compute())}
            self.sets.reset()
        if self.trainer.sanity_checking:
            return
        if self.is_training_run:
            self.recipe |= facts
        precision, bins = self.decoding.review_for_precision, self.val_metrics["calibration_error"]
        if precision is not None:
            with bins.sync_context(should_sync=self.trainer.world_size > 1):
                limit, share, right = bins.limit(precision)
            rank_zero_info(
                f"no confidence of the validation rows reaches a precision of {precision:.0%}: "
                "every row is one to look at"
                if limit > 1
                else f"review_below {limit:.2f}: {share:.0%} of the validation rows are at or "
                f"above it, {right:.1%} of them exactly right; predict with "
                f"--model.decoding.review_below={limit:.2f}"
            )

    def test_step(self, batch: OccupationBatch, batch_idx: int) -> SampleResult:
        encoded, result = self._evaluate("test", batch)
        if self.sets is not None:
            marginals = code_marginals(self.network, *encoded, self.decoding)
            self.test_metrics.add_sets(marginals, self.sets.limit(self.recipe), batch)
        return result

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        codes = self.recipe["code_book"]["codes"]
        return {n: " ".join(codes[int(i)] for i in ids if i >= 0) for n, ids in answers.items()}

    def predict_step(self, batch: OccupationBatch, batch_idx: int) -> dict[str, Tensor]:
        (memory, flat), options = self(batch), self.decoding
        results = answers(self.network, memory, flat, options, self.temperature)
        if self.sets is not None:
            marginals = code_marginals(self.network, memory, flat, options)
            results["plausible"] = packed(marginals >= self.sets.limit(self.recipe))
        if options.embeddings:
            results["embedding"] = memory.hidden[:, 0].float()
        # not "<": a confidence of NaN needs review, too
        return {**results, "needs_review": ~(results["set_confidence"] >= options.review_below)}

    def configure_optimizers(self) -> Any:
        rates = layer_rates(self, self.network.encoder, self.hparams.layer_decay)
        groups = parameter_groups(self, rates)
        return configured(self, self.optimizer(groups), self.lr_scheduler)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        temperature, stored = self.hparams.temperature, checkpoint.get("hyper_parameters", {})
        if isinstance(stored.get("loss"), dict):  # else the checkpoint does not hold the options
            refuse_other_features(self.loss.linear, stored["loss"].get("linear"))
        super().on_load_checkpoint(checkpoint)
        if self.is_training_run and temperature != stored.get("temperature"):
            self.recipe["temperature"] = self.first_temperature  # this run's options win

    def adapted_weights(self, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
        """Return the weights with the language embedding's rows in the order of the new data; new
        languages start from the unknown one. OccCANINE's heads are mapped to the new code book;
        a ValueError refuses other heads for different codes."""
        weights, name = checkpoint["state_dict"], "network.encoder.languages.weight"
        trained = checkpoint.get(RECIPE_KEY, {})
        if isinstance(getattr(self.network, "decoder", None), OccCanineDecoder):
            return renumbered(weights, trained["code_book"], self.recipe["code_book"])
        codes, own = (r.get("code_book", {}).get("codes") for r in (trained, self.recipe))
        if trained and codes != own and self.init_from_part in (None, "decoder", "flat"):
            raise ValueError(
                f"model.init_from {self.init_from} has heads for other codes, or for another order "
                "of these; take its encoder alone with --model.init_from_part=encoder."
            )
        if "languages" not in trained or name not in weights:
            return weights
        row_of = {language: row for row, language in enumerate(trained["languages"])}
        rows = [row_of.get(language, 0) for language in self.recipe["languages"]]
        return {**weights, name: weights[name][rows]}

    def code(
        self, texts: Sequence[str], language: str | Sequence[str] | None = None, **options: Any
    ) -> list[CodedText]:
        """Return codes, descriptions and confidences of each text.

        Args:
            texts: job descriptions, not normalised.
            language: one for all texts, or one per text; `None` takes the recipe's default. A
                language that training did not see counts as the unknown one.
            options: fields of DecodingOptions to override, such as method="beam".

        Raises:
            RuntimeError: the module has no trained network yet.
            ValueError: `texts` is a single string or holds a value that is no string, the number of
                languages differs from that of texts, or a language's name is not valid.
        """
        texts = texts_for(self, texts)
        if language is None or isinstance(language, str):
            language = [language or self.recipe.get("default_language") or "unk"] * len(texts)
        if len(language) != len(texts):
            raise ValueError(
                f"language has {len(language)} names for {len(texts)} texts: give one for all, or "
                "one each."
            )
        language_index = {name: index for index, name in enumerate(self.recipe["languages"])}
        language_ids = [language_index.get(language_code(name), 0) for name in language]
        of_texts = TextOptions.from_recipe(self.recipe)
        normalised, most = [of_texts(text) for text in texts], of_texts.max_length
        encoded = [encode(text, most) for text in normalised]
        sizes = list(map(len, encoded))
        order = sorted(filter(sizes.__getitem__, range(len(sizes))), key=sizes.__getitem__)
        decoding = replace(self.decoding, **options)
        sets = None if decoding.coverage is None else PlausibleSets(decoding)
        limit = 0.0 if sets is None else sets.limit(self.recipe)
        results = {i: CodedText(text, [], [], [], 0.0, False) for i, text in enumerate(texts)}
        book = self.recipe["code_book"]

        def named(ids: Sequence[int], what: str = "codes") -> list[str]:
            return [book[what][i] for i in ids if i >= 0]

        for start in range(0, len(order), TEXTS_AT_ONCE):
            rows = order[start : start + TEXTS_AT_ONCE]
            batch = padded_texts([encoded[i] for i in rows])
            batch["language_id"] = torch.tensor([language_ids[i] for i in rows])
            batch = {name: value.to(self.device) for name, value in batch.items()}
            with evaluating(self), torch.inference_mode():
                memory, flat = self(batch)
                fields = answers(self.network, memory, flat, decoding, self.temperature)
                if sets is not None:
                    fields["marginals"] = code_marginals(self.network, memory, flat, decoding)
            for index, *values in zip(rows, *map(Tensor.tolist, fields.values()), strict=True):
                one = dict(zip(fields, values, strict=True))
                codes = named(one["code_ids"])
                shares = one.get("marginals", [])
                held = [code for code, share in enumerate(shares) if share >= limit]
                others = zip(one.get("next_ids", ()), one.get("next_confidence", ()), strict=True)
                results[index] = CodedText(
                    texts[index],
                    codes,
                    named(one["code_ids"], "descriptions"),
                    one["code_confidence"][: len(codes)],
                    one["set_confidence"],
                    len(normalised[index]) > most,
                    [(named(ids), share) for ids, share in others if ids[0] >= 0],
                    named(sorted(held, key=shares.__getitem__, reverse=True)),
                )
        return [results[i] for i in range(len(texts))]

    def _evaluate(
        self, split: str, batch: OccupationBatch
    ) -> tuple[tuple[Memory, Tensor], SampleResult]:
        memory, flat_logits = self(batch)
        decoded = decode(self.network, memory, flat_logits, self.decoding, self.temperature)
        each = record_losses(memory, flat_logits, self.network.decoder, batch)
        metrics: OccupationMetrics = getattr(self, f"{split}_metrics")
        loss = metrics.add_losses(each, batch["weight"])
        metrics.update(decoded, batch)
        for name, metric in metrics.items():
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
        is_wrong = set_scores(batch["code_ids"], decoded.code_ids)["exact_match"] == 0
        answers, sure = {"given": decoded.code_ids}, decoded.set_confidence
        result = SampleResult(loss, answers, is_wrong, sure, batch.get("is_seen_text"))
        return (memory, flat_logits), result
