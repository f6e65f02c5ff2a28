"""Parameter groups, schedules, Muon and averaged weights; rates come from the YAML."""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Adafactor, Optimizer
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lit_models.training.progress import budgeted_steps, check_monitor
from lit_models.training.sharding import local_parts, sharded_like

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: the steepest slope at zero
NUM_ITERATIONS, NORM_EPS = 5, 1e-7
RMS_OF_ADAMW = 0.2
AT_ONCE = 1 << 24  # elements of matrices in one batched product, so that small ones fill a GPU
AVERAGED = "averaged_weights"  # key of a checkpoint: name -> tensor, absent without averaging
CONFIGURED = "configured"  # key of a group: its settings as this run's configuration has them
OPTIMIZER = "optimizer"  # key of a group: the name of the optimizer's class


def parameter_groups(
    module: nn.Module, rates: dict[str, float] | None = None, heads: Sequence[Tensor] = ()
) -> list[dict[str, Any]]:
    """Return groups of trained parameters, with and without weight decay; ValueError without any.

    Vectors (biases, norm scales) and embeddings do not decay. On a resume a parameter's moments are
    found by its name. The `kind` of a group is "matrices" (between hidden states), "heads" or
    "others".

    Args:
        rates: name prefix -> factor of the learning rate; 1 for other parameters.
        heads: weights that score a vocabulary; one tied to an embedding counts as an embedding.
    """
    embeddings = nn.Embedding | nn.EmbeddingBag
    tables = {id(m.weight) for m in module.modules() if isinstance(m, embeddings)}
    scorers = {id(weight) for weight in heads}
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter is left to train: model.freeze names all; name fewer.")
    for name, parameter in trained:
        factor = next((r for p, r in (rates or {}).items() if name.startswith(p)), 1.0)
        decays = parameter.ndim > 1 and id(parameter) not in tables
        kind = ("heads" if id(parameter) in scorers else "matrices") if decays else "others"
        group = groups.setdefault((kind, factor), {"params": [], "lr_factor": factor, "kind": kind})
        if not decays:
            group["weight_decay"] = 0.0
        group["params"].append((name, parameter))
    return list(groups.values())


class WarmupDecay(LambdaLR):
    """Warms the learning rate up, then lets it decay until the last optimizer step of the run.

    Checkpoints do not store the last step: a run that is resumed with more epochs follows its new
    length.

    Args:
        optimizer: the optimizer to schedule.
        warmup: optimizer steps up to the full rate; a value below 1 is a share of the run.
        decay: shape after the warm-up.
        final_factor: share of the full rate at the last step.
        total_steps: optimizer steps of the schedule; `None` takes those of the run.

    Raises:
        ValueError: a negative warm-up, or one longer than the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float = 0.0,
        decay: Literal["cosine", "linear", "constant"] = "cosine",
        final_factor: float = 0.0,
        total_steps: int | None = None,
    ) -> None:
        if warmup < 0:
            raise ValueError(f"warmup must be 0 or more, got {warmup}.")
        self.warmup, self.decay, self.final_factor = warmup, decay, final_factor
        self.total_steps = total_steps
        super().__init__(optimizer, self.factor)

    def set_total_steps(self, total_steps: int) -> None:
        """Fix the length of the run."""
        if self.warmup >= total_steps:
            raise ValueError(
                f"warmup is {self.warmup:g} steps, but the run has {total_steps}; give fewer, or a "
                "share below 1."
            )
        self.total_steps = total_steps
        self._apply()

    def factor(self, step: int) -> float:
        """Return the share of the full rate at an optimizer step, from 0."""
        return self.shape(step, self.total_steps or 1)

    def shape(self, step: int, total: int) -> float:
        """Return the share of the full rate at a step of `total`."""
        warmup = self.warmup if self.warmup >= 1 else self.warmup * total
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, max(0.0, step - warmup) / max(1, total - warmup))
        if self.decay == "constant":
            return 1.0
        if self.decay == "linear":
            return 1 - (1 - self.final_factor) * progress
        wave = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_factor + (1 - self.final_factor) * wave

    def state_dict(self) -> dict[str, Any]:
        """Return the position only: the rest is configured by each run."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position; the rate at it follows from this run's configuration."""
        self.last_epoch = state_dict["last_epoch"]
        self._apply()

    def _apply(self) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.factor(self.last_epoch)


