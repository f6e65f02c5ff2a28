"""Controls of a test, the same evaluation with one part replaced: baselines from statistics and
by the subject's head; scores, exact over ranks and with bootstrap intervals; the printed table,
controls.json and the page of examples.

Shapes: B samples, D features, t words, V vocabulary, R replicates, G groups, C rows.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jinja2 import Environment, StrictUndefined
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from datamodules.activations.store import ActivationStatistics, one_thread
from datamodules.core.batches import ALL, ActivationBatch
from datamodules.files.splitting import TRAIN
from lit_models.consistency_lens.lens import (
    DRAW,
    Explanation,
    Lens,
    best_reading,
    of_layer,
    of_rows,
    uniforms,
)
from lit_models.consistency_lens.loss import TeacherText, squared_error
from lit_models.consistency_lens.subject import (
    TRAINED_ON,
    PatchedSubject,
    Subject,
    output_edited,
    outputs_of,
    read,
    training_digest,
)
from lit_models.training.dropout import mixed
from lit_models.training.metrics import SumCount

NUM_DRAWS, BEST_OF = 8, (2, 4, 8)  # random explanations per activation; sizes of best-of-k rows
NUM_EXAMPLES = 100  # activations on the page of examples
COMPONENTS = (1, 4, 16)
# Rows with which a prediction compares each explanation.
CONTROLS = ("mean", "position_mean", "token_mean", "true_text", "no_activation")
# Rows that the reconstructor of the reference reads.
REFERENCE_ROWS = ("teacher_text_separate", "separate_reader")
_POISSON, _WORD_ORDER = 2, 3  # keys of random draws
Row = dict[str, float]
Rows = dict[str, Row]


NUM_DOCUMENTS = 1024  # of the training part; the map is fitted on all their tokens
RIDGE = 1e-4  # relative to each input's mean square


class Baselines(nn.Module):
    """Estimates of a layer's activation from statistics of the current data's training part."""

    mean: Tensor
    unit_mean: Tensor
    token_means: Tensor
    token_row: Tensor
    position_means: Tensor
    components: Tensor
    tuned: Tensor

    def __init__(self, statistics: ActivationStatistics, vocab_size: int) -> None:
        super().__init__()
        row = torch.full((vocab_size,), len(statistics.token_ids))
        row[torch.from_numpy(statistics.token_ids)] = torch.arange(len(statistics.token_ids))
        self.register_buffer("token_row", row, persistent=False)
        self.register_buffer("tuned", None, persistent=False)  # `tuned_map`, set in a test
        for name in ("mean", "unit_mean", "token_means", "position_means", "components"):
            table = torch.from_numpy(getattr(statistics, name)).float()
            self.register_buffer(name, table, persistent=False)

    def of_token(self, token: Tensor, mean: Tensor) -> Tensor:
        """Return the mean activations [B, D] of tokens [B]; `mean` [D] or [B, D] if unseen."""
        return _known(self.token_means, self.token_row[token], mean)

    def of_position(self, position: Tensor, mean: Tensor) -> Tensor:
        """Return the mean activations [B, D] at positions [B]; `mean` as in `of_token`."""
        return _known(self.position_means, position, mean)

    def projected(self, activation: Tensor, number: int) -> Tensor:
        """Return activations [B, D] projected on the first `number` principal components."""
        components = self.components[:number]
        return self.mean + (activation - self.mean) @ components.T @ components


def _known(table: Tensor, row: Tensor, mean: Tensor) -> Tensor:
    """Return rows of a table [n, D] by index [B]; the mean for indices from n on."""
    rows = table[row.clamp(max=len(table) - 1)]
    return rows.where((row < len(table))[:, None], mean.to(table))


def unembedded_words(lens: Lens, activation: Tensor, tuned: Tensor | None = None) -> Tensor:
    """Return the most probable words by the subject's head [B, t] int64, likeliest first.

    Args:
        activation: [B, D], used as output of the last block.
        tuned: [D + 1, D] from `tuned_map`; `None` uses the activation unchanged.

    Source: the logit lens (nostalgebraist 2020); Belrose et al. 2023, "Eliciting latent predictions
    from transformers with the tuned lens", sections 2 and 3.
    """
    network = lens.subject.network
    hidden = activation if tuned is None else activation @ tuned[:-1] + tuned[-1]
    ids = torch.full((len(hidden), 1), lens.begin_id, device=hidden.device)
    with output_edited(network.blocks()[-1], lambda output: hidden[:, None].to(output.dtype)):
        logits = network.head(read(network, ids))[:, 0].float()
    logits = logits.masked_fill(~lens.verbalizer.is_word, -torch.inf)
    return logits.topk(lens.verbalizer.num_words).indices


def tuned_map(subject: Subject, batches: Iterable[ActivationBatch], index: int = -1) -> Tensor:
    """Return weights and bias [D + 1, D] of the affine map from the output of the subject's layer
    `index` to that of the last block, with the least squared error over all tokens.

    A ridge regression towards the identity, in float64 on one thread; the source minimises the KL
    of the words by gradient descent instead.
    """
    blocks, width = subject.network.blocks(), subject.network.embedding.weight.shape[1]
    own = subject.layer_blocks[index]
    squares = torch.zeros(width + 1, width + 1, dtype=torch.float64, device="cpu")
    products = torch.zeros(width + 1, width, dtype=torch.float64, device="cpu")
    device = subject.network.embedding.weight.device
    with one_thread(), torch.no_grad():
        for batch in batches:
            ids = batch["input_ids"].to(device)
            hidden = outputs_of([own, blocks[-1]], partial(read, subject.network, ids))
            places = torch.arange(ids.shape[1], device=device)
            is_token = places < batch["lengths"].to(device)[:, None]
            inputs, outputs = (x[is_token].cpu().double() for x in hidden)
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
            squares += inputs.T @ inputs
            products += inputs.T @ outputs
        ridge = RIDGE * squares.diag().diag()
        weights = torch.linalg.solve(squares + ridge, products + ridge[:, :-1])
    return weights.to(subject.network.embedding.weight)


class Fidelity(NamedTuple):
    """Scores of rebuilt activations; all [B] float64.

    error, spread: squared distance of the true activation to the rebuilt one and to the training
    mean. unit_error, unit_spread: the same for activations normalised to length 1, and their mean.
    nats, next_nats: from `PatchedSubject.effect`.
    """

    error: Tensor
    spread: Tensor
    unit_error: Tensor
    unit_spread: Tensor
    nats: Tensor
    next_nats: Tensor

    @classmethod
    def of(
        cls, true: Tensor, rebuilt: Tensor, mean: Tensor, unit_mean: Tensor, patched: PatchedSubject
    ) -> "Fidelity":
        """Return the scores of rebuilt activations [B, D]; means are [D] or [B, D]."""
        effect, (true, rebuilt) = patched.effect(rebuilt), (true.double(), rebuilt.double())
        unit = F.normalize(true, dim=-1)
        return cls(
            (true - rebuilt).square().sum(-1),
            (true - mean.double()).square().sum(-1),
            (unit - F.normalize(rebuilt, dim=-1)).square().sum(-1),
            (unit - unit_mean).square().sum(-1),
            *effect,
        )


@dataclass
class Case:
    """One batch, its explanations and the activations rebuilt from these and from the controls."""

    lens: Lens  # in evaluation mode
    baselines: Sequence[Baselines]  # one per layer
    batch: ActivationBatch
    activation: Tensor  # [B, D] of the batch
    other: Tensor  # [B, D], another activation for each
    teacher: TeacherText
    best_of: int = 1  # explanations per activation in a prediction

    def __post_init__(self) -> None:
        self.position, self.layer = self.batch["position"], self.batch.get("layer")
        self.mean = of_layer(self.lens.mean, self.layer)  # of the training part, [D] or [B, D]
        self.variance = of_layer(self.lens.variance, self.layer)  # of the same, [] or [B]

    def explain(self, activation: Tensor | None, key: Tensor | None = None) -> Explanation:
        rows = len(self.activation)
        return self.lens.verbalizer.explain(activation, key, rows=rows, layer=self.layer)

    def read(self, words: Tensor) -> Tensor:
        """Return the activations that the reconstructor rebuilds from words [B, t, D]."""
        return self.lens.reconstructor(words, self.layer)

    def guess(self, of: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return the result of `of` for the baselines of each row's layer and these arguments."""
        return of_rows([of(one, *arguments) for one in self.baselines], self.layer)

    @cached_property
    def greedy(self) -> Explanation:
        return self.explain(self.activation)

    @cached_property
    def explanation(self) -> Explanation:
        """Explanation for a prediction."""
        if self.best_of == 1:
            return self.greedy
        arguments = (self.activation, self.batch["noise_key"], self.best_of, self.layer)
        return best_reading(self.lens, *arguments)

    @cached_property
    def shuffled(self) -> Explanation:
        """Explanation of the other activation."""
        return self.explain(self.other)

    def text_of(self, teacher: TeacherText) -> Tensor:
        """Return the embeddings of a teacher's text [B, t, D], as in the warm start."""
        return self.lens.words(teacher.of(self.lens, self.batch, self.activation))

    @cached_property
    def draws(self) -> list[Tensor]:
        keys = [mixed(self.batch["noise_key"], DRAW + draw) for draw in range(NUM_DRAWS)]
        return [self.rebuilt(self.explain(self.activation, key)) for key in keys]

    @cached_property
    def patched(self) -> PatchedSubject:
        return PatchedSubject(self.lens.subject, self.batch)

    def rebuilt(self, explanation: Explanation) -> Tensor:
        return self.read(explanation.embeddings)

    @property
    def token_mean(self) -> Tensor:
        """Mean of the training part at the current token [B, D]."""
        current = self.batch["input_ids"].gather(1, self.position[:, None])[:, 0]
        return self.guess(Baselines.of_token, current, self.mean)

    def rows(self) -> dict[str, Callable[[], Tensor]]:
        """Return name of `ROWS` -> function that returns rebuilt activations [B, D]."""
        return {name: partial(rebuild, self) for name, rebuild in ROWS.items()}

    @cached_property
    def salience(self) -> Tensor:
        """Salience of each word [B, t]: how much the error grows if the other activation's
        explanation provides this word.

        In units of the training variance; 0 if both explanations have the same word there.
        """
        own, other = self.explanation.embeddings, self.shuffled.embeddings
        error = self.error(self.rebuilt(self.explanation))
        places = range(own.shape[1])
        changed = (torch.cat([own[:, :i], other[:, i, None], own[:, i + 1 :]], 1) for i in places)
        return torch.stack([self.error(self.read(w)) - error for w in changed], dim=1)

    def error(self, rebuilt: Tensor) -> Tensor:
        """Return the error [B] float32 of activations [B, D], in units of the training variance."""
        return squared_error(rebuilt, self.activation, self.variance)

    def fidelities(self) -> dict[str, Fidelity]:
        return {name: self.fidelity(rebuild()) for name, rebuild in self.rows().items()}

    def fidelity(self, rebuilt: Tensor) -> Fidelity:
        unit_mean = self.guess(lambda one: one.unit_mean.expand_as(rebuilt))
        scores = Fidelity.of(self.activation, rebuilt, self.mean, unit_mean, self.patched)
        if self.layer is None:
            return scores
        units = self.variance.double()  # so that layers with long activations do not dominate
        return scores._replace(error=scores.error / units, spread=scores.spread / units)

    def predictions(self) -> dict[str, Tensor]:
        """Return the result of `predict_step`, with errors in units of the training variance.

        token_ids [B, t] int64; error [B]; control_errors [B, C], in the order of `CONTROLS`.
        """
        rows = self.rows()
        controls = torch.stack([self.error(rows[name]()) for name in CONTROLS], dim=1)
        error = self.error(self.rebuilt(self.explanation))
        return {"token_ids": self.explanation.token_ids, "error": error, "control_errors": controls}

    def words_in_other_order(self) -> Tensor:
        """Return the greedy explanation's words [B, t, D], shuffled, never in their own order."""
        words = self.greedy.embeddings
        places = torch.arange(words.shape[1], device=words.device)
        keys = mixed(mixed(self.batch["noise_key"], _WORD_ORDER)[:, None], places)
        order = keys.argsort(1)
        is_same = (order == places).all(1, keepdim=True)
        order = torch.where(is_same, order.flip(1), order)
        return words.gather(1, order[..., None].expand_as(words))

    def unembedded(self, tuned: bool) -> Tensor:
        """Return activations rebuilt from the most probable words by the subject's head."""
        words = partial(unembedded_words, self.lens, self.activation)
        ids = self.guess(lambda one: words(one.tuned if tuned else None))
        return self.read(self.lens.words(ids))

    def best_draw(self, number: int) -> Tensor:
        """Return activations rebuilt from the best of the first draws."""
        drawn = torch.stack(self.draws[:number])  # [k, B, D]
        errors = (drawn - self.activation).square().sum(-1)
        return drawn[errors.argmin(0), torch.arange(drawn.shape[1], device=drawn.device)]

    def projected(self, number: int) -> Tensor:
        """Return the activations projected on the first principal components."""
        return self.guess(Baselines.projected, self.activation, number)

    def read_separately(self, words: Tensor) -> Tensor:
        """Return the activations that the reference's reconstructor rebuilds from words."""
        return self.lens.reference["reconstructor"](words, self.layer)


