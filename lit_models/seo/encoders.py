"""Text encoders of `seo`, from tokens to one vector per row; pooling and heads of model folders.

Shapes: R rows, T positions, D hidden, V vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from datamodules.text.encoding import PROMPTS_FILE
from lit_models.blocks import EncoderLayer, rotary_table
from lit_models.causal_lm.pretrained import model_of, repeated_layers
from lit_models.training.metrics import evaluating, in_float32

Pooling = Literal["mean", "first", "max"]
MODULES = "modules.json"
PADDING_TOLERANCE = 1e-3  # relative to the largest value; kernels of other widths round differently
ENCODERS_OF = ("t5", "mt5", "umt5")  # model types with a decoder, which is left out
UNREACHED = ("esm", "longformer", "markuplm", "xlnet")  # types with parameters without a gradient
POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean", "max": "max"}
HEADS = {  # model type -> names of the dense layer and the score in a sequence classifier's files
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "xlm-roberta": ("classifier.dense", "classifier.out_proj"),
}


class TextEncoder(nn.Module):
    """Base class of the encoders."""

    width: int  # D
    pooling: Pooling = "mean"  # mean or maximum over tokens, or the first token; set by the module
    keeps_tokens: bool = False  # return hidden states [R, T, D] without pooling

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Return one vector per row [R, D].

        Args:
            input_ids: [R, T] int64, padded on the right.
            attention_mask: [R, T] bool, true at tokens, at least one in each row.
            segment_ids: [R, T] int64, 0 = query or single text, 1 = document; `None` is all 0.
        """
        raise NotImplementedError

    def blocks(self) -> list[nn.Module]:
        """Return the layers from lowest to highest; by default there are none."""
        return []

    def pooled(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one vector per row [R, D] from hidden states [R, T, D]."""
        if self.keeps_tokens:
            return hidden
        if self.pooling == "first":
            return hidden[:, 0]
        mask = attention_mask[..., None]
        if self.pooling == "max":
            return hidden.masked_fill(~mask, -torch.inf).amax(1)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


class TransformerEncoder(TextEncoder):
    """Transformer from scratch, with rotary positions.

    Args:
        width: D.
        num_layers: of the transformer; 0 makes it a bag of embeddings.
        feed_forward: inner width of the feed-forward blocks.
        dropout: probability after embeddings and blocks; never on attention weights.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        feed_forward: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width, self.head_size = width, width // num_heads
        self.tokens = nn.Embedding(vocab_size, width)
        self.segments = nn.Embedding(2, width)
        self.layers = nn.ModuleList(
            EncoderLayer(width, num_heads, feed_forward, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.segments.weight, std=0.1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        if segment_ids is None:
            segment_ids = torch.zeros_like(input_ids)
        hidden = self.dropout(self.tokens(input_ids) + self.segments(segment_ids))
        rotary = rotary_table(hidden.shape[1], self.head_size, hidden)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask, rotary)
        return self.pooled(self.norm(hidden), attention_mask)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


class PretrainedEncoder(TextEncoder):
    """Encoder of transformers, such as BERT or a T5's encoder, without pooler and dropout.

    Args: content of its config.json; folder with its weights, loaded in float32, `None` draws them.

    Raises:
        ValueError: weights are missing or of the wrong shape, a file is damaged, or the model has a
            decoder.
    """

    auto_class = "AutoModel"

    def __init__(self, content: dict[str, Any], folder: str | Path | None = None) -> None:
        super().__init__()
        is_cut = self.auto_class == "AutoModel" and content["model_type"] in ENCODERS_OF
        auto_class = "AutoModelForTextEncoding" if is_cut else self.auto_class
        model = model_of(content, folder, auto_class=auto_class, may_lack="pooler.")
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} of transformers has a decoder, which would read the "
                "encoded text; take an encoder such as BERT, or a T5, whose encoder is taken."
            )
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # its parameters would never get a gradient
        self.model = model.train()  # from_pretrained returns eval mode, which Lightning would keep
        self.width = model.config.hidden_size

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        segments: dict[str, Tensor] = {}
        if segment_ids is not None and getattr(self.model.config, "type_vocab_size", 0) > 1:
            segments["token_type_ids"] = segment_ids
        output = self.model(input_ids=input_ids, attention_mask=attention_mask.long(), **segments)
        return self.pooled(output.last_hidden_state, attention_mask)

    @torch.no_grad()
    def check_padding(self) -> None:
        """Raise ValueError if padding changes a text's vector: results would depend on the
        micro-batch, and so on the number of devices."""
        mask = torch.arange(9)[None] < 5
        ids = torch.arange(1, 10)[None] % self.model.get_input_embeddings().weight.shape[0] * mask
        with evaluating(self):
            alone, beside = self(ids[:, :5], mask[:, :5]), self(ids, mask)
        difference = (alone - beside[:, : alone.shape[1]]).abs().max() / alone.abs().max()
        if not difference <= PADDING_TOLERANCE:
            raise ValueError(
                f"{type(self.model).__name__} of transformers reads padding: a text has another "
                f"vector beside a longer one ({difference:.2g} of the largest value apart), and "
                "the loss would depend on the number of devices. Take another encoder, such as a "
                "BERT, RoBERTa, MPNet or ModernBERT."
            )

    @property
    def norm(self) -> nn.Module:
        """The norms after the last layer, such as ModernBERT's `final_norm`; often empty."""
        modules = list(self.model.modules())
        if not self.blocks():  # a bag of embeddings
            return nn.ModuleList()
        *_, last = self.blocks()[-1].modules()
        behind = modules[modules.index(last) + 1 :]
        sizes = [[p.dim() for p in module.parameters(recurse=False)] for module in behind]
        # MPNet also has a table of relative positions there, which its layers read.
        return nn.ModuleList(m for m, dims in zip(behind, sizes, strict=True) if set(dims) == {1})

    def blocks(self) -> list[nn.Module]:
        return repeated_layers(self.model)


