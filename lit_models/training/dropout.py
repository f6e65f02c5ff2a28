"""Dropout whose mask depends on the sample, not on device, micro-batch or padding.

Whether an element is dropped is a hash of (seed, epoch, sample id, module, its n-th call in the
step, position on every axis): no generator and no state, so a resumed run draws the same masks.
Shapes: B samples of the micro-batch, R = B x O rows, O rows of each sample.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lit_models.training.metrics import hash_ids

_MIX_1, _MIX_2 = -1640531535, -2048144777  # odd; 2654435761 and 2246822519 as signed (xxHash32)
_CHANNELS, _MOST_AXES = -1, 8  # index of the channel axis; limit of other axes if compiled


def mixed(*parts: int | Tensor) -> Tensor:
    """Return a well-mixed int64 for a sequence of integers; tensors among them broadcast."""
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        key = hash_ids(key + part)
    return key


class SampleKeys:
    """State of the current micro-batch, shared by the keyed dropouts of a network."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # [B] int64 while a training step runs
        self.is_backward = False
        self._calls: Counter[int] = Counter()
        self._seen: defaultdict[int, list[Tensor]] = defaultdict(list)  # module -> rows of calls

    def begin(self, key: int, sample_id: Tensor) -> None:
        """Start a micro-batch of samples [B] int64; `key` is a hash of seed and epoch."""
        self.rows = mixed(key, sample_id)
        self.is_backward = False
        self._calls.clear()
        self._seen.clear()

    @contextmanager
    def of_texts(self, sample: Tensor, text: Tensor) -> Iterator[None]:
        """Key masks by text instead of by row, so that texts that are computed in chunks, or again
        in the backward pass, get the same masks.

        Args:
            sample: [R] int64, position of each row's sample in the micro-batch.
            text: [R] int64, which of the sample's texts it is.
        """
        before = self.rows, self._calls, self.is_backward
        if self.rows is not None:
            self.rows = mixed(self.rows[sample], text)
        self._calls, self.is_backward = Counter(), False
        try:
            yield
        finally:
            self.rows, self._calls, self.is_backward = before

    def next_call(self, module: int, place: str) -> tuple[int, Tensor]:
        """Return the number of this call of the module in the micro-batch, from 0, and its rows.

        Raises:
            RuntimeError: no step is under way, or the backward pass repeats one of several calls.
        """
        if self.rows is None:
            raise RuntimeError(
                f"exact_dropout: {place} ran in training mode outside a training step, where no "
                "sample is known; call eval() first."
            )
        if torch.compiler.is_compiling():
            return 0, self.rows
        if not self.is_backward:
            self._calls[module] += 1
            self._seen[module].append(self.rows)
            return self._calls[module] - 1, self.rows
        if len(self._seen[module]) != 1:
            raise RuntimeError(
                f"exact_dropout: {place} was called {len(self._seen[module])} times in the forward "
                "pass, and again in the backward pass (activation checkpointing): which call is "
                "repeated cannot be told. Give each call its own nn.Dropout, or do not checkpoint."
            )
        return 0, self._seen[module][0]  # also of texts whose context has ended


