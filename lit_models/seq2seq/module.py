"""A sequence-to-sequence model as a LightningModule, and its metrics. Batch: PairBatch."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric

from datamodules.core.batches import TERM, padded_texts
from datamodules.core.planned import ModelFacts
from datamodules.text.pairs import PairBatch, cut, text_ids
from datamodules.text.prompts import NO_TOKEN
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.adapters import LoraOptions, add_lora, lora_recipe
from lit_models.causal_lm.export import model_layout, restored_weights
from lit_models.causal_lm.loss import TextMetrics, language_model_loss, sample_nats
from lit_models.causal_lm.module import start_weights
from lit_models.causal_lm.pretrained import Recipe
from lit_models.seq2seq.decoding import Seq2SeqDecoding, Written, write
from lit_models.seq2seq.network import Seq2SeqConfig, network_of, read_recipe
from lit_models.training.exact import ExactModule, flops_per_position
from lit_models.training.metrics import LossSum, SampleResult, SumCount, evaluating, texts_for
from lit_models.training.optim import configured, parameter_groups

RECIPE_KEY = "seq2seq_recipe"
TEXTS_AT_ONCE = 64
CHARACTER_ORDER, CHRF_BETA = 6, 2
BLEU_ORDER = 4


class LitSeq2Seq(ExactModule):
    """Source texts to target texts. Logs losses in nats per target token, including end marks.

    Args:
        optimizer: factory; it has no default, so that a rate is always chosen in the YAML.
        lr_scheduler: factory; `None` keeps the rate constant.
        network: shape of a network from scratch.
        pretrained: folder of a Hugging Face model (T5, mT5, ByT5, BART) to start from instead.
        lora: adapters on named layers; all other weights are frozen.
        decoding: how targets are generated in validation, test and prediction.
        init_from: checkpoint to take weights from.

    Raises:
        ValueError: lora.base_dtype is bfloat16, which not all layers of T5 and BART support.
    """

    monitor: ClassVar[str] = "val/chrf"
    monitor_mode: ClassVar[str] = "max"
    recipe_key: ClassVar[str] = RECIPE_KEY
    settled_options: ClassVar[tuple[str, ...]] = ("network", "pretrained", "lora")
    # `None` for a network from scratch, which transformers does not have.
    exported_layout = staticmethod(partial(model_layout, key=RECIPE_KEY, network_of=network_of))
    restored_weights = staticmethod(
        partial(restored_weights, key=RECIPE_KEY, network_of=network_of)
    )
    adapted_weights = start_weights

    def __init__(
        self,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        network: Seq2SeqConfig | None = None,
        pretrained: str | None = None,
        lora: LoraOptions | None = None,
        decoding: Seq2SeqDecoding | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.config, self.pretrained = network or Seq2SeqConfig(), pretrained
        self.decoding, self.init_from = decoding or Seq2SeqDecoding(), init_from
        if lora is not None and lora.base_dtype != "float32":
            raise ValueError(
                f"model.lora.base_dtype is {lora.base_dtype}; an encoder with a decoder computes "
                "in float32 at least: leave base_dtype out, or give trainer.precision=bf16-mixed."
            )
        self.lora = lora
        self.network: Any = None  # once the recipe is known

    def blocks(self) -> list[nn.Module]:
        return self.network.blocks()

    def flops(self, lengths: np.ndarray) -> float:
        """As in ExactModule, but counts half of the layers for each position."""
        return flops_per_position(self) / 2 * float(lengths.sum())

    def model_facts(self) -> ModelFacts:
        return replace(super().model_facts(), tokenizer=self.pretrained)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the model's training; available after `setup`."""
        return TextTokenizer.from_dict(self.recipe["tokenizer"])

    def recipe_of(self, data: Any, trained: Recipe | None) -> Recipe:
        """Return the checkpoint's recipe; in training, a new one from the data and the options.

        Raises:
            FileNotFoundError: the folder `pretrained` does not exist.
            ValueError: the folder's model is no encoder-decoder, or has fewer tokens or positions
                than the data.
        """
        if trained is not None and not self.is_training_run:
            return trained
        tokenizer: TextTokenizer = data.tokenizer
        if self.pretrained is None:
            size = self.config.vocab_size or tokenizer.vocab_size
            network = replace(self.config, vocab_size=size).recipe
            network["start_id"] = tokenizer.end_id
        elif trained is not None and not Path(self.pretrained).expanduser().exists():
            network = trained["network"]  # the folder is gone; the checkpoint suffices
        else:
            network = read_recipe(self.pretrained)
        size = network["config"]["vocab_size"]
        if tokenizer.vocab_size > size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the network embeds {size}; "
                "take the model's own tokenizer, or leave model.network.vocab_size out."
            )
        limits = {n: getattr(data, n) for n in ("max_source_tokens", "max_target_tokens")}
        for name, value in limits.items():
            if value > (most := network["config"].get("max_position_embeddings", value)):
                raise ValueError(
                    f"data.{name} is {value}, and the model of {self.pretrained} has {most} "
                    f"positions; give --data.{name}={most}."
                )
        lora = None
        if self.lora is not None:
            with torch.device("meta"):
                plain = network_of(network)
            lora = lora_recipe(plain, self.lora, self.pretrained)
        return {"tokenizer": tokenizer.to_dict(), "network": network, "lora": lora, **limits}

    def meanings(self, recipe: Recipe) -> dict[str, Any]:
        return {"tokenizer": recipe["tokenizer"]}

    def build(self, recipe: Recipe, data: Any) -> None:
        self.network = network_of(recipe["network"], None if data is None else self.pretrained)
        if recipe.get("lora"):  # older checkpoints lack the key
            add_lora(self.network, recipe["lora"])
        # The layer returns keys and values, which nothing changes in place.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPDecoderLayer\)")
        sizes = (self.tokenizer.byte_lengths(), self.network.head.weight.shape[0])
        self.val_metrics, self.test_metrics = TextMetrics(*sizes), TextMetrics(*sizes)
        self.val_written, self.test_written = WrittenMetrics(), WrittenMetrics()

    def prepare(self, data: Any, is_new: bool) -> None:
        """Raise ValueError if the data have another tokenizer."""
        if not self.trainer.predicting:
            self.check_meanings({"tokenizer": data.tokenizer.to_dict()})

    def forward(self, batch: PairBatch) -> Tensor:
        """Return the hidden states [B, T, D] of the targets."""
        before = batch["labels"].clamp(min=0)[:, :-1]
        before = nn.functional.pad(before, (1, 0), value=self.network.start_id)
        return self.network(batch["input_ids"], batch["attention_mask"], before)

    def training_terms(self, batch: Any) -> dict[str, LossSum]:
        return {TERM: language_model_loss(self(batch), self.network.head.weight, batch)}

    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: PairBatch, batch_idx: int) -> SampleResult:
        return self._evaluate("test", batch)

    def predict_step(self, batch: PairBatch, batch_idx: int) -> dict[str, Tensor]:
        """Return the generated targets, see `Written`."""
        return self.written(batch, self.decoding)._asdict()

    def written(self, batch: PairBatch, decoding: Seq2SeqDecoding) -> Written:
        """Return the generated targets of a batch's sources."""
        number = decoding.max_new_tokens or self.recipe["max_target_tokens"] - 1  # - 1: end mark
        most = self.recipe["network"]["config"].get("max_position_embeddings", number + 1) - 1
        decoding = replace(decoding, max_new_tokens=min(number, most))
        sources = (batch["input_ids"], batch["attention_mask"], batch["sample_id"])
        ends = (self.tokenizer.end_id, self.tokenizer.vocab_size)
        return write(self.network, *sources, decoding, *ends)

    def texts_of(self, ids: np.ndarray) -> list[str]:
        """Return the texts of tokens [B, N], padded with -1."""
        return [self.tokenizer.decode(row[row != NO_TOKEN]).strip() for row in ids]

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """Return the target of each text.

        Args:
            texts: sources.
            options: fields of Seq2SeqDecoding to override, such as num_beams=4.

        Raises:
            RuntimeError: the module has no trained network yet.
            ValueError: `texts` is a single string, or holds an empty text or one that is no string.
        """
        return [text for text, _ in self.translations(texts, **options)]

    def translations(self, texts: Sequence[str], **options: Any) -> list[tuple[str, float]]:
        """Return the target of each text and its probability; see `translate`."""
        texts = texts_for(self, texts)
        decoding, most = replace(self.decoding, **options), self.recipe["max_source_tokens"]
        if not all(map(str.strip, texts)):
            raise ValueError("a text is empty: as in training, a source needs characters.")
        ids = [cut(i, most) for i in text_ids(self.tokenizer, texts)]
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        translations: list[tuple[str, float]] = []
        with evaluating(self):
            for first in range(0, len(order), TEXTS_AT_ONCE):
                places = order[first : first + TEXTS_AT_ONCE]
                batch: Any = padded_texts([ids[place] for place in places])
                batch["sample_id"] = torch.tensor(places)
                batch = self.transfer_batch_to_device(batch, self.device, 0)
                done = self.written(batch, decoding)
                written = self.texts_of(done.token_ids.cpu().numpy())
                translations += zip(written, done.log_probability.exp().tolist(), strict=True)
        return [translations[place] for place in np.argsort(order)]

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        return {"written": self.texts_of(np.array([answers["written"]], np.int64))[0]}

    def configure_optimizers(self) -> Any:
        groups = parameter_groups(self, heads=[self.network.head.weight])
        return configured(self, self.optimizer(groups), self.lr_scheduler)

    def _evaluate(self, split: Literal["val", "test"], batch: Any) -> SampleResult:
        metrics: TextMetrics = getattr(self, f"{split}_metrics")
        scores: WrittenMetrics = getattr(self, f"{split}_written")
        nats, of_sample = sample_nats(self(batch), self.network.head.weight, batch)
        metrics.add_batch(nats, batch)
        done = self.written(batch, self.decoding)
        texts = self.texts_of(done.token_ids.cpu().numpy())
        is_right = scores.add_batch(texts, batch["targets"], batch["weight"])
        for name, metric in [*metrics.items(), *scores.items()]:
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
        answers = {"written": done.token_ids}
        return SampleResult(of_sample, answers, ~is_right, done.log_probability.exp())


