"""ExactModule: a LightningModule with the gradient of one big batch on any number of devices.

DDP averages gradients over ranks and Lightning divides the loss by the number of accumulated
micro-batches. `exact_mean` undoes both, and divides by the target counts of the whole optimizer
step. The plan knows these counts in advance and every batch carries them: no communication.
"""

import atexit
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import instantiate_module
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from datamodules.core.planned import ModelFacts, PlannedDataModule
from datamodules.core.store import digest_of
from lit_models.run_files import Layout, class_of, read_checkpoint
from lit_models.training import checkpoints
from lit_models.training.faults import FailureReport, NonFinite
from lit_models.training.hyperparameters import StoredClasses, known_arguments, plain_values
from lit_models.training.ledger import Ledger, StepRecord, agree
from lit_models.training.memory import Rehearsal
from lit_models.training.metrics import LossSum, float32_on, in_float32
from lit_models.training.optim import AveragedWeights, follow_rates, gradients
from lit_models.training.progress import check_trainer
from lit_models.training.run import RunFolder
from lit_models.training.sharding import TensorSplit, local_parts
from lit_models.training.strategies import EVALUATION_STEPS, leave_group


class ExactModule(LightningModule):
    """A LightningModule whose losses are sums and counts over a planned optimizer step.

    A family calls `save_hyperparameters()` in its constructor, returns the plain values that define
    its network from `recipe_of`, creates it in `build`, and returns the sums of its loss from
    `training_terms`. A checkpoint stores this recipe: its network can be built without the data.

    Attributes:
        recipe_key: checkpoint key of the recipe; empty if the network needs no recipe.
        learnt_facts: recipe keys whose values training determines.
        settled_options: constructor arguments that an evaluation takes from the checkpoint; the
            command line refuses to change them.
        init_from: checkpoint whose weights a new network starts from.
        recipe: plain values that define the network; `None` until they are known.
        early_weights: weights trained by spawned processes, kept until the network is built here.
        late_weights: names and values of `meta` parameters, loaded by strategies with `fills_late`.
    """

    monitor: ClassVar[str] = "val/loss"
    monitor_mode: ClassVar[str] = "min"
    # Commands whose metrics the family prints in a table of its own, instead of the command line's.
    tables_of: ClassVar[tuple[str, ...]] = ()
    # Whether every rank calls each block equally often in a training step.
    calls_blocks_evenly: ClassVar[bool] = True
    # Evaluation steps where these numbers may differ, as in generation: fsdp gathers all blocks.
    uneven_steps: ClassVar[tuple[str, ...]] = EVALUATION_STEPS
    # Whether every training step gives every trainable parameter a gradient.
    reaches_all_parameters: bool = True
    # Whether buffers stay constant in training: ddp sends rank 0's once, not at every forward.
    buffers_stand_still: ClassVar[bool] = False
    # Whether the network accepts bfloat16 weights with float32 batches and float32 losses.
    takes_half_weights: ClassVar[bool] = False
    # Whether a step may be split into micro-batches: false where the loss couples its samples.
    may_accumulate: ClassVar[bool] = True
    recipe_key: ClassVar[str] = ""
    learnt_facts: ClassVar[tuple[str, ...]] = ()
    settled_options: ClassVar[tuple[str, ...]] = ()
    init_from: str | None = None
    init_from_part: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.step_record = StepRecord()
        self.averages_replicas = True  # false where a callback sums their gradients instead
        self.recipe: Any = None if self.recipe_key else {}
        self.is_built = False
        self._trained_recipe: dict[str, Any] | None = None  # from the trainer's checkpoint
        self.early_weights: dict[str, Any] | None = None
        self.late_weights: list[Iterable[tuple[str, Tensor]]] = []

    def save_hyperparameters(self, *args: Any, **options: Any) -> None:
        """Keep the constructor's arguments as plain JSON, so that checkpoints load safely."""
        options.setdefault("frame", inspect.currentframe().f_back)
        super().save_hyperparameters(*args, **options)
        options.pop("ignore", None)
        super().save_hyperparameters(plain_values(dict(self.hparams)), **options)

    def blocks(self) -> list[nn.Module]:
        """Return the network's repeated layers, which `fsdp` shards one by one; a block with entry
        points other than `forward` lists these methods in `forward_methods`."""
        return []

    def tensor_plan(self) -> dict[str, TensorSplit]:
        """Return how a tensor group may split the layers: name pattern -> split."""
        network = getattr(self, "network", None)
        plan = network.tensor_plan() if hasattr(network, "tensor_plan") else {}
        return {f"network.{name}": split for name, split in plan.items()}

    def flops(self, lengths: np.ndarray) -> float:
        """Return the FLOP of training on documents with these numbers of positions [n]; a family
        whose network sees other positions than the plan counts overrides it."""
        return flops_per_position(self) * float(lengths.sum())

    def own_callbacks(self) -> list[Callback]:
        """Return the callbacks that every run of this module has; a family may extend them."""
        own: list[Callback] = [RunFolder(), Ledger(), Rehearsal()]
        if self.trainer.state.fn == "fit":
            own += [NonFinite(), FailureReport()]
            # No checkpoint callback at all means that the script passed enable_checkpointing=False.
            own += [checkpoints.LastCheckpoint()] if self.trainer.checkpoint_callbacks else []
        return own

    def configure_callbacks(self) -> list[Callback]:
        """Add those of `own_callbacks` that the trainer lacks, so that scripts have them too."""
        follows_plan(self, self.trainer.datamodule)
        if self.trainer.state.fn == "fit":
            check_trainer(self.trainer)
        # Lightning calls this hook first, before the data are read.
        self._trained_recipe = None
        path = self.trainer.ckpt_path
        if self.recipe is None and path is not None:
            content = read_checkpoint(path, mmap=True, every_byte=False)
            self._trained_recipe = self.stored_recipe(content)
        self.trainer.datamodule.model = self.model_facts()
        # RunFolder and Ledger run first, so that what a script's callbacks write (a checkpoint, a
        # stop reason) lands in this run's folder and refers to a step that the ledger has recorded.
        present, is_first = self.trainer.callbacks, (RunFolder, Ledger)
        present += missing_kinds(self.own_callbacks(), present)
        present.sort(key=lambda c: (not isinstance(c, is_first), isinstance(c, Checkpoint)))
        present.sort(key=lambda c: isinstance(c, checkpoints.LastCheckpoint))  # saves all states
        return []

    def setup(self, stage: str) -> None:
        """Give each process its own metric states; an override calls `super().setup` first.

        `ddp_spawn` passes the module through shared memory. Lightning then copies parameters and
        buffers, but not metric states: two ranks would update the same tensors in place.
        """
        for metric in (part for part in self.modules() if isinstance(part, Metric)):
            metric.reset()
        self.step_record = StepRecord()  # an earlier call may have failed in the middle of a step
        if self._trainer is None:
            return
        strategy = self.trainer.strategy
        if type(strategy.checkpoint_io) is TorchCheckpointIO:  # the user chose no other
            strategy.checkpoint_io = checkpoints.AtomicCheckpointIO()
        atexit.register(leave_group)  # Lightning's own strategies do not register it
        accumulation, clip = self.trainer.accumulate_grad_batches, self.trainer.gradient_clip_val
        if stage == "fit" and accumulation > 1 and not self.may_accumulate:
            raise ValueError(
                f"the step is cut into {accumulation} micro-batches, but the loss of "
                f"{type(self).__name__} couples all samples of a step. Leave "
                "data.micro_batch_size and trainer.accumulate_grad_batches out, and save memory "
                "inside the step (encode_chunk of a retriever), or lower data.global_batch_size."
            )
        if clip is not None and not clip >= 0:
            raise ValueError(
                f"trainer.gradient_clip_val must be 0 or more, got {clip}: every step would go "
                "uphill. 1.0 is usual; 0 or null clips nothing."
            )
        if self.recipe is None:
            self.recipe = self.recipe_of(self.trainer.datamodule, self._trained_recipe)
            self.trainer.datamodule.model = self.model_facts()
        elif stage == "fit" and getattr(self.trainer.datamodule, "recipe", None) is not None:
            self.check_meanings(self.trainer.datamodule.recipe)

    def model_facts(self) -> ModelFacts:
        """Return the facts of this module that its datamodule needs."""
        return ModelFacts(self._trained_recipe if self.recipe is None else self.recipe)

    def recipe_of(self, data: Any, trained: dict[str, Any] | None) -> dict[str, Any]:
        """Return the plain values that define the network.

        Args:
            data: the datamodule after its `setup`.
            trained: recipe in the trainer's checkpoint; `None` without a checkpoint.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement recipe_of.")

    def meanings(self, recipe: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a recipe that define what the integers in a batch stand for, such as
        a code book; empty by default."""
        return {}

    def check_meanings(self, recipe: dict[str, Any]) -> None:
        """Refuse to train on data that were encoded with a different recipe.

        Raises:
            ValueError: the recipes of module and data differ in their `meanings`.
        """
        own, other = self.meanings(self.recipe), self.meanings(recipe)
        if changed := [n for n in own if digest_of(own[n]) != digest_of(other.get(n))]:
            raise ValueError(
                f"this {type(self).__name__} was made for another {' and '.join(changed)} than the "
                "data has, so that the same numbers mean something else: train a new module "
                "(init_from takes weights), or give it the data it was made for."
            )

    def build(self, recipe: dict[str, Any], data: Any) -> None:
        """Create the network, and the metrics that depend on it; does nothing by default.

        Args:
            recipe: defines the network; facts that only building reveals are added to it.
            data: the datamodule if the network is new; `None` if a checkpoint has all weights.
        """

    def prepare(self, data: Any, is_new: bool) -> None:
        """Prepare the built network for a call of the trainer; does nothing by default.

        Args:
            data: the datamodule after its `setup`.
            is_new: whether this call starts the training of the network.
        """

    def configure_model(self) -> None:
        """Build the network once its recipe is known; a family overrides `build` instead.

        Lightning calls it with the GPU as default device under one device and ddp, the host under
        fsdp, and in the run's precision: one seed would give different initial weights. So the
        network is built in float32 on the host, then converted, and moved by the strategy.
        """
        if self.recipe is None:
            return
        data = self.trainer.datamodule if self._trainer is not None else None
        dtype = torch.get_default_dtype()  # not float32 under 64-true, 16-true or bf16-true
        is_new = False
        with float32_on("cpu"):
            if not self.is_built:
                weights, self.early_weights = self.early_weights, None
                is_new = data is not None and weights is None and self.trainer.ckpt_path is None
                self.build(self.recipe, data if is_new else None)
                self.is_built = True
                self._convert(dtype)
                if weights is not None:
                    self.load_state_dict(weights)
                elif is_new and self.init_from is not None:
                    checkpoints.load_part(self, self.init_from, self.init_from_part)
            if data is not None:
                self.prepare(data, is_new)
        self._convert(dtype)

    def _convert(self, dtype: torch.dtype) -> None:
        if dtype != torch.float32:  # under float32 the base of an adapter may stay in fewer bits
            self.to(dtype)

    def on_predict_start(self) -> None:
        """Refuse weights that are not finite, on all ranks: every answer would be NaN."""
        parts = {n: local_parts([p])[0] for n, p in self.named_parameters()}
        wrong = next((n for n, v in parts.items() if not (v.is_meta or v.isfinite().all())), "")
        # With sharded weights the value may be on one rank only.
        if not self.trainer.strategy.reduce_boolean_decision(not wrong, all=True):
            raise ValueError(
                f"the weights {wrong or 'of another rank'} hold values that are not finite (nan or "
                "infinite), so that answers would be nan; use a checkpoint from before them, such "
                "as another one of that run's folder."
            )

    on_test_start = on_predict_start

    def training_terms(self, batch: Any) -> dict[str, LossSum]:
        """Return each term of the training loss as total and count over samples of weight 1."""
        raise NotImplementedError(f"{type(self).__name__} must implement training_terms(batch).")

    def term_weights(self) -> dict[str, float]:
        """Return term -> factor in the loss, 1 if absent; a term with factor 0 is only reported."""
        return {}

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        """Return one sample's `SampleResult.answers` as readable text, by name."""
        return {name: " ".join(f"{v:g}" for v in values) for name, values in answers.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.exact_mean(self.training_terms(batch), batch)

    def exact_mean(self, terms: dict[str, LossSum], batch: dict[str, Any]) -> Tensor:
        """Return the loss to back-propagate: this micro-batch's share of the step's mean loss, with
        terms weighted by `term_weights`.

        Args:
            terms: name -> total and count over the samples of weight 1 in this micro-batch.
            batch: a planned batch; its `step_denominators` have the same names.

        Raises:
            KeyError: the batch lacks a term.
        """
        share = share_of_step(terms, batch, self.term_weights())
        self.step_record.add(batch["sample_id"], batch["weight"], terms, share)
        # A loss that is not finite can have finite gradients, and the other ranks would not notice.
        # This factor is 1, or NaN for such a loss: the NaN reaches all ranks with the gradients.
        finite_or_nan = share.detach() * 0 + 1
        sampler = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replicas = sampler.get("num_replicas", 1) if self.averages_replicas else 1
        return share * finite_or_nan * (replicas * self.trainer.accumulate_grad_batches)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm already computed for the ledger, or by value as Lightning does."""
        norm = self.step_record.gradient_norm(optimizer)
        if not gradient_clip_val or norm is None or gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        holders = []  # stand-ins for parameters, with local gradients; none in a skipped step
        for part in local_parts(gradients(optimizer)):
            holder = part.detach()
            holder.grad = part
            holders.append(holder)
        nn.utils.clip_grads_with_norm_(holders, float(gradient_clip_val), norm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a schedule, based on the rates that this run configures, not a checkpoint's."""
        follow_rates(scheduler)
        super().lr_scheduler_step(scheduler, metric)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if only the checkpoint knows its recipe, else take its learnt facts;
        outside of `fit` also take its averaged weights, if it has any."""
        if self._trainer is not None:
            step, ledger = checkpoint.get("global_step"), checkpoint.get("ledger")
            own = f"{self.trainer.ckpt_path} of step {step}, ledger {ledger}"
            agree("checkpoints", own, "copy it again, or start a little later")
        trained = self.stored_recipe(checkpoint)
        if not self.is_training_run:
            checkpoints.take_averaged(checkpoint)
        elif "optimizer_states" not in checkpoint:
            raise ValueError(
                f"{self.trainer.ckpt_path} holds weights only, and a run resumes from its position "
                "and optimizer state too: begin a new run from the weights with --model.init_from."
            )
        if self.recipe is None:
            self.recipe = trained
            self.configure_model()
        else:
            self.take_recipe(trained)

    @property
    def is_training_run(self) -> bool:
        """Whether a trainer is fitting this module."""
        return self._trainer is not None and self.trainer.state.fn == "fit"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.recipe_key:
            checkpoint[self.recipe_key] = self.recipe
        if "callbacks" not in checkpoint:  # Lightning calls none of them for weights only
            for callback in self.trainer.callbacks:
                if isinstance(callback, Ledger | AveragedWeights):
                    callback.on_save_checkpoint(self.trainer, self, checkpoint)

    @classmethod
    def stored_recipe(cls, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the recipe of a checkpoint; ValueError if it belongs to another family."""
        if cls.recipe_key and cls.recipe_key not in checkpoint:
            raise ValueError(
                f"the checkpoint is of another family: it holds no {cls.recipe_key}; give one of "
                f"{cls.__name__}."
            )
        return checkpoint[cls.recipe_key] if cls.recipe_key else {}

    def take_recipe(self, trained: dict[str, Any]) -> None:
        """Copy the `learnt_facts` of a checkpoint's recipe into that of the built network.

        Raises:
            ValueError: the data were encoded with a different recipe.
        """
        if self.is_training_run:
            self.check_meanings(trained)
        fixed = [name for name in self.recipe if name not in self.learnt_facts]
        other = [n for n in fixed if digest_of(self.recipe[n]) != digest_of(trained.get(n))]
        if other and not self.is_training_run:
            raise ValueError(
                f"the data were read with another {' and '.join(other)} than the checkpoint's: in "
                "a script set trainer.ckpt_path = path before the call, or load the module with "
                f"{type(self).__name__}.load_from_checkpoint(path)."
            )
        self.recipe |= {name: trained[name] for name in self.learnt_facts if name in trained}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights, or keep them until the network is built: after `ddp_spawn` the parent
        process gets its children's weights without having built the network."""
        if state_dict and next(self.parameters(), None) is None:
            self.early_weights = dict(state_dict)
            return super().load_state_dict({}, strict=False)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: torch.device | str = "cpu",
        *,
        trust_checkpoint: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Return the module stored in a checkpoint or in a folder that `unisono export` wrote.

        Args:
            checkpoint_path: a file or a folder.
            map_location: device to put the module on.
            trust_checkpoint: instantiate any class that the checkpoint names, whatever its origin.
            kwargs: constructor arguments that replace stored ones.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            ValueError: it is damaged, names a class that is not allowed, or holds a module of
                another class or another version of the code.
        """
        checkpoints.SAVES.settle()  # the checkpoint may still be in the making
        path, classes = checkpoint_path, StoredClasses(trust_checkpoint)
        content = read_checkpoint(path, mmap=True, classes=classes)
        values = dict(content.get("hyper_parameters", {}))
        class_path, _ = values.pop("_class_path", None), values.pop("_instantiator", None)
        kind = cls if class_path is None else class_of(class_path, path, classes)
        if not issubclass(kind, cls):
            raise ValueError(
                f"{path} holds a {kind.__name__}, not a {cls.__name__}; load it by its own class."
            )
        kind.stored_recipe(content)  # raises for another family, before an option is blamed below
        values, gone, _ = known_arguments(kind, values)
        if gone:
            rank_zero_warn(f"{path} is of another version, whose {', '.join(gone)} has no effect.")
        classes.check(path, kind, values)
        module = instantiate_module(kind, {**values, **kwargs})
        module.configure_model()
        module.on_load_checkpoint(content)
        if wrong := checkpoints.misfits(module.state_dict(), content["state_dict"]):
            raise ValueError(
                f"the weights of {path} do not fit {kind.__name__}: {wrong}. Use the version of "
                "the code that wrote it (an export's config.json names it)."
            )
        module.load_state_dict(content["state_dict"])
        return module.to(map_location)

    @classmethod
    def from_exported(cls, folder: str | Path, trust_checkpoint: bool = False) -> Self:
        """Return the module of a folder that `unisono export` wrote, in eval mode; its outputs are
        bit for bit the checkpoint's. Arguments and errors as in `load_from_checkpoint`."""
        return cls.load_from_checkpoint(folder, trust_checkpoint=trust_checkpoint).eval()

    @classmethod
    def exported_layout(
        cls, content: dict[str, Any], weights: dict[str, Tensor], adapter: bool
    ) -> Layout | None:
        """Return the layout in which `unisono export` writes files for another program, readable
        again by `restored_weights`; `None` for unisono's own two files.

        Args:
            content: a checkpoint's content.
            weights: the weights to export, by the module's names.
            adapter: whether to export the adapter only.

        Raises:
            ValueError: there is no adapter, or the other program cannot express the module.
        """
        if adapter:
            raise ValueError(f"a {cls.__name__} has no adapters; leave --adapter out.")
        return None

    @classmethod
    def restored_weights(
        cls, stored: dict[str, Tensor], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Return the module's weights from those stored in the layout of `exported_layout`.

        Args:
            stored: all tensors under the other program's names, tied ones included.
            extra: holds the recipe under `recipe_key`.
        """
        raise NotImplementedError(f"{cls.__name__} must implement restored_weights.")

    def adapted_weights(self, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
        """Return the weights of a checkpoint that `init_from` copies."""
        return checkpoint["state_dict"]


def flops_per_position(network: nn.Module) -> float:
    """Return the FLOP of forward and backward for one position: per matrix weight 6 if trained, 4
    if frozen, 2 if frozen and nothing before it is trained. Embedding tables, attention and
    recomputation are not counted. Source: Chowdhery et al. 2022, appendix B."""
    total, learns = 0.0, False
    for part in network.modules():
        is_table = isinstance(part, nn.Embedding | nn.EmbeddingBag)
        weights = [] if is_table else part.parameters(recurse=False)
        for weight in (w for w in weights if w.ndim > 1):
            learns = learns or weight.requires_grad
            total += weight.numel() * (6 if weight.requires_grad else 4 if learns else 2)
    return total


def share_of_step(
    terms: dict[str, LossSum], batch: dict[str, Any], term_weights: dict[str, float]
) -> Tensor:
    """Return a micro-batch's share [] of the mean loss of its optimizer step; the shares of all its
    micro-batches sum to that loss. Arguments as in `ExactModule.exact_mean`; `term_weights` holds
    the factor of each term, 1 if absent."""
    share = torch.zeros((), device=batch["weight"].device)
    for name, (total, _) in terms.items():
        factor = term_weights.get(name, 1.0)
        if factor != 0:  # a term that is only reported may lack a denominator in the plan
            # A term without targets in this step has total 0: the loss is 0, not NaN.
            share = share + in_float32(total) * factor / max(1.0, batch["step_denominators"][name])
    return share


def missing_kinds(defaults: list[Any], named: list[Any]) -> list[Any]:
    """Return the defaults whose class has no instance among `named`."""
    return [d for d in defaults if not any(isinstance(n, type(d)) for n in named)]


def follows_plan(module: LightningModule, data: Any) -> bool:
    """Return whether a module is an `ExactModule`; ValueError if it is and its data has no plan."""
    is_exact = isinstance(module, ExactModule)
    if is_exact and not isinstance(data, PlannedDataModule):
        raise ValueError(
            f"{type(module).__name__} reads planned batches, and {type(data).__name__} is no "
            "PlannedDataModule, which deals them: give it one (lit_models/README.md), or train a "
            "plain LightningModule."
        )
    return is_exact