# Name of each row of the table -> its rebuilt activations [B, D].
ROWS: dict[str, Callable[[Case], Tensor]] = {
    "greedy": lambda case: case.rebuilt(case.greedy),
    "sampled": lambda case: case.draws[0],
    **{f"best_of_{number}": partial(Case.best_draw, number=number) for number in BEST_OF},
    "zero": lambda case: torch.zeros_like(case.activation),
    "mean": lambda case: case.mean.expand_as(case.activation),
    "position_mean": lambda case: case.guess(Baselines.of_position, case.position, case.mean),
    "token_mean": lambda case: case.token_mean,
    **{f"components_{number}": partial(Case.projected, number=number) for number in COMPONENTS},
    "true_text": lambda case: case.read(case.text_of(TeacherText())),
    "teacher_text": lambda case: case.read(case.text_of(case.teacher)),
    "teacher_text_separate": lambda case: case.read_separately(case.text_of(case.teacher)),
    "logit_lens": partial(Case.unembedded, tuned=False),
    "tuned_lens": partial(Case.unembedded, tuned=True),
    "text_only": lambda case: case.rebuilt(case.explain(case.token_mean)),
    "shuffled_examples": lambda case: case.rebuilt(case.shuffled),
    "shuffled_words": lambda case: case.read(case.words_in_other_order()),
    "untrained_verbalizer": lambda case: case.rebuilt(
        case.lens.untrained.explain(case.activation, layer=case.layer)
    ),
    "no_activation": lambda case: case.rebuilt(case.explain(None)),
    "separate_reader": lambda case: case.read_separately(case.greedy.embeddings),
}


