"""LightningModules of the consistency lens (ActivationBatch) and of the dump (DumpBatch)."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from datamodules.activations.store import ActivationStore, one_thread
from datamodules.core.batches import ActivationBatch, DumpBatch, SubjectFacts
from datamodules.core.plan import check_range
from datamodules.core.planned import ModelFacts
from datamodules.files.splitting import TEST, TRAIN
from datamodules.text.prompts import prompt_tokens
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.pretrained import Recipe, check_recipe, most_positions
from lit_models.consistency_lens import controls
from lit_models.consistency_lens.lens import (
    AT_ONCE,
    NEVER,
    Lens,
    LensOptions,
    Reading,
    best_reading,
    index_of,
    stack,
    worth,
)
from lit_models.consistency_lens.loss import (
    MOST_SAMPLES,
    NUM_WRONG,
    LensLosses,
    TeacherText,
    TemperatureSchedule,
    check_phases,
    leaves_one_idle,
    lens_terms,
    text_nats,
    told_map,
    word_counts,
)
from lit_models.consistency_lens.subject import (
    TRAINED_ON,
    Subject,
    SubjectOptions,
    keep_layers,
    load_subject,
    subject_facts,
    subject_recipe,
    tokenizer_folder,
    training_digest,
)
from lit_models.training.exact import ExactModule, flops_per_position
from lit_models.training.metrics import LossSum, SampleResult, SumCount, evaluating, texts_for
from lit_models.training.optim import configured, parameter_groups
from lit_models.training.progress import budgeted_steps
from lit_models.training.sharding import local_parts, total_norm


class LitConsistencyLens(ExactModule):
    """Explains activations of a frozen model in words, and rebuilds them from only these words.

    Args:
        optimizer: factory; it has no default, so that a rate is always chosen in the YAML.
        subject: the model to explain, and the layer.
        layers: several layers for one lens to explain, instead of `subject.layer`.
        losses: weights of the loss terms over the run.
        lr_scheduler: factory; `None` keeps the rate constant.
        lens: shape of verbalizer and reconstructor.
        temperature: schedule for the choice of words.
        teacher: words of the teacher's text; by default the most recent ones.
        init_from: checkpoint to take weights from.
        best_of: number of explanations per activation in a prediction, the most probable words and
            random draws; the one that rebuilds the activation best is written.
        rates: part -> factor of the learning rate. A part is a prefix of parameter names in the
            lens, such as verbalizer, verbalizer.network or verbalizer.map (weights and biases); the
            longest matching prefix counts.
        clips: part -> maximum norm of the part's gradient, clipped separately; the trainer's
            gradient_clip_val then applies to all other parameters.
    """

    takes_half_weights: ClassVar[bool] = True
    recipe_key: ClassVar[str] = "lens_recipe"
    buffers_stand_still: ClassVar[bool] = True
    uneven_steps: ClassVar[tuple[str, ...]] = ("test_step",)  # needs unsharded weights

    def __init__(
        self,
        optimizer: OptimizerCallable,
        subject: SubjectOptions,
        losses: LensLosses,
        lr_scheduler: LRSchedulerCallable | None = None,
        lens: LensOptions | None = None,
        temperature: TemperatureSchedule | None = None,
        teacher: TeacherText | None = None,
        init_from: str | None = None,
        best_of: int = 1,
        rates: dict[str, float] | None = None,
        clips: dict[str, float] | None = None,
        layers: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_range("model", 1, best_of=best_of)
        self.best_of = best_of
        self.rates, self.clips = rates or {}, clips or {}
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.layers = sorted(set(layers or [subject.layer]))
        self.options, self.losses = replace(subject, layer=self.layers[-1]), losses
        self.lens_options = lens or LensOptions()
        self.temperature = temperature or TemperatureSchedule()
        self.teacher = teacher or TeacherText()
        self.teacher.check(self.lens_options.num_words)
        self.init_from = init_from
        self.reaches_all_parameters = not leaves_one_idle(losses)
        self.lens: Any = None  # a Lens once the recipe is known
        self.baselines: Any = None

    def blocks(self) -> list[nn.Module]:
        return self.lens.blocks()

    def flops(self, lengths: np.ndarray) -> float:
        """As in ExactModule; counts verbalizer and reconstructor on the words only."""
        parts = (self.lens.verbalizer, self.lens.reconstructor)
        return sum(map(flops_per_position, parts)) * len(lengths) * parts[0].num_words

    def own_callbacks(self) -> list[Callback]:
        return [*super().own_callbacks(), controls.ControlTable()]

    def model_facts(self) -> ModelFacts:
        facts, num_wrong = super().model_facts(), NUM_WRONG if self.losses.contrast.weight else 0
        options = {"controls": controls.CONTROLS, "num_wrong": num_wrong, "layers": self.layers}
        return replace(facts, tokenizer=tokenizer_folder(self.options), options=options)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The subject's tokenizer; available after `setup`."""
        return TextTokenizer.from_dict(self.recipe["tokenizer"])

    def setup(self, stage: str) -> None:
        """Extend a known recipe by the data that the lens continues with."""
        known = self.recipe
        super().setup(stage)
        if known is not None:
            self.recipe = self.recipe_of(self.trainer.datamodule, known)

    def recipe_of(self, data: Any, trained: Recipe | None) -> Recipe:
        """Return the recipe of a run. It identifies the subject by a digest, without its weights,
        which are always read from the subject's folder.

        Raises:
            FileNotFoundError: the subject's folder is missing.
            ValueError: the activations are of another subject or layer, documents or explanations
                are too long for the subject, or the checkpoint was trained with another subject.
        """
        store, lens = data.store, self.lens_options
        network = subject_recipe(self.options, store.tokenizer.vocab_size)
        check_recipe(network, data.context_length, store.tokenizer.vocab_size)
        limit = most_positions(network)
        # The verbalizer reads prompt, marker and all words but the last; the reconstructor, which
        # reads its start and all words, needs no more.
        needed = lens.num_prompt + lens.num_words
        needed += sum(map(len, lens.tokens_around(store.tokenizer)))
        if limit is not None and needed > limit:
            raise ValueError(
                f"explanations of lens.num_words {lens.num_words} after lens.num_prompt "
                f"{lens.num_prompt} need {needed} positions, and the subject has learnt {limit}; "
                "lower one of the two, cut lens.prompt, or take a subject with rotary positions."
            )
        facts = layer_facts(subject_facts(self.options, network), self.layers)
        is_without = self.is_training_run and not isinstance(store, ActivationStore)
        if self.losses.contrast.weight and is_without:
            raise ValueError(
                "losses.contrast takes wrong activations from a store; dump the activations and "
                "name it with data.activations, or leave losses.contrast out."
            )
        layers = [one.subject.layer for one in data.stores]
        if layers and (there := layer_facts(store.subject, layers)) != facts:
            raise ValueError(
                f"{store.folder} holds activations of another subject "
                f"({differences(there, facts, 'there', 'here')}); name the model that was dumped "
                "with model.subject.path and its layer with model.subject.layer (several stores' "
                "with model.layers), or dump the activations of this one."
            )
        recipe = {
            "tokenizer": store.tokenizer.to_dict(),
            "network": network,
            "subject": facts,
            "lens": asdict(lens),
            TRAINED_ON: [training_digest(store.stream(TRAIN).hashes)],
        }
        return continued(trained, recipe, self.trainer)

    def build(self, recipe: Recipe, data: Any) -> None:
        tokenizer = TextTokenizer.from_dict(recipe["tokenizer"])
        network = load_subject(self.options, recipe["network"])
        subject = Subject(network.to(torch.get_default_dtype()), *self.layers)
        self.lens = Lens(subject, tokenizer, LensOptions(**recipe["lens"]))
        leave_subject_out(self)
        self.val_loss, self.val_fve = SumCount(), controls.Explained()
        each = [controls.Explained() for _ in self.layers if len(self.layers) > 1]
        self.val_layers = nn.ModuleList(each)

    def prepare(self, data: Any, is_new: bool) -> None:
        """Set the statistics of the data, the baselines and the tables of controls."""
        if self.baselines is None:
            places = range(len(self.layers))
            statistics = [data.statistics(index, self.lens.activation) for index in places]
            if is_new:  # else the checkpoint holds the mean of its training data
                self.lens.mean.copy_(stack([torch.from_numpy(one.mean) for one in statistics]))
                self.lens.variance.copy_(stack([torch.tensor(one.variance) for one in statistics]))
            self.lens.token_counts.copy_(word_counts(data, self.lens.verbalizer.is_word))
            if self.teacher.told:
                samples = [data.training_sample(MOST_SAMPLES, index) for index in places]
                self.lens.told_map = stack([told_map(self.lens, one) for one in samples])
            size = len(self.lens.token_counts)
            self.baselines = nn.ModuleList(controls.Baselines(one, size) for one in statistics)
            tested = data.facts(TEST)
            rows, groups = list(controls.ROWS), tested.group_names
            self.fidelity = controls.FidelityTable(rows, groups, self.layers)
            self.legibility = controls.Legibility(tested.names, self.fidelity.groups)

    def adapted_weights(self, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
        """Return another run's weights with the mean and variance of this run's data."""
        self.take_recipe(self.stored_recipe(checkpoint))
        own = {"lens.mean": self.lens.mean, "lens.variance": self.lens.variance}
        return {**checkpoint["state_dict"], **own}

    def on_fit_start(self) -> None:
        """Silence Lightning's warning about eval mode for exactly the frozen networks."""
        number = sum(not part.training for part in self.modules())
        message = rf"Found {number} module\(s\) in eval mode at the start of training"
        warnings.filterwarnings("ignore", message=message)

    def on_train_batch_start(self, batch: ActivationBatch, batch_idx: int) -> None:
        """Copy both networks as reference when they begin to learn together."""
        step = self.trainer.global_step
        if step == self.losses.joint_start and not batch_idx % self.trainer.accumulate_grad_batches:
            self.lens.keep_reference(step if step or self.init_from else NEVER)

    def training_terms(self, batch: ActivationBatch) -> dict[str, LossSum]:
        step, weight = self.trainer.global_step, batch["weight"]
        names, activation = set(self.losses.at(step)), self.lens.activation(batch)
        temperature = self.temperature.at(step)
        terms = lens_terms(self.lens, batch, activation, names, temperature, self.teacher)
        return {n: LossSum.of(v, weight) for n, v in terms.items()}

    def term_weights(self) -> dict[str, float]:
        return self.losses.at(self.trainer.global_step)

    def on_after_backward(self) -> None:
        """Drop the gradients of networks that are still frozen, so that no optimizer changes these
        by momentum or weight decay, and no gradient norm includes them."""
        for name in ("verbalizer", "reconstructor"):
            if self.trainer.global_step < getattr(self.lens.options, name).unfreeze_at:
                for parameter in getattr(self.lens, name).network.parameters():
                    parameter.grad = None

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        clipping = (gradient_clip_val, gradient_clip_algorithm)
        if not self.clips:
            return super().configure_gradient_clipping(optimizer, *clipping)
        if gradient_clip_algorithm == "value":
            raise ValueError("model.clips are norms: drop them, or gradient_clip_algorithm=value.")
        self.step_record.gradient_norm(optimizer)  # records the total norm before clipping
        clip_parts(self.named_parameters(), self.clips, gradient_clip_val)

    def validation_step(self, batch: ActivationBatch, batch_idx: int) -> None:
        case, weight = self._case(batch), batch["weight"]
        error = case.error(case.rebuilt(case.greedy)) * weight
        spread = case.error(case.mean) * weight
        self.val_loss.update(error, weight)
        self.val_fve.update(error, spread)
        self.log_dict({"val/loss": self.val_loss, "val/fve": self.val_fve}, on_epoch=True)
        for index, metric in enumerate(self.val_layers):
            metric.update(error * (batch["layer"] == index), spread * (batch["layer"] == index))
            self.log(f"val/layer/{self.layers[index]}/fve", metric, on_epoch=True)

    def fit_tuned_lens(self, data: Any) -> None:
        """Fit the tuned lens's affine maps once, on documents of the training part."""
        for index, one in enumerate(self.baselines):
            if one.tuned is None:
                sample = data.training_sample(controls.NUM_DOCUMENTS)
                one.tuned = controls.tuned_map(self.lens.subject, sample, index)

    def test_step(self, batch: ActivationBatch, batch_idx: int) -> SampleResult:
        self.fit_tuned_lens(self.trainer.datamodule)  # in a step, as only there weights are whole
        case = self._case(batch)
        texts = (case.greedy.token_ids, case.shuffled.token_ids)
        nats = text_nats(self.lens.language_logits(texts[0]), texts[0])
        self.fidelity.update(case.fidelities(), batch)
        self.legibility.update(nats, texts, batch["attributes"], self.fidelity.members(batch))
        return SampleResult(case.error(case.rebuilt(case.greedy)), {"explanation": texts[0]})

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        return {name: self.tokenizer.decode([int(i) for i in ids]) for name, ids in answers.items()}

    def predict_step(
        self, batch: ActivationBatch, batch_idx: int, with_salience: bool = False
    ) -> dict[str, Tensor]:
        case = self._case(batch)
        salience = {"salience": case.salience} if with_salience else {}
        return {**case.predictions(), **salience}

    def explain(self, given: Sequence[str] | Tensor, layer: int | None = None) -> list[str]:
        """Return an explanation of each activation as text.

        Args:
            given: texts, to explain the activation at their last token; or activations [n, D] of
                the subject's layer.
            layer: of the subject; needed if the lens explains several.

        Raises:
            ValueError: the lens does not explain this layer, or activations have another width or
                are not finite.
        """
        index, are_texts = index_of(self.layers, layer), not isinstance(given, Tensor)
        given = texts_for(self, given) if are_texts else given
        if len(given) == 0:
            return []
        with evaluating(self), torch.no_grad():
            if are_texts:
                tokens = prompt_tokens(self.tokenizer, given)
                rows = [torch.tensor([ids], device=self.device) for ids in tokens]
                given = torch.cat([self.lens.subject.of_layers(ids)[index][:, -1] for ids in rows])
            elif given.shape[1:] != (width := self.lens.mean.shape[-1:]):
                raise ValueError(
                    f"activations must be [n, {width[0]}], as the lens's subject has them, got "
                    f"{list(given.shape)}."
                )
            elif not given.isfinite().all():
                raise ValueError("activations must be finite, and some are nan or infinite.")
            layers = self.lens.rows_of(index, len(given))
            words = self.lens.verbalizer.explain(given.to(self.lens.mean), layer=layers).token_ids
        return [self.tokenizer.decode(ids) for ids in words.tolist()]

    @torch.no_grad()
    def readings(
        self,
        texts: Sequence[str],
        position: int | None = -1,
        best_of: int = 1,
        layer: int | None = None,
    ) -> list[list[Reading]]:
        """Return the readings of each text, by position and then by layer.

        Args:
            texts: documents.
            position: of the token whose activation to read, -1 for the last; `None` reads all.
            best_of: number of explanations from which the one that rebuilds best is taken.
            layer: of the subject; `None` reads all of the lens's layers.

        Raises:
            ValueError: a position or a layer does not exist, or `best_of` is below 1.
        """
        check_range("readings", 1, best_of=best_of)
        texts = texts_for(self, texts)
        of_texts, lens, tokenizer, layers = [], self.lens, self.tokenizer, self.layers
        indices = range(len(layers)) if layer is None else [index_of(layers, layer)]
        with evaluating(self):
            for text, ids in zip(texts, prompt_tokens(tokenizer, texts), strict=True):
                length = len(ids)
                if position is not None and not -length <= position < length:
                    raise ValueError(
                        f"position {position} is none of the {length} tokens of {text[:40]!r}; "
                        f"give one from 0 to {length - 1} (or from the end, -1 to {-length}), or "
                        "None for all of them."
                    )
                places = range(length) if position is None else [position % length]
                hidden = lens.subject.of_layers(torch.tensor([ids], device=self.device))
                of_text: list[Reading] = []
                pairs = torch.tensor([*product(places, indices)], device=self.device)
                for place, index in (some.unbind(1) for some in pairs.split(AT_ONCE)):
                    true = torch.stack(hidden)[index, 0, place].to(lens.mean.dtype)  # [B, D]
                    row_layer = index if len(layers) > 1 else None
                    best = best_reading(lens, true, place, best_of, row_layer)
                    columns = (place, index, best.token_ids, *worth(lens, true, best, row_layer))
                    rows = zip(*map(Tensor.tolist, columns), strict=True)
                    for at, which, words, sure, cosine, fve in rows:
                        token = tokenizer.decode_continuation([ids[at]], skip_special_tokens=False)
                        reading = (token, tokenizer.decode(words), sure, cosine, fve)
                        of_text.append(Reading(at, *reading, layers[which]))
                of_texts.append(of_text)
        return of_texts

    def configure_optimizers(self) -> Any:
        check_phases(self.losses, budgeted_steps(self.trainer))
        check_parts(self, "model.rates", self.rates)
        check_parts(self, "model.clips", self.clips)
        groups = parameter_groups(self, by_beginning(self.rates))
        return configured(self, self.optimizer(groups), self.lr_scheduler)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the lens on the subject of its training; refuse any other subject."""
        if self.recipe is None:
            recipe, path = self.stored_recipe(checkpoint), self.options.path
            if path is not None and not Path(path).expanduser().is_dir():
                raise FileNotFoundError(
                    f"this lens explains the model in {path}, which is not there, and a lens holds "
                    "no copy of it; put the folder back, or name its new place with "
                    "model.subject.path."
                )
            size = TextTokenizer.from_dict(recipe["tokenizer"]).vocab_size
            network = subject_recipe(self.options, size)
            facts = layer_facts(subject_facts(self.options, network), self.layers)
            if changed := differences(recipe["subject"], facts, "then", "now"):
                raise ValueError(
                    f"{path or 'model.subject'} is another subject than this lens was trained with "
                    f"({changed}); give the model and the layer of its training with "
                    "model.subject, or several layers with model.layers."
                )
        super().on_load_checkpoint(checkpoint)

    def take_recipe(self, trained: Recipe) -> None:
        self.recipe = continued(trained, self.recipe, self._trainer)

    @torch.no_grad()
    def reading(self, data: Any, text: str, place: int, spread: float) -> Any:
        """Return name -> text of the explanation and of three samples at temperature `spread` for
        the activation of the last layer at a token (`place` -1: the last); and name -> FVE of the
        activations rebuilt from these and by the rows of `controls`, for which the data's test part
        provides another activation."""
        data.model = self.model_facts()
        data.setup("test")
        self.prepare(data, False)
        self.fit_tuned_lens(data)
        ids = torch.tensor(prompt_tokens(self.tokenizer, [text]))
        batch: Any = data.datasets["test"].batch(np.array([len(self.layers) - 1]), 0)
        batch |= {"input_ids": ids, "position": torch.tensor([place % ids.shape[1]])}
        batch.pop("activation", None)
        case = self._case(self.transfer_batch_to_device(batch, self.device, 0))
        explained = {"explanation": case.greedy}
        explain = partial(self.lens.verbalizer.explain, layer=case.layer)
        for number, key in enumerate(torch.arange(3, device=self.device).split(1), 1):
            explained[f"sample {number}"] = explain(case.activation, key, spread=spread)
        ways = {name: partial(case.rebuilt, one) for name, one in explained.items()} | case.rows()
        whole = case.error(case.mean)
        fve = {name: float(1 - case.error(rebuild()) / whole) for name, rebuild in ways.items()}
        ids = {name: one.token_ids[0].tolist() for name, one in explained.items()}
        return {name: self.tokenizer.decode(ids[name]) for name in explained}, fve

    def _case(self, batch: ActivationBatch) -> controls.Case:
        own, other = self.lens.activation(batch), batch.get("other")
        pair = (own, own if other is None else self.lens.activation(other))
        return controls.Case(self.lens, self.baselines, batch, *pair, self.teacher, self.best_of)


def layer_facts(subject: SubjectFacts, layers: Sequence[int]) -> dict[str, Any]:
    """Return a lens's facts of its subject; `layer` is a list if there are several."""
    return {**asdict(subject), "layer": layers[0] if len(layers) == 1 else [*layers]}


def differences(first: Recipe, second: Recipe, one: str, other: str) -> str:
    """Return a text with the values in which two recipes differ, for an error message."""
    changed = [n for n in first if first[n] != second[n]]
    return "; ".join(f"{n}: {first[n]} {one}, {second[n]} {other}" for n in changed)


def continued(trained: Recipe | None, recipe: Recipe, trainer: Trainer | None) -> Recipe:
    """Return the recipe of a run that continues from a checkpoint: it keeps the digests of that
    run's training documents and, in a fit, adds those of its own.

    Raises:
        ValueError: subject, layer, tokenizer or the lens's shape differ, so that the checkpoint's
            words would have another meaning.
    """
    if trained is None:
        return recipe
    # Recipes of earlier versions may lack options, which then have their defaults.
    trained = {**trained, "lens": asdict(LensOptions(**trained.get("lens", {})))}
    changed = [name for name in recipe if name != TRAINED_ON and trained.get(name) != recipe[name]]
    if changed:
        raise ValueError(
            f"the checkpoint was trained with another {' and '.join(changed)} than this run has; "
            "give the model.subject, model.lens and data of its training, or begin a new run."
        )
    known = trained[TRAINED_ON]
    if trainer is not None and trainer.state.fn == "fit":
        known = known + recipe[TRAINED_ON]
    return {**recipe, TRAINED_ON: list(dict.fromkeys(known))}


def leave_subject_out(module: LitConsistencyLens) -> None:
    """Exclude the subject's parameters and buffers, by their exact names, from a state dict.

    Loading a state dict requires all other entries, and does not change the subject.
    """
    lens = module.lens
    own = {id(weight) for part in (lens.subject, lens.untrained) for weight in part.parameters()}
    stored, frozen = lens.state_dict(keep_vars=True), ("subject.", "untrained.")
    names = {f"lens.{n}" for n, value in stored.items() if id(value) in own or n.startswith(frozen)}
    module.register_state_dict_post_hook(partial(_forget, names))
    module.register_load_state_dict_pre_hook(partial(_remember, names))


def _forget(names: set[str], owner: nn.Module, content: Any, prefix: str, _: Any) -> None:
    for name in names:
        content.pop(prefix + name, None)


def _remember(names: set[str], owner: nn.Module, content: Any, prefix: str, *_: Any) -> None:
    held = dict(owner.named_parameters(remove_duplicate=False)) | dict(owner.named_buffers())
    for name in names & held.keys():
        content.setdefault(prefix + name, held[name].detach())


def check_parts(module: nn.Module, option: str, values: Mapping[str, float]) -> None:
    """Raise ValueError for a value below 0, or a part without trainable parameters."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    for part, value in values.items():
        if value < 0 or not any(name.startswith(f"lens.{part}") for name in names):
            tops = sorted({".".join(name.removeprefix("lens.").split(".")[:2]) for name in names})
            raise ValueError(
                f"{option}.{part} {value} must be 0 or more, for a part of the lens that is "
                f"trained; name verbalizer, reconstructor, or one of {', '.join(tops)}."
            )


def by_beginning(values: Mapping[str, float]) -> dict[str, float]:
    """Return prefix of parameter names -> value of the part, longest prefix first."""
    parts = sorted(values, key=len, reverse=True)
    return {f"lens.{part}": values[part] for part in parts}


def clip_parts(
    named: Iterable[tuple[str, nn.Parameter]], norms: Mapping[str, float], others: float | None
) -> None:
    """Clip the gradient of each part to its norm, and that of all other parameters together to
    `others`, unless it is 0 or `None`. Sharded parameters take one collective per part."""
    of_part, gradients = by_beginning(norms), dict[str, list[Tensor]]()
    for name, parameter in named:
        if parameter.grad is not None:
            part = next((begin for begin in of_part if name.startswith(begin)), "")
            gradients.setdefault(part, []).append(parameter.grad)
    for part, grads in gradients.items():
        if most := of_part.get(part, others or 0.0):
            scale = (most / (total_norm(grads) + 1e-6)).clamp(max=1.0)
            for grad in local_parts(grads):
                grad.mul_(scale.to(grad))


class LitSubject(ExactModule):
    """Dump: reads documents and returns activations at the batch's positions.

    Blocks above the layer are removed, as they do not affect it. On a CPU each process uses one
    thread, as the number of threads changes the last bits; the number of devices does not.

    Args:
        subject: the model and the layer.
        layers: several layers to dump in one pass instead of `subject.layer`, each into a store
            (layer-0 and so on) in the output's folder.
    """

    def __init__(self, subject: SubjectOptions, layers: list[int] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = sorted(set(layers or [subject.layer]))
        self.options = replace(subject, layer=self.layers[-1])
        self.is_several = layers is not None
        self.subject: Any = None
        self.recipe = None  # there is no checkpoint

    def blocks(self) -> list[nn.Module]:
        return self.subject.network.blocks()

    def model_facts(self) -> ModelFacts:
        options: dict[str, Any] = {"layers": self.layers if self.is_several else None}
        if self.recipe is not None:
            options["subject"] = SubjectFacts(**self.recipe["subject"])
        return ModelFacts(tokenizer=tokenizer_folder(self.options), options=options)

    def recipe_of(self, data: Any, trained: Recipe | None) -> Recipe:
        vocab_size = data.store.tokenizer.vocab_size
        network = subject_recipe(self.options, vocab_size)
        check_recipe(network, data.context_length, vocab_size)
        return {"network": network, "subject": asdict(subject_facts(self.options, network))}

    def build(self, recipe: Recipe, data: Any) -> None:
        network = load_subject(self.options, recipe["network"])
        self.subject = Subject(network, *self.layers)
        keep_layers(network, self.options.layer + 1)

    def predict_step(self, batch: DumpBatch, batch_idx: int) -> dict[str, Tensor]:
        ids, places = batch["input_ids"], batch["positions"].clamp(min=0)
        with one_thread():
            hidden = self.subject.of_layers(ids)  # [R, T, D] each
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        names = [f"activations-{n}" if self.is_several else "activations" for n in self.layers]
        return {name: one[rows, places] for name, one in zip(names, hidden, strict=True)}

    def configure_optimizers(self) -> Any:
        """Raise ValueError, as the subject cannot be trained."""
        raise ValueError("a subject is frozen and cannot be trained; run unisono predict.")
