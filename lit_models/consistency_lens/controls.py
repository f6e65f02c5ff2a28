"""Controls of a test: the same evaluation with one part replaced.

Shapes: B samples, D features, t words, V vocabulary.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.activations.store import ActivationStatistics
from datamodules.core.batches import ActivationBatch
from lit_models.consistency_lens.lens import Explanation, Lens
from lit_models.consistency_lens.loss import (
    TeacherText,
    current_token,
    recent_words,
    squared_error,
    text_nats,
)
from lit_models.consistency_lens.metrics import (
    AttributeRecall,
    DistinctShare,
    Fidelity,
    FidelityTable,
    SampleErrors,
)
from lit_models.consistency_lens.subject import PatchedSubject
from lit_models.training.dropout import mixed
from lit_models.training.metrics import SumCount

RANDOM = "random_subject"


@dataclass(frozen=True)
class EvaluationOptions:
    """What a test computes.

    Args:
        num_draws: explanations drawn for each activation; the best of 2, 4, 8 and so on of them
            are rows of the table.
        num_examples: activations on the page of examples, evenly over the errors; 0 makes no page.
        random_subject: controls.json of a test of a lens whose subject has random weights, which
            becomes a row of the table.

    Raises:
        ValueError: a number out of its range.
    """

    num_draws: int = 8
    num_examples: int = 100
    random_subject: str | None = None

    def __post_init__(self) -> None:
        if self.num_draws < 1:
            raise ValueError(
                f"evaluation.num_draws must be at least 1, got {self.num_draws}; usual is 8."
            )
        if self.num_examples < 0:
            raise ValueError(
                f"evaluation.num_examples must be 0 or more, got {self.num_examples}; 0 makes no "
                "page of examples."
            )

    @property
    def best_of(self) -> tuple[int, ...]:
        """Of how many draws the best is a row: powers of two."""
        return tuple(2**n for n in range(1, self.num_draws.bit_length()))


def random_subject_rows(path: Path) -> dict[str, dict[str, float]]:
    """Return group -> values of the lens itself, of a test with a random subject.

    Args:
        path: controls.json of its run folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no table of controls, or its subject was trained.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"evaluation.random_subject {path} does not exist; it is the controls.json of a test "
            "whose model.subject.random_weights is true."
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        has_random_weights = content["subject"]["has_random_weights"]
        rows = {group: dict(found["greedy"]) for group, found in content["rows"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"evaluation.random_subject {path} is no controls.json of a test "
            f"({type(error).__name__}: {error}); name the one in the run folder of the second "
            "chain."
        ) from error
    if not has_random_weights:
        raise ValueError(
            f"evaluation.random_subject {path} is of a trained subject; name the controls.json of "
            "a test whose model.subject.random_weights is true."
        )
    return rows


COMPONENTS = (1, 4, 16)
# What a prediction is compared with, one by one.
CONTROLS = ("mean", "position_mean", "token_mean", "true_text", "no_activation")
# Rows that the reconstructor of the reference reads.
REFERENCE_ROWS = ("teacher_text_separate", "separate_reader")
Row = dict[str, float]
_WORD_ORDER, _DRAW = 3, 4  # keys of what is drawn


def row_names(options: EvaluationOptions) -> tuple[str, ...]:
    """Return the names of the rows of a case, in order."""
    return (
        *("greedy", "sampled", *(f"best_of_{number}" for number in options.best_of)),
        *("zero", "mean", "position_mean", "token_mean"),
        *(f"components_{number}" for number in COMPONENTS),
        *("true_text", "teacher_text", "teacher_text_separate"),
        *("shuffled_examples", "shuffled_words"),
        *("untrained_verbalizer", "no_activation", "separate_reader"),
    )


def known_rows(rows: dict[str, Row], lens: Lens) -> dict[str, Row]:
    """Return the rows without those of a reference that was never kept."""
    return {n: row for n, row in rows.items() if lens.has_reference or n not in REFERENCE_ROWS}


class Baselines(nn.Module):
    """What the training part of the data at hand says of an activation.

    Args:
        statistics: of the training part.
        vocab_size: V.
    """

    mean: Tensor
    unit_mean: Tensor
    token_means: Tensor
    token_row: Tensor
    position_means: Tensor
    components: Tensor

    def __init__(self, statistics: ActivationStatistics, vocab_size: int) -> None:
        super().__init__()
        row = torch.full((vocab_size,), len(statistics.token_ids))
        row[torch.from_numpy(statistics.token_ids)] = torch.arange(len(statistics.token_ids))
        tables = {
            "mean": torch.from_numpy(statistics.mean).float(),
            "unit_mean": torch.from_numpy(statistics.unit_mean).float(),
            "token_means": torch.from_numpy(statistics.token_means),
            "token_row": row,
            "position_means": torch.from_numpy(statistics.position_means),
            "components": torch.from_numpy(statistics.components),
        }
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def of_token(self, token: Tensor, mean: Tensor) -> Tensor:
        """Return [B, D]: mean activation at these tokens [B]; `mean` [D] for unseen ones."""
        return _looked_up(self.token_means, self.token_row[token], mean)

    def of_position(self, position: Tensor, mean: Tensor) -> Tensor:
        """Return [B, D]: mean activation at these positions [B]; `mean` [D] for unseen ones."""
        return _looked_up(self.position_means, position, mean)

    def projected(self, activation: Tensor, number: int) -> Tensor:
        """Return [B, D]: what the first principal components say of activations [B, D]."""
        components = self.components[:number]
        return self.mean + (activation - self.mean) @ components.T @ components


def _looked_up(table: Tensor, row: Tensor, default: Tensor) -> Tensor:
    """[B, D]: rows [B] of a table [N, D], and the default [D] behind its end."""
    whole = torch.cat([table, default[None].to(table.dtype)])
    return whole[row.clamp(max=len(table))]


class Case:
    """One batch, its explanations, and everything that is rebuilt from them.

    Args:
        lens: in evaluation mode.
        baselines: of the training part.
        batch: with `other`.
        activation: [B, D] of the batch.
        other: [B, D] of the partners.
        teacher: what the lens's teacher told.
        options: how many explanations are drawn.
    """

    def __init__(
        self,
        lens: Lens,
        baselines: Baselines,
        batch: ActivationBatch,
        activation: Tensor,
        other: Tensor,
        teacher: TeacherText,
        options: EvaluationOptions,
    ) -> None:
        self.lens, self.baselines, self.teacher = lens, baselines, teacher
        self.batch, self.activation, self.other = batch, activation, other
        self.position = batch["position"]
        self.num_draws, self.best_of = options.num_draws, options.best_of

    @cached_property
    def greedy(self) -> Explanation:
        """The most probable words."""
        return self.lens.verbalizer.explain(self.activation)

    @cached_property
    def shuffled(self) -> Explanation:
        """The explanation of another activation."""
        return self.lens.verbalizer.explain(self.other)

    @cached_property
    def teacher_words(self) -> Tensor:
        """[B, t, D], embeddings of the teacher's text: the reconstructor learns from no other."""
        number, is_word = self.lens.verbalizer.num_words, self.lens.verbalizer.is_word
        place = (self.batch["input_ids"], self.position, number)
        return self.lens.words(self.teacher.words(*place, self.lens.token_counts, is_word))

    @cached_property
    def greedy_nats(self) -> Tensor:
        """[B]: mean nats of the greedy words under the subject as a language model."""
        ids = self.greedy.token_ids
        return text_nats(self.lens.language_logits(ids), ids)

    @cached_property
    def draws(self) -> list[Tensor]:
        """[B, D] rebuilt from each of several drawn explanations."""
        keys = [mixed(self.batch["noise_key"], _DRAW + draw) for draw in range(self.num_draws)]
        return [self.rebuilt(self.lens.verbalizer.explain(self.activation, key)) for key in keys]

    @cached_property
    def current(self) -> Tensor:
        """[B] the words at the positions."""
        return current_token(self.batch)

    @cached_property
    def patched(self) -> PatchedSubject:
        """The documents in the subject."""
        return PatchedSubject(self.lens.subject, self.batch)

    def rebuilt(self, explanation: Explanation) -> Tensor:
        """Return [B, D]."""
        return self._read(explanation.embeddings)

    def rows(self) -> dict[str, Callable[[], Tensor]]:
        """Return name -> what rebuilds the activations [B, D]; the first is the lens itself."""
        baselines, current, mean = self.baselines, self.current, self.lens.mean
        reader = self.lens.reference["reconstructor"]
        return {
            "greedy": lambda: self.rebuilt(self.greedy),
            "sampled": lambda: self.draws[0],
            **{f"best_of_{k}": self._best_of(k) for k in self.best_of},
            "zero": lambda: torch.zeros_like(self.activation),
            "mean": lambda: mean.expand_as(self.activation),
            "position_mean": lambda: baselines.of_position(self.position, mean),
            "token_mean": lambda: baselines.of_token(current, mean),
            **{f"components_{k}": self._projected(k) for k in COMPONENTS},
            "true_text": lambda: self._read(self.lens.words(self._recent())),
            "teacher_text": lambda: self._read(self.teacher_words),
            "teacher_text_separate": lambda: reader(self.teacher_words, current),
            "shuffled_examples": lambda: self.rebuilt(self.shuffled),
            "shuffled_words": lambda: self._read(self._in_other_order()),
            "untrained_verbalizer": lambda: self.rebuilt(self._untrained()),
            "no_activation": lambda: self.rebuilt(self._without_activation()),
            "separate_reader": lambda: reader(self.greedy.embeddings, current),
        }

    @cached_property
    def salience(self) -> Tensor:
        """[B, t]: what the error of the greedy explanation becomes more when one of its words is
        replaced by the word that another activation's explanation has in its place.

        In units of the training variance; 0 where both have the same word there.
        """
        own, other = self.greedy.embeddings, self.shuffled.embeddings
        error = self.error(self.rebuilt(self.greedy))
        found = []
        for place in range(own.shape[1]):
            changed = torch.cat([own[:, :place], other[:, place, None], own[:, place + 1 :]], 1)
            found.append(self.error(self._read(changed)) - error)
        return torch.stack(found, dim=1)

    def error(self, rebuilt: Tensor) -> Tensor:
        """Return [B] float32 of rebuilt activations [B, D], in units of the training variance."""
        return squared_error(rebuilt, self.activation, self.lens.variance)

    def fidelity(self, rebuilt: Tensor) -> Fidelity:
        """Return what rebuilt activations [B, D] are worth."""
        true, spread = self.activation.double(), self.lens.mean.double()
        found, unit_mean = rebuilt.double(), self.baselines.unit_mean.double()
        unit = F.normalize(true, dim=-1)
        return Fidelity(
            (true - found).square().sum(-1),
            (true - spread).square().sum(-1),
            (unit - F.normalize(found, dim=-1)).square().sum(-1),
            (unit - unit_mean).square().sum(-1),
            *self.patched.effect(rebuilt),
        )

    def _read(self, words: Tensor) -> Tensor:
        return self.lens.reconstructor(words, self.current)

    def _best_of(self, number: int) -> Callable[[], Tensor]:
        def best() -> Tensor:
            drawn = torch.stack(self.draws[:number])  # [k, B, D]
            errors = (drawn - self.activation).square().sum(-1)
            return drawn[errors.argmin(0), torch.arange(drawn.shape[1], device=drawn.device)]

        return best

    def _projected(self, number: int) -> Callable[[], Tensor]:
        return lambda: self.baselines.projected(self.activation, number)

    def _recent(self, number: int | None = None) -> Tensor:
        number = number or self.lens.verbalizer.num_words
        is_word = self.lens.verbalizer.is_word
        return recent_words(self.batch["input_ids"], self.position, number, is_word)

    def _in_other_order(self) -> Tensor:
        words = self.greedy.embeddings
        places = torch.arange(words.shape[1], device=words.device)
        keys = mixed(mixed(self.batch["noise_key"], _WORD_ORDER)[:, None], places)
        order = keys.argsort(1)
        is_same = (order == places).all(1, keepdim=True)
        order = torch.where(is_same, order.flip(1), order)
        return words.gather(1, order[..., None].expand_as(words))

    def _untrained(self) -> Explanation:
        return self.lens.untrained.explain(self.activation)

    def _without_activation(self) -> Explanation:
        return self.lens.verbalizer.explain(None, rows=len(self.activation))


def predictions(case: Case) -> dict[str, Tensor]:
    """Return what `predict_step` returns: words, and errors in units of the training variance.

    token_ids [B, t] int64; error [B]; control_errors [B, C], in the order of `CONTROLS`.
    """
    rows = case.rows()
    controls = torch.stack([case.error(rows[name]()) for name in CONTROLS], dim=1)
    error = case.error(rows["greedy"]())
    return {"token_ids": case.greedy.token_ids, "error": error, "control_errors": controls}


def salient_predictions(case: Case) -> dict[str, Tensor]:
    """Return `predictions`, and salience [B, t] of the words."""
    return {**predictions(case), "salience": case.salience}


def fidelities(case: Case) -> dict[str, Fidelity]:
    """Return row -> what it is worth."""
    return {name: case.fidelity(rebuild()) for name, rebuild in case.rows().items()}


class Legibility(nn.ModuleDict):
    """Metrics of greedy explanations.

    text_nats: of a word under the subject as a language model. distinct: share of texts that are
    like no other. recall, shuffled_recall: share of the attributes told before the position that
    are in the explanation, or in that of another activation.

    Args:
        attributes: names, none where nothing is known of the documents.
    """

    def __init__(self, attributes: Sequence[str]) -> None:
        super().__init__({"text_nats": SumCount(), "distinct": DistinctShare()})
        self.attributes = list(attributes)
        if attributes:
            for name in ("recall", "shuffled_recall"):
                self[name] = AttributeRecall(len(attributes))

    def add(self, case: Case, weight: Tensor) -> None:
        """Add one batch. Args: weight: [B], 0 for what does not count."""
        ids = case.greedy.token_ids
        self["text_nats"].update(case.greedy_nats * weight, weight)
        self["distinct"].update(ids, weight)
        if self.attributes:
            words = case.batch["attributes"]
            self["recall"].update(words, ids, weight)
            self["shuffled_recall"].update(words, case.shuffled.token_ids, weight)

    def computed(self) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return name -> value, and attribute -> recall, shuffled_recall, known; a collective."""
        found = {name: float(self[name].compute()) for name in ("text_nats", "distinct")}
        by_name: dict[str, dict[str, float]] = {name: {} for name in self.attributes}
        for name in ("recall", "shuffled_recall") if self.attributes else ():
            every, *each = self[name].compute().tolist()
            found[name] = every[0]
            for attribute, (share, known) in zip(self.attributes, each, strict=True):
                by_name[attribute] |= {name: share, "known": known}
        return found, by_name


Values = dict[str, float]


class Tested(nn.Module):
    """What a test finds out: how faithful explanations are, how legible, and the single errors.

    Args:
        options: of the evaluation.
        groups: names of the test's files.
        attributes: names of what is known of the documents.
    """

    def __init__(
        self, options: EvaluationOptions, groups: Sequence[str], attributes: Sequence[str]
    ) -> None:
        super().__init__()
        self.fidelity = FidelityTable(row_names(options), groups)
        each = [Legibility(attributes) for _ in self.fidelity.groups]
        self.legibility, self.errors = nn.ModuleList(each), SampleErrors()

    def add(self, case: Case) -> Tensor:
        """Add one batch; return the error of each sample [B]."""
        self.fidelity.update(fidelities(case), case.batch)
        weights = self.fidelity.weights(case.batch)
        for weight, legibility in zip(weights, self.legibility, strict=True):
            legibility.add(case, weight)
        error = case.error(case.rebuilt(case.greedy))
        self.errors.update(case.batch["sample_id"], error, case.batch["weight"])
        return error

    def legible(self) -> tuple[dict[str, Values], dict[str, dict[str, Values]]]:
        """Return group -> name -> value, and group -> attribute -> recall; a collective."""
        found = [legibility.computed() for legibility in self.legibility]
        values, attributes = zip(*found, strict=True)
        groups = self.fidelity.groups
        return (
            dict(zip(groups, values, strict=True)),
            dict(zip(groups, attributes, strict=True)),
        )
