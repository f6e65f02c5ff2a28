"""Small runs of every family that uses the shared code, for the tests in this folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules import OccupationDataModule, SplitOptions, TextDataModule
from datamodules.core.planned import LoaderOptions, PlannedDataModule
from datamodules.occupations.store import Columns
from datamodules.tokenizers.text import byte_tokenizer
from lit_models import LitCausalLM, LitConsistencyLens, LitOccupationCoder
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.network import DecoderConfig
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.occupation_coder.encoders import CanineEncoder, CharacterEncoder
from lit_models.occupation_coder.linear import LinearOptions
from lit_models.occupation_coder.loss import OccupationLossOptions
from lit_models.occupation_coder.network import BlockDecoder
from lit_models.training.exact import ExactModule
from lit_models.training.metrics import LossSum, SumCount
from lit_models.training.optim import MuonAdamW, configured, parameter_groups
from tests.causal_lm.folders import saved, saved_canine
from tests.distributed.lens_family import LENS_LOSSES, consistency_lens
from tests.distributed.seo_family import SEO
from tests.distributed.seo_retriever import WAYS
from tests.seo.small_collection import bert_folder
from tests.seq2seq.family import pair_files, seq2seq
from tests.text_corpora import rows_file, saved_tokenizer
from tests.toy import LitToy, ToyData

TRADES = {"baker": "77610", "smith": "83110", "weaver": "75400", "sailor": "98135"}
SMALL = {"width": 16, "num_layers": 2, "num_heads": 2, "feed_forward": 32}
adamw = partial(torch.optim.AdamW, lr=0.01)
Family = Callable[[Path, dict[str, Any]], tuple[ExactModule, PlannedDataModule]]


class TiedBlock(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.outer(torch.tanh(self.inner(hidden)))


class LitTied(ExactModule):
    """Next-symbol model whose output shares the embedding's weights; validation generates texts of
    lengths that depend on the sample, so that ranks call the blocks unequally often."""

    NUM_SYMBOLS: ClassVar[int] = 32
    takes_half_weights: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.val_loss, self.val_generated = SumCount(), SumCount()
        self.test_loss = SumCount()
        self.embedding: nn.Embedding | None = None

    def build(self, recipe: dict[str, Any], data: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding = nn.Embedding(self.NUM_SYMBOLS, 8)
            self.layers = nn.ModuleList(TiedBlock(8) for _ in range(3))
            self.output = nn.Linear(8, self.NUM_SYMBOLS, bias=False)
        self.output.weight = self.embedding.weight

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.embedding(symbols)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(hidden)

    def losses(self, batch: dict[str, Any]) -> dict[str, LossSum]:
        symbols = (batch["values"] * 6 + 16).long().clamp(0, self.NUM_SYMBOLS - 1)
        padded = F.pad(symbols, (1, 0))
        logits = self(padded[:, :-1]).flatten(0, 1)
        nats = F.cross_entropy(logits, symbols.flatten(), reduction="none").view_as(symbols)
        nats = (nats * batch["mask"]).sum(1) * batch["weight"]
        count = (batch["mask"].sum(1) * batch["weight"]).sum()
        return {"values": LossSum(nats.sum(), count)}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.exact_mean(self.losses(batch), batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.val_loss.update(*self.losses(batch)["values"])
        for row, weight in enumerate(batch["weight"]):
            symbol = torch.zeros(1, dtype=torch.long, device=weight.device)
            for _ in range(int(batch["mask"][row].sum())):
                symbol = self(symbol).argmax(-1)
            self.val_generated.update(symbol.double().sum() * weight, weight)
        self.log_dict({"val/loss": self.val_loss, "val/generated": self.val_generated})

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.test_loss.update(*self.losses(batch)["values"])
        self.log("test/loss", self.test_loss)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        return {"prediction": self(batch["mask"].long()).sum((1, 2))}

    def configure_optimizers(self) -> Any:
        return configured(self, adamw(parameter_groups(self)), None)


def toy(
    folder: Path, options: dict[str, Any], dropout: float = 0.0
) -> tuple[ExactModule, PlannedDataModule]:
    return LitToy(dropout=dropout), ToyData(predict_output=str(folder / "coded.csv"), **options)


def tied(folder: Path, options: dict[str, Any]) -> tuple[ExactModule, PlannedDataModule]:
    return LitTied(), ToyData(predict_output=str(folder / "coded.csv"), **options)


def occupation_table(path: Path) -> None:
    """Write 50 records, some with two codes or long texts, and fewer records to evaluate on."""
    rng = np.random.default_rng(0)
    lines = ["text,code_1,code_2"]
    for number in range(50):
        trade, other = rng.choice(list(TRADES), 2, replace=False)
        second = TRADES[other] if number % 5 == 0 else ""
        text = f"{trade}{f' and {other}' if second else ''} " + "old " * (number % 4) + str(number)
        lines.append(f"{text},{TRADES[trade]},{second}")
    path.write_text("\n".join(lines) + "\n")
    path.with_name("evaluated.csv").write_text("\n".join(lines[:20]) + "\n")


def occupation_coder(
    folder: Path,
    options: dict[str, Any],
    loss: OccupationLossOptions | None = None,
    encoder: Any = None,
) -> tuple[ExactModule, PlannedDataModule]:
    table, evaluated = (str(folder.parent / f"{name}.csv") for name in ("occupations", "evaluated"))
    data = OccupationDataModule(
        train_files=table,
        validation_files=evaluated,
        test_files=evaluated,
        predict_files=table,
        predict_output=str(folder / "coded.csv"),
        columns=Columns(codes=["code_1", "code_2"]),
        split=SplitOptions(0.0, 0.0),
        loader=LoaderOptions(num_workers=0),
        **{"global_batch_size": 8, **options},
    )
    module = LitOccupationCoder(
        adamw,
        encoder=encoder or partial(CharacterEncoder, num_buckets=256, **SMALL),
        decoder=partial(BlockDecoder, **SMALL),
        loss=loss,
    )
    return module, data


def write_documents(path: Path, number: int) -> None:
    """Write documents of 1 to 60 characters."""
    words = ("the", "old", "baker", "sold", "bread", "and", "salt", "by", "weight")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(words, rng.integers(1, 10))) + f" {n}" for n in range(number)]
    rows_file(path, [{"text": line[:60]} for line in lines])


def text_files(folder: Path) -> None:
    """Write 60 documents, some longer than a row, 9 prompts (two of them equal), and pairs."""
    write_documents(folder / "documents.jsonl", number=60)
    pair_files(folder)
    prompts = [f"the {word}" for word in ("old", "baker", "old", "", "b", "salt by", "and so on")]
    rows_file(folder / "prompts.jsonl", [{"prompt": f"{p} "} for p in [*prompts, "x", "y"]])


def causal_lm(
    folder: Path,
    options: dict[str, Any],
    layout: str = "packed",
    optimizer: Any = partial(MuonAdamW, lr=0.02, adamw_factor=0.5),  # noqa: B008
    lora: LoraOptions | None = None,
    **shape: Any,
) -> tuple[ExactModule, PlannedDataModule]:
    documents = str(folder.parent / "documents.jsonl")
    data = TextDataModule(
        train_files=documents,
        validation_files=documents,
        test_files=documents,
        predict_files=str(folder.parent / "prompts.jsonl"),
        predict_output=str(folder / "coded.jsonl"),
        layout=layout,
        loader=LoaderOptions(num_workers=0),
        **{"context_length": 32, "global_batch_size": 8, **options},
    )
    module = LitCausalLM(
        optimizer,
        network=DecoderConfig(
            **{"max_positions": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, **shape}
        ),
        # Some texts end early, so that ranks decode different numbers of tokens.
        generation=GenerationOptions(6, 1.0, stop=[*ascii_lowercase]),
        lora=lora,
    )
    return module, data


FAMILIES: dict[str, Family] = {
    "toy": toy,
    "tied": tied,
    "occupation_coder": occupation_coder,
    "causal_lm": causal_lm,
    "consistency_lens": consistency_lens,
    "seq2seq": seq2seq,
    **SEO,
}
GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "tied": False}
LARGE = {"num_layers": 8, "hidden_size": 64}
# Sizes whose halves, on two devices, are odd, so that two more devices cannot share them evenly.
GROUPED = {"num_heads": 4, "num_kv_heads": 2, "feed_forward": 38}
ON_BFLOAT16 = LoraOptions(["*"], rank=2, dropout=0.0, base_dtype="bfloat16")
IN_BFLOAT16 = {"Llama": "", "Qwen2": "model.embed_tokens"}  # model -> its parts in bfloat16
LINEAR = OccupationLossOptions(linear=LinearOptions(num_features=512))  # solved by each process
SPECIAL: dict[str, Family] = {  # only in some tests
    "toy_dropout": partial(toy, dropout=0.3),
    "lens_layers": partial(consistency_lens, layers=[0, 1]),
    "linear_coder": partial(occupation_coder, loss=LINEAR),
    "documents": partial(causal_lm, layout="documents"),
    "llama": partial(causal_lm, **GROUPED),
    "large": partial(causal_lm, optimizer=adamw, **LARGE),
    "large lora": partial(causal_lm, optimizer=adamw, lora=ON_BFLOAT16, **LARGE),
    "lora": partial(causal_lm, optimizer=adamw, lora=ON_BFLOAT16),
    "gpt2": partial(causal_lm, optimizer=adamw, dropout=0.1, **GPT2),
    **WAYS,
}


def pretrained_files(folder: Path) -> None:
    """Write the folders of models that the families in `PRETRAINED` start from."""
    for kind in ("GPT2", "Llama", "Qwen2"):
        sizes = {"n_positions": 64} if kind == "GPT2" else {}
        model = saved(folder / kind, kind, vocab_size=257, **sizes)
        if kind in IN_BFLOAT16:
            model.get_submodule(IN_BFLOAT16[kind]).bfloat16()
            model.save_pretrained(folder / kind)
        saved_tokenizer(byte_tokenizer(), folder / kind)
    bert_folder(folder / "BERT")
    saved_canine(folder / "CANINE")


def pretrained(
    folder: Path, options: dict[str, Any], family: Family, name: str
) -> tuple[ExactModule, PlannedDataModule]:
    """Return a module that starts from a folder of `pretrained_files`, and its data."""
    path = str(folder.parent / name.split()[0])
    if family is occupation_coder:
        return occupation_coder(folder, options, encoder=partial(CanineEncoder, folder=path))
    module, data = family(folder, options)
    data.tokenizer_options = None  # take the folder's tokenizer
    if family is consistency_lens:
        subject = SubjectOptions(path, layer=0)
        lens = LensOptions(num_words=3)
        return LitConsistencyLens(adamw, subject, LENS_LOSSES, lens=lens), data
    more: dict[str, Any] = {"lora": ON_BFLOAT16} if name.endswith("lora") else {}
    more |= {"heads": module.head_options} if family is FAMILIES["text_scorer"] else {}
    return type(module)(optimizer=adamw, pretrained=path, **more), data


PRETRAINED: dict[str, Family] = {
    name: partial(pretrained, family=FAMILIES[family], name=name)
    for name, family in {
        "GPT2": "causal_lm",
        "Llama": "causal_lm",
        "Qwen2": "causal_lm",
        "Qwen2 lora": "causal_lm",
        "GPT2 lens": "consistency_lens",
        "BERT scorer": "text_scorer",
        "BERT ranker": "ranker",
        "BERT retriever": "retriever",
        "CANINE": "occupation_coder",
    }.items()
}
LARGE_FOLDERS = ("large folder", "large folder lora")
SPECIAL |= {name: partial(pretrained, family=causal_lm, name=name) for name in LARGE_FOLDERS}
