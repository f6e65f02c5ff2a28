"""The table over folds, by hand."""

from pathlib import Path

import pytest

from lit_models.seo.fold_table import fold_table, main


def run_folder(path: Path, value: str) -> Path:
    path.mkdir()
    (path / "metrics.csv").write_text(f"step,val/a,test/a\n1,5,\n2,,{value}\n")
    return path


def test_mean_and_spread_over_folds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folders = [run_folder(tmp_path / name, v) for name, v in (("x", "1"), ("y", "2"), ("z", "6"))]
    mean, spread, values = fold_table(folders)["test/a"]
    assert (mean, values) == (3.0, [1.0, 2.0, 6.0])
    assert spread == pytest.approx(((4 + 1 + 9) / 2) ** 0.5)
    main([str(folder) for folder in folders])
    assert "3.0000" in capsys.readouterr().out


def test_what_is_no_tested_run_is_named(tmp_path: Path) -> None:
    tested = run_folder(tmp_path / "x", "1")
    with pytest.raises(ValueError, match="needs two runs or more, got 1"):
        fold_table([tested])
    with pytest.raises(ValueError, match=r"x is named 2 times; each fold counts once"):
        fold_table([tested, tmp_path / "y" / ".." / "x"])
    with pytest.raises(FileNotFoundError, match=r"none/metrics.csv does not exist"):
        fold_table([tested, tmp_path / "none"])
    with pytest.raises(ValueError, match="holds no test measures; fit with --test_after_fit"):
        fold_table([tested, run_folder(tmp_path / "y", "")])
    with pytest.raises(SystemExit, match="error: a table over folds"):
        main([str(tested)])