class RestartedDecay(WarmupDecay):
    """Restarts warm-up and decay at given steps, with another rate in each phase.

    Args:
        optimizer: the optimizer to schedule.
        restarts: optimizer steps at which the next phase begins, ascending.
        rates: factor of the rate in each phase, one more than `restarts`.
        schedule: options of `WarmupDecay`, applied to each phase.

    Raises:
        ValueError: the restarts do not ascend, or there is not one rate per phase.
    """

    def __init__(
        self, optimizer: Optimizer, restarts: list[int], rates: list[float], **schedule: Any
    ) -> None:
        if len(rates) != len(restarts) + 1 or sorted({0, *restarts}) != [0, *restarts]:
            raise ValueError(
                f"restarts must be ascending steps from 1 and rates one factor more, got restarts "
                f"{restarts} and rates {rates}."
            )
        self.restarts, self.rates = restarts, rates
        super().__init__(optimizer, **schedule)

    def factor(self, step: int) -> float:
        """Return the share of the full rate at an optimizer step, from 0."""
        phase = bisect.bisect_right(self.restarts, step)
        bounds = [0, *self.restarts, max(self.total_steps or 1, self.restarts[-1] + 1)]
        begin, end = bounds[phase : phase + 2]
        return self.rates[phase] * self.shape(step - begin, end - begin)


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    groups = optimizer.param_groups
    return [g for group in groups for p in group["params"] if (g := p.grad) is not None]


