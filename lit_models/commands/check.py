"""Audit the data without training; exit status 1 on errors."""


def check(run_options: list[str] | None = None) -> int:
    """Read all files of a config to their end, train nothing, and say what is wrong with them.

    Args:
        run_options: those of `unisono fit`, such as --config and --data.train_files=mine.csv; a
            pretrained model brings the tokenizer that counts.

    Returns:
        1 where a row breaks a rule, else 0.
    """
    from lightning.pytorch import LightningDataModule, LightningModule
    from rich.console import Console

    from datamodules.core.planned import PlannedDataModule
    from datamodules.files.audit import WIDTH
    from lit_models.cli import built_part, parsed
    from lit_models.training.exact import ExactModule

    config = parsed(run_options or [])
    module = built_part(config, "data", LightningDataModule)
    if not hasattr(module, "audit"):
        raise ValueError(
            f"`unisono check` asks a datamodule for its audit, and {type(module).__name__} has "
            "none; give a config of one of Unisono's, or write the method."
        )
    if isinstance(module, PlannedDataModule):
        model = built_part(config, "model", LightningModule)
        module.model = model.model_facts() if isinstance(model, ExactModule) else module.model
    audit = module.audit()
    audit.show(Console(width=WIDTH, highlight=False))
    return 0 if audit.is_sound else 1