class KeyedDropout(nn.Dropout):
    """Replacement of an `nn.Dropout`, with masks by key; row r belongs to sample r // O. Compiled
    code keeps no tables and counts no calls: each counts as the first of its module."""

    def __init__(self, plain: nn.Dropout, index: int, place: str, keys: SampleKeys) -> None:
        super().__init__(plain.p, plain.inplace)
        self.train(plain.training)
        self.index, self.place, self.keys = index, place, keys
        self.sites = hash_ids(mixed(index, 0, torch.arange(_CHANNELS, _MOST_AXES)))
        self.least = round(self.p * 2**32) - 2**31  # in forward, inductor would keep the first one
        self.tables: dict[tuple[int, int], Tensor] = {}

    def forward(self, values: Tensor) -> Tensor:
        """Args: values [R, ...], the last axis holds channels.

        Raises:
            ValueError: R is no multiple of the samples.
            RuntimeError: called in training mode outside a training step.
        """
        if not self.training or self.p == 0 or values.numel() == 0:
            return values
        if self.p == 1:
            return values * 0.0
        call, rows = self.keys.next_call(self.index, self.place)
        if values.dim() == 0 or len(values) % len(rows):
            raise ValueError(
                f"exact_dropout: {self.place} got a tensor of shape {list(values.shape)} in a "
                f"micro-batch of {len(rows)} samples; the first axis must hold the samples, or "
                "several rows of each side by side. Reshape before it, or leave exact_dropout out."
            )
        channels = values.shape[-1] if values.dim() > 1 else 1
        for axis, size in enumerate([len(values) // len(rows), *values.shape[1:-1]]):
            rows = rows[..., None] + self._table(call, axis, size, rows.device)
        words = hash_ids(rows).to(torch.int32)[..., None]  # [B, O, ...] and an axis of size 1
        words = words ^ self._table(call, _CHANNELS, channels, rows.device).to(torch.int32)
        words.mul_(_MIX_1)  # makes the high bits depend on all bits
        words.bitwise_xor_((words >> 15).bitwise_and_((1 << 17) - 1))  # a logical shift
        keep = words.mul_(_MIX_2) >= self.least
        noise = keep.view(values.shape).to(values.dtype).mul_(1 / (1 - self.p))
        return values * noise

    def _table(self, call: int, axis: int, size: int, device: torch.device) -> Tensor:
        """Return one key per index of an axis [size]."""
        if torch.compiler.is_compiling():
            return hash_ids(self.sites[axis - _CHANNELS] + torch.arange(size, device=device))
        table = self.tables.get((call, axis))
        if table is None or len(table) < size or table.device != device:
            site = int(mixed(self.index, call, axis))
            table = mixed(site, torch.arange(size, device=device))
            self.tables[call, axis] = table
        return table[:size]


def key_dropout(network: nn.Module, keys: SampleKeys) -> list[KeyedDropout]:
    """Replace every `nn.Dropout` of a network by a keyed dropout, and return these."""
    keyed: dict[nn.Module, KeyedDropout] = {}  # one for a dropout that has several names
    with next((p.device for p in network.parameters()), torch.device("cpu")):
        for place, module in list(network.named_modules(remove_duplicate=False)):
            if type(module) is nn.Dropout:
                new = keyed.setdefault(module, KeyedDropout(module, len(keyed), place, keys))
                network.set_submodule(place, new)
    return list(keyed.values())


def release_dropout(network: nn.Module) -> None:
    """Replace keyed dropouts by plain ones."""
    plain: dict[nn.Module, nn.Dropout] = {}
    for place, module in list(network.named_modules(remove_duplicate=False)):
        if isinstance(module, KeyedDropout):
            new = plain.setdefault(module, nn.Dropout(module.p, module.inplace))
            network.set_submodule(place, new.train(module.training))


def keyed_texts(network: nn.Module, sample: Tensor, text: Tensor) -> AbstractContextManager[None]:
    """Return the context `SampleKeys.of_texts`, or an empty one if no dropout is keyed."""
    keys = keys_in(network)
    return nullcontext() if keys is None else keys.of_texts(sample, text)


def keys_in(network: nn.Module) -> SampleKeys | None:
    """Return the keys of a network's dropouts; `None` if they are not keyed."""
    return next((m.keys for m in network.modules() if type(m) is KeyedDropout), None)


class DrawGuard:
    """Detects random numbers that a training step draws from the device's generator."""

    def begin(self, device: torch.device) -> None:
        self._states = [torch.get_rng_state()]
        self._states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []

    def check(self, device: torch.device, option: str) -> None:
        """Raise RuntimeError if numbers were drawn since `begin`."""
        before = self._states
        self.begin(device)
        if not all(map(torch.equal, before, self._states)):
            raise RuntimeError(
                f"{option}: training_step drew random numbers that belong to no sample: a dropout "
                "inside attention (attention_dropout, attention_probs_dropout_prob), an RNN or a "
                "function, layer drop, or sampling. Set its rate to 0, or make it an nn.Dropout "
                "module and add --exact_dropout=true, or leave this option out."
            )


class ExactDropout(Callback):
    """Keys every `nn.Dropout` of the network by seed, epoch and sample during `fit`.

    Masks are then the same on any number of devices, in any micro-batch and after a resume.

    Raises:
        ValueError: in `fit`, if samples share a row.
        RuntimeError: a training step draws random numbers in another way.
    """

    def __init__(self) -> None:
        self.exactness_facts: dict[str, Any] = {"exact_dropout": True}
        self._keys = SampleKeys()
        self._guard = DrawGuard()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rate = max((dropout.p for dropout in key_dropout(pl_module, self._keys)), default=0.0)
        if rate and not trainer.datamodule.datasets["train"].is_padded:
            raise ValueError(
                f"exact_dropout needs data.layout packed or blocks, whose rows are samples; here "
                f"the network has dropout {rate} and the samples of a micro-batch share one row. "
                "Choose another data.layout, set dropout to 0, or leave exact_dropout out."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        key = int(mixed(trainer.datamodule.seed, trainer.current_epoch))
        index = batch["sample_index"][:, 0] if "sample_index" in batch else slice(None)
        self._keys.begin(key, batch["sample_id"][index])  # also for rows of padding
        self._guard.begin(pl_module.device)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._guard.check(pl_module.device, "exact_dropout")
        self._keys.is_backward = True

    def on_train_batch_end(self, *_: Any) -> None:
        self._keys.rows = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: Any) -> None:
        release_dropout(pl_module)

    on_exception = teardown
