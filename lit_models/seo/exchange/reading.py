"""What folders of sentence-transformers say beside their encoder: pooling, and a ranker's score."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from datamodules.search.prompts import PROMPTS_FILE
from lit_models.seo.encoders import Pooling

MODULES = "modules.json"
POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean", "max": "max"}
HEADS = {  # of one score: dense layer and score in the files of a sequence classifier
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "xlm-roberta": ("classifier.dense", "classifier.out_proj"),
}


def stored_pooling(folder: str | Path, is_ranker: bool) -> dict[str, Pooling]:
    """Return `pooling` of a folder of sentence-transformers, or of a ranker's sequence classifier;
    nothing of one that does not say it.

    Raises:
        ValueError: it has other modules, pools otherwise, or ranks by vectors of any length.
    """
    folder = Path(folder)
    if not (folder / MODULES).is_file():
        is_first = is_ranker and _is_classifier(_read(folder / "config.json"))
        return {"pooling": "first"} if is_first else {}
    rows = [(row["type"].rpartition(".")[2], row["path"]) for row in _read(folder / MODULES)]
    kinds = [kind for kind, _ in rows]
    known = (["Pooling"], ["Pooling", "Normalize"], ["Pooling", "Dense", "Dense"])
    options = _read(folder / PROMPTS_FILE) if (folder / PROMPTS_FILE).is_file() else {}
    fault = None
    if kinds[:1] != ["Transformer"] or rows[0][1] or kinds[1:] not in known:
        fault = f"its modules are {', '.join(kinds)}"
    elif kinds[-1] == "Pooling" and options.get("similarity_fn_name") == "dot":
        fault = "it compares vectors of any length (dot), and a retriever unit vectors"
    else:
        pooling = _read(folder / rows[1][1] / "config.json")
        legacy = {key for key, value in pooling.items() if "pooling_mode_" in key and value}
        modes = pooling.get("pooling_mode") or [key.split("_")[2] for key in sorted(legacy)]
        modes = [modes] if isinstance(modes, str) else [*modes]
        if len(modes) != 1 or modes[0] not in POOLINGS or "sqrt" in str(legacy):
            fault = f"it pools by {', '.join(modes)}"
        elif pooling.get("include_prompt") is False:
            fault = "it pools without its prompt"
    if fault is not None:
        raise ValueError(
            f"model.pretrained {folder} is of sentence-transformers, and {fault}; a folder is read "
            "whose encoder lies beside modules.json and is pooled by cls, mean or max, then made "
            "unit vectors or, by two dense layers, a score."
        )
    return {"pooling": POOLINGS[modes[0]]}


def read_head(network: Any, folder: str | Path) -> None:
    """Give a ranker's network the dense layer and the score of a folder that has them. A
    constant that is added to all scores is taken where the ranker has one."""
    folder, parts = Path(folder), []
    if not hasattr(network, "score"):
        return
    config = _read(folder / "config.json")
    if (folder / MODULES).is_file():
        paths = [row["path"] for row in _read(folder / MODULES) if row["type"].endswith(".Dense")]
        parts = [load_file(folder / path / "model.safetensors") for path in paths]
        parts = [{n.removeprefix("linear."): t for n, t in part.items()} for part in parts]
    elif _is_classifier(config):
        stored = load_file(folder / "model.safetensors")
        parts = [
            {kind: stored[f"{name}.{kind}"] for kind in ("weight", "bias")}
            for name in HEADS[config["model_type"]]
        ]
    for layer, part in zip((network.dense, network.score), parts, strict=False):
        layer.load_state_dict({n: t for n, t in part.items() if n in layer.state_dict()})


def _is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a sequence classifier with one score and a head that we have."""
    is_known = config.get("model_type") in HEADS and len(config.get("id2label") or (0, 1)) == 1
    return is_known and "ForSequenceClassification" in str(config.get("architectures"))


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