class Counts(Metric):
    """Sums over samples, batches and ranks of n counts, float64: a score computed from them equals
    that of all texts of the split at once."""

    sums: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        zeros = torch.zeros(number, dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")

    def update(self, counts: Sequence[Sequence[int]], weight: Tensor) -> None:
        """Add the counts of samples [B][n], weighted by [B]."""
        rows = torch.tensor(counts, dtype=torch.float64, device=weight.device)
        self.sums = self.sums + (rows * weight.double()[:, None]).sum(0)

    def compute(self) -> Tensor:
        """Return the sums [n]."""
        return self.sums


class ChrF(Counts):
    """Character n-gram F-score, 0 to 100, without whitespace.

    Source: Popović 2015; as sacrebleu computes it for a corpus with one reference per text.
    """

    def __init__(self) -> None:
        super().__init__(3 * CHARACTER_ORDER)

    @staticmethod
    def counts_of(text: str, target: str) -> list[int]:
        """Return, for each n, the number of n-grams of a text, of its target and in common."""
        counts: list[int] = []
        both = ["".join(one.split()) for one in (text, target)]
        for n in range(1, CHARACTER_ORDER + 1):
            own, other = (Counter(s[i : i + n] for i in range(len(s) - n + 1)) for s in both)
            counts += [own.total(), other.total(), (own & other).total()]
        return counts

    def compute(self) -> Tensor:
        """Return the score, [] float64; NaN without samples."""
        written, expected, matched = self.sums.view(-1, 3).T
        if not matched.any():
            return expected.sum() * 0 / expected.sum()
        is_there = (written > 0) & (expected > 0)
        precision = (matched / written)[is_there].mean()
        recall = (matched / expected)[is_there].mean()
        factor = CHRF_BETA**2
        return 100 * (1 + factor) * precision * recall / (factor * precision + recall)


class Bleu(Counts):
    """BLEU, 0 to 100, as by sacrebleu with its tokenisation (13a) and smoothing."""

    def __init__(self) -> None:
        super().__init__(2 * BLEU_ORDER + 2)

    @cached_property
    def scorer(self) -> Any:
        """Scorer of sacrebleu."""
        from sacrebleu.metrics import BLEU  # imported only when scores are computed

        return BLEU(effective_order=True)

    def counts_of(self, text: str, target: str) -> list[int]:
        """Return the numbers of matching n-grams for each n, of all n-grams of the text for each n,
        of its words, and of its target's words."""
        done = self.scorer.sentence_score(text, [target])
        return [*done.counts, *done.totals, done.sys_len, done.ref_len]

    def compute(self) -> Tensor:
        """Return the score, [] float64; NaN without samples."""
        counts = self.sums.long().tolist()
        if not counts[-1]:
            return self.sums.new_full((), torch.nan)
        right, written = counts[:BLEU_ORDER], counts[BLEU_ORDER:-2]
        done = self.scorer.compute_bleu(right, written, *counts[-2:], smooth_method="exp")
        return self.sums.new_tensor(done.score)


class WrittenMetrics(nn.ModuleDict):
    """All scores of one split's targets: `exact_match` (0 to 1), `chrf` and `bleu` (0 to 100)."""

    def __init__(self) -> None:
        super().__init__({"exact_match": SumCount(), "chrf": ChrF(), "bleu": Bleu()})

    def add_batch(self, texts: Sequence[str], targets: Sequence[str], weight: Tensor) -> Tensor:
        """Add one batch, and return which texts equal their targets [B] bool. Args: generated texts
        [B], targets [B], weight [B]."""
        pairs = list(zip(texts, targets, strict=True))
        is_right = torch.tensor([text == target for text, target in pairs], device=weight.device)
        self["exact_match"].update(is_right * weight, weight)
        for name in ("chrf", "bleu"):
            metric: Any = self[name]
            metric.update([metric.counts_of(*pair) for pair in pairs], weight)
        return is_right