UNSEEN = -30.0  # log-weight of tokens that no text has, such as marks; makes their weight about 0


class BagEncoder(TextEncoder):
    """Weighted bag of tokens, with one vector and one weight per token. It needs few texts.

    A token that occurs n times in a row counts 1 + ln n times in total. Initial weights are inverse
    document frequencies of the training texts, vectors are random.
    """

    def __init__(self, vocab_size: int, width: int = 512) -> None:
        super().__init__()
        self.width = width
        self.vectors = nn.Embedding(vocab_size, width)
        self.log_weights = nn.Embedding(vocab_size, 1)
        nn.init.normal_(self.vectors.weight, std=0.1)
        nn.init.zeros_(self.log_weights.weight)

    def start_from(self, num_texts_with: Tensor, num_texts: int) -> None:
        """Set the weights. Args: number of training texts with each token [V], and of all."""
        frequency = (1 + num_texts_with.double()) / (1 + num_texts)
        log_weights = (1 - frequency.log()).log().masked_fill(num_texts_with == 0, UNSEEN)
        with torch.no_grad():
            self.log_weights.weight.copy_(log_weights[:, None])

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        table = self.vectors.weight
        same = (input_ids[:, :, None] == input_ids[:, None, :]) & attention_mask[:, None, :]
        times = same.sum(-1).clamp(min=1).to(table)  # copies of a token share its total weight
        weights = self.log_weights(input_ids).squeeze(-1).exp() * (1 + times.log()) / times
        if self.pooling != "mean" or self.keeps_tokens:
            return self.pooled(self.vectors(input_ids) * weights[..., None], attention_mask)
        mask = attention_mask.to(table)  # the default type may be another in a backward pass
        weights = weights * (mask / attention_mask.sum(1, keepdim=True).clamp(min=1))
        # On a GPU, PyTorch has no half-precision gradient of per_sample_weights.
        options = {"per_sample_weights": in_float32(weights)}
        return F.embedding_bag(input_ids, in_float32(table), mode="sum", **options).to(table)


def stored_pooling(folder: str | Path, is_ranker: bool) -> dict[str, Pooling]:
    """Return {"pooling": …} of a sentence-transformers folder, or of a sequence classifier for a
    ranker; {} for other folders.

    Raises:
        ValueError: modules or pooling are not supported, or vectors are compared unnormalised.
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
            f"model.pretrained {folder} is of sentence-transformers, and {fault}; give a folder "
            "whose encoder lies beside modules.json, with cls, mean or max pooling, then Normalize "
            "(retriever) or two Dense layers (ranker)."
        )
    return {"pooling": POOLINGS[modes[0]]}


def read_head(network: Any, folder: str | Path) -> None:
    """Load a ranker's dense layer and score from a folder, if it has them; the score's bias only if
    the ranker has one, too."""
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
    """Whether a config.json is of a sequence classifier with one score and a known head."""
    is_known = config.get("model_type") in HEADS and len(config.get("id2label") or (0, 1)) == 1
    return is_known and "ForSequenceClassification" in str(config.get("architectures"))


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
