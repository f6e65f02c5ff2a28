"""Preference tuning as a LightningModule. Batch: that of `PreferenceDataset`.

Shapes: B pairs, N tokens of all answers, D hidden, V vocabulary; 2 answers, the chosen one first.
"""

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.utilities.distributed import gather_all_tensors

from datamodules.core.plan import check_range
from datamodules.core.store import cache_folder, made_once
from datamodules.text.preferences import PAIRS
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.module import LitCausalLM
from lit_models.training.ledger import is_distributed
from lit_models.training.metrics import LossSum, SampleResult, SumCount, evaluating, in_float32
from lit_models.training.predictions import weights_digest

REFERENCE = "reference_scores"  # checkpoint key of {dataset's content: scores [samples, 2]}
ROWS_AT_ONCE = 512  # rows of logits in memory at a time
SCORES = GenerationOptions(mode="score")


def pair_scores(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> Tensor:
    """Return the log-probabilities of both answers [B, 2] float64, with gradients.

    Logits are computed in chunks and recomputed in the backward pass, so never all in memory.

    Args:
        hidden: [1, T, D].
        weight: of the head, [V, D].
        batch: uses its `labels`, `places`, `place_text` and `choice_documents`.
    """

    def nats_of(rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(in_float32(F.linear(rows, weight)), targets, reduction="none")

    rows = hidden.flatten(0, 1).index_select(0, batch["places"]).split(ROWS_AT_ONCE)
    targets = batch["labels"].flatten().index_select(0, batch["places"]).split(ROWS_AT_ONCE)
    how: Any = {"use_reentrant": False, "preserve_rng_state": False}
    parts = [checkpoint(nats_of, *pair, **how) for pair in zip(rows, targets, strict=True)]
    number = batch["choice_documents"].numel()
    sums = torch.zeros(number, dtype=torch.float64, device=hidden.device)
    return -sums.index_add(0, batch["place_text"], torch.cat(parts).double()).view(-1, 2)


def preference_loss(policy: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair [B] in nats and its margin [B], the reward of the chosen answer
    minus that of the rejected one.

    Args:
        policy: log-probabilities of both answers [B, 2].
        reference: the same by the model at the start of the run.
        beta: reward per nat of difference between the two.

    Source: Rafailov et al. 2023, "Direct preference optimization", arXiv 2305.18290, equation 7.
    """
    rewards = beta * (policy - reference)
    margin = rewards[:, 0] - rewards[:, 1]
    return -F.logsigmoid(margin), margin


class LitPreference(LitCausalLM):
    """Direct preference optimization. Logs per split `loss` in nats per pair, `accuracy`, the share
    of pairs whose chosen answer has the larger reward, and `margin` between both rewards.

    The reference is the model at the start of the run. It scores all pairs once, so that no second
    model is held; the scores go to the cache, keyed by weights and data, and into checkpoints.

    Args:
        beta: strength of the reference.
        language_model: see `LitCausalLM`; `pretrained` or `init_from` names the model to tune.

    Raises:
        ValueError: beta is below 1e-6.
    """

    def __init__(self, beta: float = 0.1, **language_model: Any) -> None:
        super().__init__(**language_model)
        check_range("model", 1e-6, beta=beta)
        self.beta = beta
        self.reference: dict[str, Tensor] = {}  # split -> [samples, 2] float64
        self.stored: dict[str, Tensor] = {}  # dataset's content -> the same
        self.is_tuned = False  # whether training may have changed the network from the reference

    def build(self, recipe: Any, data: Any) -> None:
        super().build(recipe, data)
        names = ("loss", "accuracy", "margin")
        self.val_metrics = nn.ModuleDict({name: SumCount() for name in names})
        self.test_metrics = nn.ModuleDict({name: SumCount() for name in names})

    def on_fit_start(self) -> None:
        """Score all pairs of the data, the test's too, with the reference."""
        if self.trainer.ckpt_path is None:  # a new run, even of a module that was trained before
            self.stored, self.is_tuned = {}, False
        self._refer(self.trainer.datamodule.part_datasets())
        self.is_tuned = True

    def on_validation_start(self) -> None:
        if self.trainer.state.fn == "validate":
            self._refer({"validation": self.trainer.datamodule.datasets["validation"]})

    def on_test_start(self) -> None:
        super().on_test_start()
        self._refer({"test": self.trainer.datamodule.datasets["test"]})

    def _refer(self, datasets: dict[str, Any]) -> None:
        """Set the reference scores of each split's dataset, from the run's stored scores or from
        the network, which is the reference until the first step.

        Raises:
            ValueError: the network is tuned, and its run has no scores of these data.
        """
        for split, dataset in datasets.items():  # older checkpoints have fingerprints as keys
            scores = self.stored.get(dataset.content, self.stored.get(dataset.fingerprint))
            if scores is None and self.is_tuned:
                raise ValueError(
                    f"there is no reference for these {split} data: the run did not have them, and "
                    "the model from its start no longer exists. Name them in the training, with "
                    f"--data.{split}_files."
                )
            scores = self._scores_of(dataset) if scores is None else scores
            self.stored[dataset.content] = scores.cpu()
            self.reference[split] = scores.to(self.device)

    def _scores_of(self, dataset: Any) -> Tensor:
        """Return the current network's scores [samples, 2]; all processes must call it."""
        data, strategy = self.trainer.datamodule, self.trainer.strategy
        facts = [dataset.fingerprint, str(self.trainer.precision)]
        folder = cache_folder("references", weights_digest(self.trainer, facts))
        file = folder / "scores.npy"
        known = strategy.broadcast(np.load(file) if file.exists() else None)
        if known is not None:
            return torch.from_numpy(known)
        rows = [torch.zeros(0, 3, dtype=torch.float64, device=self.device)]
        with evaluating(self), torch.no_grad():
            for batch in data.passes(dataset):
                batch = self.transfer_batch_to_device(batch, self.device, 0)
                scores = strategy.predict_step(batch, 0, options=SCORES)["scores"]
                rows.append(torch.cat([batch["sample_id"][:, None].double(), scores], 1))
        table = torch.cat(rows)
        table = torch.cat(gather_all_tensors(table)) if is_distributed() else table
        scores = torch.zeros(len(dataset.lengths), 2, dtype=torch.float64)
        scores[table[:, 0].long().cpu()] = table[:, 1:].cpu()
        if self.trainer.is_global_zero:
            made_once(folder, lambda new: np.save(new / file.name, scores.numpy()))
        return scores

    def training_terms(self, batch: Any) -> dict[str, LossSum]:
        losses, _ = self._losses("train", batch)
        return {PAIRS: LossSum.of(losses, batch["weight"])}

    def _losses(self, split: str, batch: Any) -> tuple[Tensor, Tensor]:
        policy = pair_scores(self(batch), self.network.head.weight, batch)
        # The trial of the memory runs before the reference scores exist.
        known = self.reference.get(split)
        reference = policy.detach() if known is None else known[batch["sample_id"]]
        return preference_loss(policy, reference, self.beta)

    def _evaluate(self, split: Literal["val", "test"], batch: Any) -> SampleResult:
        losses, margin = self._losses({"val": "validation"}.get(split, split), batch)
        metrics, weight = getattr(self, f"{split}_metrics"), batch["weight"].double()
        values = {"loss": losses, "accuracy": (margin > 0).double(), "margin": margin}
        for name, metric in metrics.items():
            metric.update(values[name] * weight, weight)
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
        return SampleResult(losses, {"margin": margin})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[REFERENCE] = dict(self.stored)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.stored = {name: scores.cpu() for name, scores in checkpoint.get(REFERENCE, {}).items()}

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Load weights, which then count as tuned by a run or by the processes that it started."""
        self.is_tuned = True
        return super().load_state_dict(*args, **options)