REPLICATES = 500
SUMMED = (*Fidelity._fields, "count")
COMPARED = ("mean", "token_mean")  # reference rows of `kl_recovered` and `excess`


class FidelityTable(Metric):
    """Sums per row, over all samples and per file and layer; and the same sums in R bootstrap
    replicates, from which intervals follow.

    A replicate counts each document as a whole, as often as a Poisson variable of mean 1 with the
    document as key: it needs no list of samples, and is the same on any number of devices.

    Args:
        rows: names, including those of `COMPARED`.
        groups: distinct names of the files; a single file forms no group.
        layers: if several, each is a group, such as layer/2.

    Source: Chamandy et al. 2012, "Estimating uncertainty for massive data streams", section 3.
    """

    sums: Tensor
    replicates: Tensor

    def __init__(
        self, rows: Sequence[str], groups: Sequence[str], layers: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.rows, self.files = list(rows), list(groups) if len(groups) > 1 else []
        self.layers = [f"layer/{layer}" for layer in layers if len(layers) > 1]
        self.groups = [ALL, *self.files, *self.layers]
        shape = (len(self.groups), len(self.rows), len(SUMMED))
        self.add_state("sums", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        replicates = torch.zeros(REPLICATES, *shape, dtype=torch.float64)
        self.add_state("replicates", replicates, dist_reduce_fx="sum")

    def update(self, scores: dict[str, Fidelity], batch: ActivationBatch) -> None:
        """Add a batch. Args: scores: by row."""
        one = torch.ones_like(batch["weight"], dtype=torch.float64)
        values = torch.stack([torch.stack([*scores[row], one], -1) for row in self.rows], 1)
        member = self.members(batch)
        counts = torch.arange(11, dtype=torch.float64, device=values.device)  # P(12 or more) < 1e-9
        chances = torch.exp(-1 - torch.lgamma(counts + 1)).cumsum(0)
        drawn = uniforms(mixed(batch["document"], _POISSON), REPLICATES)
        draws = torch.searchsorted(chances, drawn).double()  # [B, R], of a Poisson variable
        self.sums = self.sums + torch.einsum("bg,bcf->gcf", member, values)
        often = draws[:, :, None] * member[:, None]
        self.replicates = self.replicates + torch.einsum("brg,bcf->rgcf", often, values)

    def members(self, batch: ActivationBatch) -> Tensor:
        """Return the samples' weights in each group [B, G] float64, 0 outside of the group."""
        weight = batch["weight"].double()
        parts = [batch["group"] == number for number in range(len(self.files))]
        parts += [batch["layer"] == index for index in range(len(self.layers))]
        return torch.stack([weight, *(weight * part for part in parts)], dim=1)

    def compute(self) -> dict[str, Rows]:
        """Return group -> row -> value's name -> value; `fve_low` and `fve_high` are the ends of
        the 95 % interval of `fve`, and so on; 0 for groups without samples."""
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64, device=self.sums.device)
        drawn = self._values(self.replicates)
        table: dict[str, Rows] = {group: {row: {} for row in self.rows} for group in self.groups}
        for name, values in self._values(self.sums).items():
            of_some = drawn[name].where(drawn["count"] > 0, nan)  # replicates with any document
            parts = torch.stack([values, *of_some.nanquantile(ends, dim=0).nan_to_num()], -1)
            for group, rows in zip(self.groups, parts.tolist(), strict=True):
                for row, (value, low, high) in zip(self.rows, rows, strict=True):
                    table[group][row] |= {name: value, f"{name}_low": low, f"{name}_high": high}
        return table

    def _values(self, sums: Tensor) -> dict[str, Tensor]:
        """Return name -> values [..., C] of sums [..., C, F]."""
        by_name = dict(zip(SUMMED, sums.unbind(-1), strict=True))
        mean, token = (self.rows.index(name) for name in COMPARED)
        fve = _saved(by_name["error"], by_name["spread"])
        nats, count = by_name["nats"], by_name["count"]
        return {
            "fve": fve,  # fraction of variance explained
            "excess": fve - fve[..., token, None],  # above the FVE of the current-token mean
            "unit_fve": _saved(by_name["unit_error"], by_name["unit_spread"]),  # at length 1
            # 1 - nats relative to those of the training mean.
            "kl_recovered": _saved(nats, nats[..., mean, None]),
            "nats": nats / count.clamp(min=1),
            "next_nats": by_name["next_nats"] / count.clamp(min=1),
            "count": count,
        }


def _saved(cost: Tensor, base: Tensor) -> Tensor:
    """1 - cost / base; 0 if base is 0."""
    return torch.where(base > 0, 1 - cost / base.clamp(min=1e-300), 0.0)


RECALLS = ("recall", "shuffled_recall", "known")


class Explained(SumCount):
    """Fraction of variance explained: `update(error, spread)` adds squared distances."""

    def compute(self) -> Tensor:
        """Return 1 - error / spread, [] float64; 0 without samples."""
        return _saved(self.total, self.count)


class Legibility(Metric):
    """Legibility of greedy explanations per group of `FidelityTable`: nats per word under the
    subject as a language model; share of distinct texts; and for each attribute, number of samples
    with it before the position, and share of these in which the explanation, or that of another
    activation, contains it.
    """

    nats: Tensor
    known: Tensor
    keys: list[Tensor]
    members: list[Tensor]

    def __init__(self, attributes: Sequence[str], groups: Sequence[str]) -> None:
        super().__init__()
        self.attributes, self.groups = list(attributes), list(groups)
        nats = torch.zeros(len(groups), 2, dtype=torch.float64)
        known = torch.zeros(len(groups), len(attributes), 3, dtype=torch.float64)
        self.add_state("nats", nats, dist_reduce_fx="sum")  # [G, 2]: sum and count
        self.add_state("known", known, dist_reduce_fx="sum")  # [G, A, 3]
        self.add_state("keys", [], dist_reduce_fx="cat")  # [n], hashes of explanations
        self.add_state("members", [], dist_reduce_fx="cat")  # [n, G]

    def update(
        self, nats: Tensor, texts: tuple[Tensor, Tensor], attributes: Tensor, member: Tensor
    ) -> None:
        """Add one batch.

        Args:
            nats: [B].
            texts: the explanations [B, t] int64, and those of other activations.
            attributes: [B, A] int64, tokens; -1 = unknown.
            member: [B, G] from `FidelityTable.members`.
        """
        values = torch.stack([nats.double(), torch.ones_like(nats, dtype=torch.float64)], dim=1)
        self.nats = self.nats + torch.einsum("bg,bf->gf", member, values)
        key = torch.zeros_like(texts[0][:, 0])
        for place in range(texts[0].shape[1]):
            key = mixed(key, texts[0][:, place])
        self.keys.append(key)
        self.members.append(member > 0)
        is_known = attributes >= 0
        named = [(attributes[:, :, None] == text[:, None]).any(-1) & is_known for text in texts]
        counts = torch.stack([*named, is_known], dim=-1).double()  # [B, A, 3]
        self.known = self.known + torch.einsum("bg,baf->gaf", member, counts)

    def compute(self) -> tuple[Rows, dict[str, Rows]]:
        """Return group -> name -> value; and group -> attribute -> name of `RECALLS` -> value."""
        keys, members = dim_zero_cat(self.keys), dim_zero_cat(self.members)
        of_texts: Rows = {}
        of_attributes: dict[str, Rows] = {}
        for place, group in enumerate(self.groups):
            own, (total, count) = keys[members[:, place]], self.nats[place].tolist()
            of_texts[group] = {
                "text_nats": total / count if count else nan,
                "distinct": len(own.unique()) / max(1, len(own)),
            }
            each = self.known[place]
            shares = torch.cat([each.sum(0, keepdim=True), each])
            shares[:, :2] /= shares[:, 2:].clamp(min=1)
            rows = [dict(zip(RECALLS, row, strict=True)) for row in shares.tolist()]
            if self.attributes:
                of_texts[group] |= {name: rows[0][name] for name in RECALLS[:2]}
            of_attributes[group] = dict(zip(self.attributes, rows[1:], strict=True))
        return of_texts, of_attributes


IS_RANDOM = "the subject has random weights"
OTHER_DATA = (
    "tested on data that were divided otherwise than in training: documents of the\n"
    "test may have been trained on; token_mean, position_mean, components and what\n"
    "the teacher is told are of the test's own training part, the mean is that of\n"
    "the lens's training"
)
NO_REFERENCE = (
    "without the rows of the separate reader: it is kept when both networks begin to\n"
    "learn together after a warm start, and this lens knows of none"
)
SHOWN = {
    "fve": "FVE",
    "interval": "95 %",
    "unit_fve": "unit FVE",
    "kl_recovered": "KL rec.",
    "next_nats": "CE diff.",
}


class ControlTable(Callback):
    """Computes all rows from the module's sums, logs headline values, prints and writes the tables.

    It logs the first file's headline as test/…, that of each further FILE as test/FILE/…, and with
    several layers that of each layer N over all files as test/layer/N/….
    controls.json: subject; rows, see `FidelityTable.compute`; legibility, group -> name -> value;
    attributes, group -> attribute -> recall; notes. A group is a file, a layer, or all.
    examples.html: `NUM_EXAMPLES` explanations.
    """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        computed = pl_module.fidelity.compute()  # a collective, so on every rank
        legible, attributes = pl_module.legibility.compute()
        left_out = () if pl_module.lens.reference_step >= 0 else REFERENCE_ROWS
        groups = {
            group: {name: row for name, row in rows.items() if name not in left_out}
            for group, rows in computed.items()
        }
        shown = [group for group in groups if group != ALL or not pl_module.fidelity.files]
        values: Row = {}
        for place, group in enumerate(shown):
            start = f"{group}/" if place else ""
            figures = headline(groups[group], legible[group])
            values |= {start + name: value for name, value in figures.items()}
        pl_module.headline = nn.ModuleList(SumCount() for _ in values).to(pl_module.device)
        for place, (name, value) in enumerate(values.items()):
            metric = pl_module.headline[place]  # by index, as names of files contain dots
            metric.update(torch.tensor(value, dtype=torch.float64), torch.tensor(1))
            pl_module.log(f"test/{name}", metric, metric_attribute=f"headline.{place}")
        dataset = trainer.datamodule.datasets["test"]
        last = len(dataset.lengths) - 1
        chosen = np.linspace(0, last, min(NUM_EXAMPLES, last + 1)).round().astype(int)
        lines = examples(trainer, pl_module, dataset, chosen)  # on every rank
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        facts = pl_module.recipe["subject"]
        is_random = pl_module.options.random_weights or pl_module.options.path is None
        own = training_digest(trainer.datamodule.store.stream(TRAIN).hashes)
        holds = {
            OTHER_DATA: pl_module.recipe[TRAINED_ON] != [own],
            NO_REFERENCE: bool(left_out),
            IS_RANDOM: is_random,
        }
        notes = [note for note in holds if holds[note]]
        known = {name: facts[name] for name in ("digest", "layer")}
        content = {
            "subject": {**known, "has_random_weights": is_random},
            "rows": groups,
            "legibility": legible,
            "attributes": attributes,
            "notes": notes,
        }
        (folder / "controls.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        (folder / "examples.html").write_text(page(lines, len(dataset.lengths)), "utf-8")
        console = Console(highlight=False)
        for group in shown:
            console.print(rendered(groups[group], legible[group], group))
        console.print(*notes, sep="\n", markup=False)


def headline(rows: Rows, legible: Row) -> Row:
    """Return the values that a test logs for one group."""
    own, token = rows["greedy"], rows["token_mean"]["fve"]
    return {
        "fve": own["fve"],
        "fve_excess": own["excess"],
        "fve_excess_share": own["excess"] / (1 - token) if token < 1 else 0.0,
        "fve_shuffled": rows["shuffled_examples"]["fve"],
        "fve_sampled": rows["sampled"]["fve"],
        "kl_recovered": own["kl_recovered"],
        **{f"{row}_fve": rows[row]["fve"] for row in ("separate_reader",) if row in rows},
        **legible,
    }


def rendered(rows: Rows, legible: Row, group: str) -> Table:
    """Return the printed table of controls, at most 80 columns wide."""
    shown = Table(title_justify="left", caption_justify="left", box=None, pad_edge=False)
    shown.title = "controls" if group == ALL else f"controls: {group}"
    shown.add_column("rebuilt from")
    for name in SHOWN.values():
        shown.add_column(name, justify="right")
    for row, values in rows.items():
        interval = f"{_number(values['fve_low'])} to {_number(values['fve_high'])}"
        texts = [_number(values[name]) for name in SHOWN if name != "interval"]
        shown.add_row(row, texts[0], interval, *texts[1:])
    own = rows["greedy"]
    named = f"greedy explanations: {legible['text_nats']:.3f} nats per word under the subject, "
    named += f"{legible['distinct']:.3f} distinct"
    if "recall" in legible:
        named += f"\nattributes named: {legible['recall']:.3f}, of another activation "
        named += f"{legible['shuffled_recall']:.3f}"
    shown.caption = (
        f"greedy is {own['excess']:.3f} ({own['excess_low']:.3f} to {own['excess_high']:.3f}) "
        f"above token_mean; {own['count']:.0f} activations\n{named}"
    )
    return shown


def _number(value: float) -> str:
    """Format a number in at most seven characters."""
    if abs(value) < 100:
        return f"{round(value, 3) + 0.0:.3f}"  # no -0.000
    return f"{value:.1e}".replace("e+0", "e")


def examples(
    trainer: Trainer, module: LightningModule, dataset: Any, numbers: np.ndarray
) -> list[dict[str, Any]]:
    """Return the lines of `predict` for some samples, sorted by error, with `words`: (text,
    salience) of each word of the explanation.

    Every rank computes all lines, so that no rank waits for another.
    """
    batch = module.transfer_batch_to_device(dataset.batch(numbers, 0), module.device, 0)
    with torch.no_grad():
        outputs = trainer.strategy.predict_step(batch, 0, with_salience=True)
    results, lines = {name: values.cpu().numpy() for name, values in outputs.items()}, []
    decode = dataset.pieces.store.tokenizer.decode_continuation
    for row, number in enumerate(numbers.tolist()):
        values = {name: result[row] for name, result in results.items()}
        line = dataset.explanation_line(number, values, CONTROLS)
        texts = [decode([i], skip_special_tokens=False) for i in values["token_ids"]]
        line["words"] = list(zip(texts, values["salience"].tolist(), strict=True))
        lines.append(line)
    return sorted(lines, key=lambda line: line["error"])


def page(examples: list[dict[str, Any]], number: int) -> str:
    """Return a self-contained, sortable HTML page of `examples` from `number` activations."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        Path(__file__).with_name("examples.html").read_text("utf-8")
    )
    largest = max(s for line in examples for _, s in line["words"])
    return template.render(examples=examples, number=number, largest=largest)
