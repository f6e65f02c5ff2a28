"""The weights that did best on the validation metric that the module names."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_models.training.exact import ExactModule


class BestCheckpoint(ModelCheckpoint):
    """Keeps `checkpoints/best.ckpt`, judged after each validation.

    Args:
        monitor: logged metric; none takes the module's own.
        mode: whether less or more is better; none takes the module's own.
    """

    def __init__(self, monitor: str | None = None, mode: str | None = None) -> None:
        super().__init__(
            monitor=monitor,
            mode=mode or "min",
            filename="best",
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self._given_mode = mode

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the metric from the module, and the folder from the run."""
        if isinstance(pl_module, ExactModule) and self.monitor is None:
            self.monitor = pl_module.monitor
            if self._given_mode is None:
                self.mode = pl_module.monitor_mode
                self.kth_value = self.kth_value.new_tensor(
                    float("inf") if self.mode == "min" else float("-inf")
                )
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)
