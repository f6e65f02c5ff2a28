"""Saves the command line's configuration in the run folder, versioned."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback


class RunConfig(SaveConfigCallback):
    """Writes `config.yaml`; one that differs from those already there is `config-2.yaml`, …

    Lightning's own refuses to start in a folder that has one, or replaces it. It is written when
    the run begins: a start that fails leaves none.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write nothing yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.already_saved or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(self.config, skip_none=False)
        verb = trainer.state.fn.value if trainer.state.fn else "fit"
        stem = "config" if verb == "fit" else f"config-{verb}"
        version, path = 1, folder / f"{stem}.yaml"
        while path.exists() and path.read_text(encoding="utf-8") != text:
            version += 1
            path = folder / f"{stem}-{version}.yaml"
        path.write_text(text, encoding="utf-8")
        self.already_saved = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":  # not in the trial before a training
            self.on_train_start(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start