class MuonAdamW(Optimizer):
    """Muon on groups of kind "matrices", AdamW on the others; groups are from `parameter_groups`.

    The update of a matrix [n, m] is scaled by 0.2 sqrt(max(n, m)) to the size of AdamW's: rates and
    weight decay are those of an AdamW run. torch.optim.Muon computes the same in bfloat16. Here
    only GPUs iterate in bfloat16: on a CPU a difference in the last bit, as between one device and
    two, would grow to the last bit of bfloat16. A sharded matrix is gathered on one device for the
    iterations; matrices of one shape are dealt evenly. The momentum stays sharded.

    Args:
        params: groups from `parameter_groups`, each with its kind.
        lr: learning rate of matrices.
        adamw_factor: AdamW's learning rate as a multiple of `lr`.
        momentum: Muon's momentum, from 0 to below 1.
        weight_decay: weight decay of groups that do not set their own.
        betas: AdamW's betas.
        eps: AdamW's epsilon.

    Attributes:
        found_inf: [] float32 on the device, 1 if the next step must change nothing; `None` if
            every step counts.

    Raises:
        ValueError: a value is outside its range, or groups lack their kind.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the scaling: Liu et al.
    2025, "Muon is scalable for LLM training", arXiv 2502.16982, section 2.2.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        adamw_factor: float = 1.0,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "adamw_factor": adamw_factor, "momentum": momentum}
        defaults |= {"weight_decay": weight_decay, "betas": tuple(betas), "eps": eps}
        defaults["fused"] = True  # torch then keeps AdamW's step counts on the parameters' device
        # Checked, as in torch's classes: with a wrong sign or decay a run trains without learning.
        least = min(lr, adamw_factor, weight_decay, eps, momentum, *betas)
        if least < 0 or max(momentum, *betas) >= 1:
            raise ValueError(
                f"values of MuonAdamW must be 0 or more, momentum and betas below 1: {defaults}."
            )
        groups = list(params)
        if not all(isinstance(group, dict) and "kind" in group for group in groups):
            raise ValueError(
                "MuonAdamW must be told which parameters are matrices of hidden layers; give it "
                "lit_models.training.optim.parameter_groups(module), not module.parameters()."
            )
        super().__init__(groups, defaults)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            is_hidden = group["kind"] == "matrices"
            for matrices in alike(p for p in trained if is_hidden and p.ndim == 2):
                self._orthogonal_step(matrices, group)
            self._adamw_step([p for p in trained if not (is_hidden and p.ndim == 2)], group)
        return loss

    def _orthogonal_step(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        applied = 1.0 if self.found_inf is None else 1 - self.found_inf
        moved: list[Tensor] = []
        for matrix in matrices:
            if not (state := self.state[matrix]):
                state["momentum_buffer"] = torch.zeros_like(matrix)
            grad, buffer = local_parts([matrix.grad, state["momentum_buffer"]])
            if self.found_inf is not None:
                grad = torch.where(self.found_inf > 0, buffer, grad)
            buffer.lerp_(grad, 1 - group["momentum"])
            moved.append(grad.lerp(buffer, group["momentum"]))
        factor = RMS_OF_ADAMW * max(matrices[0].shape) ** 0.5
        updates = orthogonal_parts(moved, matrices[0])
        for part, update in zip(local_parts(matrices), updates, strict=True):
            part.mul_(1 - group["lr"] * group["weight_decay"] * applied)
            part.add_(update.to(part.device) * applied, alpha=-group["lr"] * factor)

    def _adamw_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[p] for p in parameters]
        adamw(  # an elementwise update: each rank updates its own shards
            local_parts(parameters),
            local_parts([p.grad for p in parameters]),
            local_parts([s["exp_avg"] for s in states]),
            local_parts([s["exp_avg_sq"] for s in states]),
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"] * group["adamw_factor"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def alike(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters of one shape and sharding, no longer than fills the devices."""
    kinds: dict[Any, list[Tensor]] = {}
    for p in parameters:
        sharding = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        kinds.setdefault((p.shape, p.dtype, sharding), []).append(p)
    for (shape, _, sharding), members in kinds.items():
        number = max(1, AT_ONCE // max(1, shape.numel())) * (sharding[0].size() if sharding else 1)
        yield from (members[i : i + number] for i in range(0, len(members), number))


def orthogonal_parts(parts: Iterable[Tensor], like: Tensor) -> Sequence[Tensor]:
    """Make matrices with the shape and sharding of `like` orthogonal, given and returned as this
    rank's parts (overwritten). Sharded ones are computed on one device each, by a collective."""
    mesh = like.device_mesh if isinstance(like, DTensor) else None
    device = like.device.type if mesh is None else mesh.device_type  # shards may be on the host
    own = [p.to(device, like.dtype if device == "cpu" else torch.bfloat16) for p in parts]
    if mesh is not None:
        size = {"shape": like.shape, "stride": like.stride(), "run_check": False}
        stack = torch.stack([DTensor.from_local(p, mesh, like.placements, **size) for p in own])
        dealt = stack.redistribute(placements=[Shard(0)] * mesh.ndim)  # a rank may get none
        own = list(dealt.to_local())
    if device == "cpu" or not own:  # in a CPU's batched product bits depend on the other matrices
        done: Sequence[Tensor] = [orthogonal(matrix) for matrix in own]
    else:
        done = orthogonal(torch.stack(own)).unbind()
    if mesh is None:
        return done
    for matrix, result in zip(own, done, strict=True):
        matrix.copy_(result)
    return dealt.redistribute(placements=stack.placements).to_local().unbind()


def orthogonal(matrix: Tensor) -> Tensor:
    """Return approximately the closest orthogonal matrices to [n, m] or [K, n, m], which are
    overwritten: singular values between 0.5 and 1.5."""
    a, b, c = NEWTON_SCHULZ
    is_batch = matrix.ndim > 2
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    norm = x.norm(dim=(-2, -1), keepdim=True) if is_batch else x.norm()
    x.div_(norm.clamp(min=NORM_EPS))  # the spectral norm is then at most 1
    add_product = torch.baddbmm if is_batch else torch.addmm
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def keep_numbers(optimizer: Optimizer) -> None:
    """Let an optimizer load the single numbers of a parameter as they were saved, such as NAdam's
    product of momenta; torch rounds them to the parameter's dtype."""
    loaded: dict[str, Any] = {}

    def restore(optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, values in loaded.pop("state").items():
            state = optimizer.state[parameters[index]]
            for name, value in values.items():
                if name != "step" and isinstance(value, Tensor) and value.ndim == 0:
                    state[name] = value.to(state[name].device)

    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: loaded.update(state_dict))
    optimizer.register_load_state_dict_post_hook(restore)


def reorder_by_name(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a stored state in this optimizer's order, matched by name: by position, other groups
    would get each other's moments. Moments of another optimizer class are dropped."""
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    if not all("param_names" in group for group in [*saved_groups, *groups]):
        return state_dict
    then, now = saved_groups[0].get(OPTIMIZER), groups[0].get(OPTIMIZER)
    if then != now:
        rank_zero_warn(f"the checkpoint's {then} has no moments for {now}, which begins without.")
        state_dict = {**state_dict, "state": {}}
    saved = {  # name -> group and position
        name: (group, index)
        for group in saved_groups
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }
    names = [name for group in groups for name in group["param_names"]]
    missing, extra = set(names) - set(saved), set(saved) - set(names)
    if missing or extra:
        raise ValueError(
            f"the checkpoint's optimizer holds other parameters: it lacks "
            f"{sorted(missing)[:3] or 'none'} and has also {sorted(extra)[:3] or 'none'}; resume "
            "with the model of the checkpoint, or start from its weights with model.init_from."
        )
    states = [state_dict["state"].get(saved[name][1]) for name in names]
    new_groups, first = [], 0
    for group in groups:
        own = list(group["param_names"])
        settings = _settings(group, saved[own[0]][0])  # from its first parameter's group
        places = list(range(first, first := first + len(own)))
        new_groups.append({**settings, "param_names": own, "params": places})
    state = {index: values for index, values in enumerate(states) if values is not None}
    return {**state_dict, "state": state, "param_groups": new_groups}


def _settings(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings in a checkpoint, replaced by those that this run configures
    differently; a schedule continues at its position with the new rate."""
    own, stored = group.get(CONFIGURED, {}), saved.get(CONFIGURED, {})
    changed = {k: v for k, v in own.items() if k not in stored or stored[k] != v}
    out = {**saved, **changed, CONFIGURED: own, "lr": saved["lr"]}
    if ("initial_lr" in group) != ("initial_lr" in saved):  # only one of the runs has a schedule
        return {**out, "lr": group["lr"]}
    old, new = stored.get("lr", saved["lr"]), own.get("lr", saved["lr"])
    if "initial_lr" in group:
        old, new = saved["initial_lr"], group["initial_lr"]
        out["initial_lr"] = new
    out["lr"] = new if saved["lr"] == old or old == 0 else saved["lr"] * (new / old)
    return out


def follow_rates(scheduler: Any) -> None:
    """Set a schedule's base rates to those of its optimizer's groups, not of a checkpoint."""
    for part in getattr(scheduler, "_schedulers", []):  # of SequentialLR and ChainedScheduler
        follow_rates(part)
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]


def configured(module: LightningModule, optimizer: Optimizer, scheduler: Any | None) -> Any:
    """Return the value of `configure_optimizers`: an optimizer with a schedule in optimizer steps,
    made by `scheduler`, or with a constant rate if that is `None`.

    Raises:
        ValueError: the schedule needs a length and the run has none, or it names no metric.
    """
    is_sharded = any(isinstance(p, DTensor) for p in module.parameters())
    if is_sharded and isinstance(optimizer, Adafactor):
        raise ValueError(
            "torch's Adafactor takes means over rows and columns of whole matrices, and fsdp has "
            "shards of them: use another optimizer, such as AdamW, or --trainer.strategy=ddp."
        )
    optimizer.register_load_state_dict_pre_hook(reorder_by_name)
    keep_numbers(optimizer)
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_factor", 1.0)
        group[OPTIMIZER] = type(optimizer).__name__
        plain = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        group[CONFIGURED] = {k: v for k, v in plain.items() if not isinstance(v, Tensor)}
    if scheduler is None:
        return optimizer
    schedule = scheduler(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        if (monitor := getattr(schedule, "monitor", None)) is None:
            raise ValueError(
                "torch's ReduceLROnPlateau does not name the metric that it follows; "
                "lightning.pytorch.cli.ReduceLROnPlateau does: monitor, such as val/loss."
            )
        check_monitor(module.trainer, "ReduceLROnPlateau", monitor)
        every = module.trainer.check_val_every_n_epoch or 1  # else its metric may be missing
        config = {"scheduler": schedule, "monitor": monitor, "frequency": every}
        return {"optimizer": optimizer, "lr_scheduler": config}
    if isinstance(schedule, WarmupDecay) and schedule.total_steps is None:
        steps = budgeted_steps(module.trainer)
        if steps is None:
            raise ValueError(
                "a schedule that ends with the run needs trainer.max_epochs or trainer.max_steps; "
                "give one, or set the schedule's total_steps."
            )
        schedule.set_total_steps(steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AveragedWeights(Callback):
    """Validates, tests and exports with averaged weights, while training uses the plain ones.

    After optimizer step t each average moves to its weight by 1 - min(decay, (1 + t) / (10 + t)).
    Checkpoints hold both; everything but a resumed training uses the averages.

    Args:
        decay: share of the average that a step keeps, in (0, 1).

    Raises:
        ValueError: a decay outside (0, 1).
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie between 0 and 1, got {decay}.")
        self.decay = decay
        self._averages: dict[str, Tensor] = {}

    def on_load_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        self._restored, self._averages = checkpoint.get(AVERAGED, {}), {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the current weights, or from the checkpoint's averages."""
        restored = self.__dict__.pop("_restored", {}) if trainer.ckpt_path else {}
        self._seen_step = trainer.global_step
        trained = [(name, p) for name, p in pl_module.named_parameters() if p.requires_grad]
        loaded = {n: sharded_like(restored[n], p).to(p.device) for n, p in trained if n in restored}
        self._averages = {n: loaded[n] if n in loaded else p.detach().clone() for n, p in trained}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Move the averages once after each optimizer step."""
        step, before = trainer.global_step, self._seen_step
        self._seen_step = step
        if step != before:
            average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
            average(*self._pairs(pl_module), step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the averages of a checkpoint also where its run has no step left."""
        if self.__dict__.get("_restored"):
            self.on_train_start(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if self._averages:
            # Another callback may save after a step before this callback's own hook has run.
            self.on_train_batch_end(trainer, module)
            checkpoint[AVERAGED] = dict(self._averages)

    def _pairs(self, pl_module: LightningModule) -> tuple[list[Tensor], list[Tensor]]:
        weights = dict(pl_module.named_parameters())
        parts = local_parts(weights[name].detach() for name in self._averages)
        return local_parts(self._averages.values()), parts

    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" or trainer.ckpt_path is None:  # else averages are loaded
            for average, weight in zip(*self._pairs(pl_module), strict=True):
                plain = weight.clone()
                weight.copy_(average)
                average.copy_(plain)

    on_test_start = on_predict_start = on_validation_end = on_validation_start
    on_test_end = on_predict_end = on_validation_start
