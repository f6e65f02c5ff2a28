"""Audit the data without training; exit status 1 on errors."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from datamodules.occupation_audit import Audit
    from datamodules.occupations import OccupationDataModule

WIDTH = 80
NUM_BAD_SHOWN = 20
NUM_CONFLICTS_SHOWN = 5
NUM_LANGUAGES_SHOWN = 12


# Plain `dict`: the parser would build each class_path inside a `dict[str, Any]`, optimizers too.
def check(
    data: dict | None = None,
    model: dict | None = None,
    trainer: dict | None = None,
    seed_everything: int | bool | None = None,
    test_after_fit: bool | None = None,
    on_missing_devices: str | None = None,
) -> int:
    """Read all tables of a config to their end, train nothing, and say what is wrong with them.

    Args:
        data: the datamodule of a run, or options of it such as --data.train_files=mine.csv.
        model: not used; accepted so that a run's config can be given as it is.
        trainer: not used.
        seed_everything: not used.
        test_after_fit: not used.
        on_missing_devices: not used.

    Returns:
        1 where a row breaks a rule, else 0.
    """
    from rich.console import Console

    from datamodules.occupation_audit import audit_tables
    from datamodules.sources import expand_files

    module = datamodule_of(data or {})
    predict_files = expand_files(module.predict_files, "data.predict_files")
    audit = audit_tables(module.store_request(), predict_files)
    console = Console(width=WIDTH, highlight=False)
    _show_tables(console, audit)
    _show_texts(console, audit)
    _show_codes(console, audit)
    _show_conflicts(console, audit)
    return _show_bad_rows(console, audit)


def datamodule_of(data: dict[str, Any]) -> "OccupationDataModule":
    """Returns the datamodule that a config describes.

    Args:
        data: class_path and init_args; keys beside them are options that win over init_args.

    Raises:
        SystemExit: an option is unknown or wrong; the parser has named it.
        ValueError: the datamodule is none that can be checked.
    """
    from lightning.pytorch import LightningDataModule

    from datamodules.occupations import OccupationDataModule
    from lit_models.cli import UnisonoParser

    options = {key: value for key, value in data.items() if key not in ("class_path", "init_args")}
    spec = {
        "class_path": data.get("class_path", "datamodules.OccupationDataModule"),
        "init_args": _merged(data.get("init_args") or {}, options),
    }
    parser = UnisonoParser()
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    module = parser.instantiate_classes(parser.parse_object({"data": spec})).data
    if not isinstance(module, OccupationDataModule):
        raise ValueError(
            f"`unisono check` audits OccupationDataModule, the config has "
            f"{type(module).__name__}; give a config of the occupation coder."
        )
    return module


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The options of both, those of `above` winning; groups of options are merged."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            value = _merged(under, value)
        merged[key] = value
    return merged


def _show_tables(console: "Console", audit: "Audit") -> None:
    from rich.table import Table

    table = Table(width=WIDTH, title="tables", title_justify="left", title_style="bold")
    table.add_column("file", overflow="fold")
    table.add_column("part")
    for name in ("sound rows", "bad rows"):
        table.add_column(name, justify="right")
    for entry in audit.tables:
        table.add_row(entry.file, entry.part, f"{entry.num_rows:,}", f"{entry.num_bad:,}")
    console.print(table)


def _show_texts(console: "Console", audit: "Audit") -> None:
    import numpy as np

    if len(audit.lengths):
        middle, high, most = np.quantile(audit.lengths, [0.5, 0.95, 1]).round().astype(int)
        console.print(
            f"texts      {len(audit.lengths):,} distinct; characters: median {middle}, "
            f"95 % up to {high}, longest {most}"
        )
    console.print(f"truncated  {audit.num_truncated:,} longer than {audit.max_length} characters")
    shown = audit.languages.most_common(NUM_LANGUAGES_SHOWN)
    more = len(audit.languages) - len(shown)
    names = ", ".join(f"{name} {count:,}" for name, count in shown)
    console.print(f"languages  {names}{f', {more} more' if more else ''}")
    for part, count in audit.overlap.items():
        console.print(f"overlap    {count:,} distinct {part} texts also occur in training")


def _show_codes(console: "Console", audit: "Audit") -> None:
    if not audit.codes:
        return
    once = sum(count == 1 for count in audit.codes.values())
    console.print(
        f"codes      {len(audit.codes):,} distinct, {once:,} of them once; rows with two or more "
        f"codes: {audit.num_several:,}"
    )
    if audit.num_unseen_codes is not None:
        console.print(f"code book  {audit.num_unseen_codes:,} of its codes occur in no row")
    if audit.suspects:
        shown = ", ".join(audit.suspects[:10])
        console.print(
            f"[yellow]warning[/yellow]    {len(audit.suspects)} codes may have lost a leading "
            f"zero: {shown}"
        )


def _show_conflicts(console: "Console", audit: "Audit") -> None:
    if not audit.conflicts:
        return
    console.print(
        f"[yellow]warning[/yellow]    {len(audit.conflicts):,} texts have different codes in "
        "different rows; the most frequent:"
    )
    ranked = sorted(audit.conflicts.items(), key=lambda item: (-item[1].total(), item[0]))
    for text, sets in ranked[:NUM_CONFLICTS_SHOWN]:
        shown = "; ".join(f"{'+'.join(codes)} × {n}" for codes, n in sets.most_common(4))
        console.print(f"  {text[:40]}: {shown}", markup=False, no_wrap=True, overflow="ellipsis")


def _show_bad_rows(console: "Console", audit: "Audit") -> int:
    if not audit.bad_rows:
        console.print("[green]sound[/green]      every row can be used")
        return 0
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in audit.bad_kinds.most_common())
    console.print(f"[red]errors[/red]     {len(audit.bad_rows):,} bad rows ({kinds})")
    for row in audit.bad_rows[:NUM_BAD_SHOWN]:
        console.print(f"  {row}", markup=False)
    more = len(audit.bad_rows) - NUM_BAD_SHOWN
    if more > 0:
        console.print(f"  … and {more:,} more")
    console.print(
        "Correct them, or leave them out of a run with --data.on_bad_rows=reject, which writes "
        "them to rejected.csv."
    )
    return 1
