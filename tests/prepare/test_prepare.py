"""Texts become shards of tokens; the audit lists every dropped document, and nothing is lost."""

import gzip
import json
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("datatrove", reason="extra: prepare")

from datamodules.core.store import content_digest
from datamodules.tokenizers.text import TextTokenizer
from lit_models.config_files import find_config, read_config
from lit_models.errors import UsageError
from lit_models.prepare.command import RECIPE, Preparation, prepare

LETTERS = "abcdefghijklmnop"
# No two of these share three words in a row.
HENS = [
    " ".join(f"the {a}{b}{LETTERS[(3 * i + k) % 16]}den of" for k, b in enumerate(LETTERS))
    for i, a in enumerate(LETTERS)
]
LONG = "A quick brown fox jumps over the lazy dog near the bank of a river, and nobody saw it go."
TWINS = [f"{LONG} {end}" for end in ("It ran.", "It ran!", "it  ran")]
EXAM = "Which of the seven sages said that water is the beginning of all that there is"


def written(path: Path, texts: list[str | None]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def recipe_in(folder: Path, **values: object) -> str:
    path = folder / "recipe.yaml"
    values = {"sources": [f"{folder}/*.jsonl"], "to": f"{folder}/out", **values}
    values.setdefault("executor", {"kind": "local", "workers": 1, "tasks": 2})
    path.write_text(yaml.safe_dump(values))
    return str(path)


def shards_of(folder: Path) -> tuple[list[str], dict]:
    """Return the texts of all shards by manifest; each must end with the end token."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tokenizer = TextTokenizer.from_dict(json.loads((folder / "tokenizer.json").read_text()))
    texts = []
    for shard in manifest["shards"]:
        path = folder / shard["name"]
        assert (path.stat().st_size, content_digest(path)) == (shard["bytes"], shard["digest"])
        tokens = np.fromfile(path, np.uint16)
        ends = np.fromfile(f"{path}.index", np.uint64).astype(int)
        assert (len(tokens), len(ends)) == (shard["tokens"], shard["documents"])
        assert path.with_suffix(".ds.metadata").read_text().splitlines()[1] == str(len(tokens))
        documents = np.split(tokens, ends)[:-1]
        assert all(document[-1] == tokenizer.end_id for document in documents)
        texts += [tokenizer.decode(document[:-1]) for document in documents]
    return texts, manifest


def dropped_lines(folder: Path) -> dict[str, str]:
    """Return place -> reason of all dropped documents."""
    paths = sorted(folder.glob("audit/*/*.dropped.jsonl.gz"))
    lines = [
        json.loads(line)
        for path in paths
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    return {line["document"]: line["reason"] for line in lines}


def test_each_document_is_in_the_shards_or_in_the_audit(tmp_path, capsys):
    written(tmp_path / "a.jsonl", [*HENS[:8], "", TWINS[0], f"He asked: {EXAM.upper()}?"])
    written(tmp_path / "b.jsonl", [*HENS[8:], None, TWINS[1], "short", TWINS[2]])
    (tmp_path / "exam.txt").write_text(EXAM)
    quality = {"min_doc_words": 5, "min_avg_word_length": 1, "min_stop_words": 0}
    tests = {"files": f"{tmp_path}/exam.txt", "n_grams": 8}
    values = {"filters": [{"GopherQualityFilter": quality}, {"WithoutTests": tests}]}
    values |= {"near_duplicates": {"num_buckets": 20}, "tokenizer": {"kind": "bpe"}}
    recipe = recipe_in(tmp_path, **values)
    assert prepare(recipe) == 0
    texts, manifest = shards_of(tmp_path / "out")
    (twin,) = set(texts) - set(HENS)
    assert twin in TWINS
    assert Counter(texts) == Counter([*HENS, twin])
    names = [shard["name"] for shard in manifest["shards"]]
    assert names == ["shards/00000/000.ds", "shards/00001/000.ds"]
    a, b = f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"
    places = {f"{a}:10": TWINS[0], f"{b}:10": TWINS[1], f"{b}:12": TWINS[2]}
    assert dropped_lines(tmp_path / "out") == {
        **{place: "not kept" for place, text in places.items() if text != twin},
        **{f"{a}:9": "empty", f"{b}:9": "empty", f"{b}:11": "gopher_short_doc"},
        f"{a}:11": "shares words with exam.txt",
    }
    audit = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert (audit["read"]["documents"], audit["kept"]["documents"]) == (23, 17)
    short = audit["dropped"]["1 GopherQualityFilter"]["gopher_short_doc"]
    assert short == {"documents": 1, "bytes": 5, "examples": [f"{b}:11: short"]}
    printed = capsys.readouterr().out
    assert "  shares words with exam.txt                      " in printed
    assert prepare(recipe) == 0  # run again, there is nothing to do
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "b\n', r"a.jsonl:2: the line is no JSON"),
        (b'{"text": "a"}\n{"txt": "b"}\n', r'a.jsonl:2: the row has no "text"; it has: txt'),
        (b'{"text": "\\ud83d"}\n', r'a.jsonl:1: "\\ud83d" is half of a surrogate pair'),
        (b'{"text": ""}\n', r"no document is left; .*audit says what dropped them"),
    ],
)
def test_a_wrong_file_is_named_and_nothing_is_taken_for_complete(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    recipe = recipe_in(tmp_path)
    with pytest.raises(ValueError, match=message):
        prepare(recipe)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_what_was_interrupted_goes_on_and_a_changed_source_is_refused(tmp_path):
    good = written(tmp_path / "a.jsonl", HENS)
    (tmp_path / "b.jsonl").write_text("{")
    recipe = recipe_in(tmp_path)
    with pytest.raises(ValueError, match=r"b.jsonl:1: the line is no JSON"):
        prepare(recipe)
    shard = tmp_path / "out" / "shards" / "00000" / "000.ds"
    made = shard.stat().st_mtime_ns
    written(tmp_path / "b.jsonl", TWINS)
    written(good, HENS[::-1])  # of the same size
    with pytest.raises(UsageError, match=r"begun with another .*a.jsonl; name a new folder"):
        prepare(recipe)
    written(good, HENS)
    assert prepare(recipe) == 0
    assert shard.stat().st_mtime_ns == made
    assert sorted(shards_of(tmp_path / "out")[0]) == sorted([*HENS, *TWINS])


def test_the_number_of_tasks_does_not_follow_from_the_machine(tmp_path, monkeypatch):
    for name in "abcdefghi":
        written(tmp_path / f"{name}.jsonl", HENS)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    recipe = read_config(Path(recipe_in(tmp_path, executor={"kind": "local"})))
    assert Preparation(RECIPE | recipe).tasks == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"to": "s3://bucket/x"}, "name what is read with --sources="),
        ({"sources": ["none.jsonl"]}, "sources: none.jsonl does not exist"),
        ({"filtres": []}, "has no `filtres`. Did you mean filters?"),
        ({"filters": [{"GopherFilter": {}}]}, "filters has no `GopherFilter`"),
        ({"filters": [{"Language": {"model": "x.bin", "keep": ["en"]}}]}, "x.bin is no file"),
        ({"near_duplicates": {"ngrams": 3}}, "near_duplicates has no `ngrams`. Did you mean n_g"),
        ({"tokenizer": {"kind": "words"}}, "tokenizer.kind must be bytes, bpe, folder, got words"),
        ({"executor": {"kind": "dask"}}, "executor.kind has no `dask`"),
        ({"executor": {"worker": 2}}, "executor has no `worker`. Did you mean workers?"),
        ({"executor": {"tasks": 0}}, "tasks must be at least 1"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(tmp_path, values, message):
    written(tmp_path / "a.jsonl", HENS)
    with pytest.raises(UsageError, match=message):
        prepare(recipe_in(tmp_path, **values))
    assert not (tmp_path / "out" / "shards").exists()


def test_the_shipped_recipe_says_all_keys():
    assert read_config(find_config("prepare/text.yaml")).keys() == RECIPE.keys()


class Guess:
    """Stand-in for a fastText model: a text with "og" is Danish."""

    def predict(self, text):
        assert "\n" not in text  # fastText refuses line breaks
        return (("__label__da",) if " og " in text else ("__label__en",)), [0.4 + 0.1 * len(text)]


def test_documents_of_other_languages_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("fasttext.load_model", lambda path: Guess())
    (tmp_path / "lid.bin").touch()
    written(tmp_path / "a.jsonl", ["the owl\nand the hen", "uglen og hønen", "a"])
    options = {"model": f"{tmp_path}/lid.bin", "keep": ["en"]}
    assert prepare(recipe_in(tmp_path, filters=[{"Language": options}])) == 0
    assert shards_of(tmp_path / "out")[0] == ["the owl\nand the hen"]
    gone = {f"{tmp_path}/a.jsonl:2": "is da", f"{tmp_path}/a.jsonl:3": "unsure en"}
    assert dropped_lines(tmp_path / "out") == gone


SBATCH = r"""#!/bin/bash
# Runs the tasks of a job at once: its script is the last word.
script="${@: -1}"; export SLURM_NODELIST=here
array=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\).*/\1/p' "$script")
for id in $(seq 0 "$array"); do SLURM_ARRAY_TASK_ID=$id bash "$script" >>slurm.log 2>&1; done
echo Submitted batch job 7
"""


@pytest.mark.slow
def test_jobs_of_slurm_make_the_same_shards(own_folder, monkeypatch):
    written(own_folder / "a.jsonl", [*HENS, "short"])
    written(own_folder / "b.jsonl", [*TWINS, "brief"])
    values = {"near_duplicates": {"num_buckets": 2}, "tokenizer": {"kind": "bpe"}}
    values["filters"] = [{"GopherQualityFilter": {"min_doc_words": 20, "min_stop_words": 0}}]
    assert prepare(recipe_in(own_folder, **values)) == 0
    scripts = {"sbatch": SBATCH, "srun": '#!/bin/sh\nshift 3; exec "$@"', "scontrol": "#!/bin/sh"}
    for name, script in scripts.items():
        (own_folder / "bin" / name).parent.mkdir(exist_ok=True)
        (own_folder / "bin" / name).write_text(script)
        (own_folder / "bin" / name).chmod(0o755)
    programs = f"{own_folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", programs)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    executor = {
        "kind": "slurm",
        "tasks": 2,
        "time": "1:00:00",
        "partition": "cpu",
        "tasks_per_job": 2,
    }
    recipe = recipe_in(own_folder, **values, executor=executor, to=f"{own_folder}/slurm")
    assert prepare(recipe) == 0  # submits the jobs
    assert prepare(recipe) == 0, Path("slurm.log").read_text()
    assert shards_of(own_folder / "slurm") == shards_of(own_folder / "out")
