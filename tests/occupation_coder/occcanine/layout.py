"""Small random models in OccCANINE's layout, written without our code, and their logits."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

WIDTH, LENGTH = 24, 128
CODES = ["-3", "-2", "-1", "01110", "01120", "41025", "83110", "99999"]
TEXTS = ("wine merchant", "smith and farmer", "x")


def hisco_id(symbol: str) -> int:
    return int(symbol) + 8


class Reference(nn.Module):
    """The layout as documented, without cache and code book."""

    def __init__(self, vocab_size: int, num_rows: int) -> None:
        super().__init__()
        from transformers import CanineConfig, CanineModel

        config = CanineConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=12,
            intermediate_size=32,
            type_vocab_size=2,
            num_hash_buckets=256,
            num_hash_functions=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder = CanineModel(config)
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, 8, 40, 0.0)
        self.decoder = nn.TransformerDecoder(layer, 3)
        self.head = nn.Linear(WIDTH, vocab_size)
        self.linear_decoder = nn.Linear(WIDTH, num_rows)

    def encode(self, texts: list[str]) -> Any:
        """Args: "en[SEP]smith" and the like."""
        from transformers import CanineTokenizer

        options = {"padding": "max_length", "max_length": LENGTH, "truncation": True}
        return self.encoder(**CanineTokenizer()(texts, return_tensors="pt", **options))

    def flat(self, texts: list[str]) -> Tensor:
        return self.linear_decoder(self.encode(texts).pooler_output)

    def sequence(self, texts: list[str], symbols: Tensor) -> Tensor:
        """Logits [B, T, V] of what follows each of these symbols [B, T]; the first is begin."""
        place, rate = torch.arange(LENGTH)[:, None], torch.arange(0, WIDTH, 2)
        waves = torch.zeros(LENGTH, WIDTH)
        waves[:, 0::2] = torch.sin(place * torch.exp(-rate * math.log(10000) / WIDTH))
        waves[:, 1::2] = torch.cos(place * torch.exp(-rate * math.log(10000) / WIDTH))
        hidden = self.embedding(symbols) * math.sqrt(WIDTH) + waves[: symbols.shape[1]]
        size = symbols.shape[1]
        future = torch.ones(size, size).triu(1).bool()
        memory = self.encode(texts).last_hidden_state.transpose(0, 1).double()
        return self.head(self.decoder(hidden.transpose(0, 1), memory, future)).transpose(0, 1)

    def state(self, kind: str) -> dict[str, Tensor]:
        """The weights under the layout's names."""
        base = "basemodel." if kind == "flat" else "encoder."
        weights = {base + n: v for n, v in self.encoder.state_dict().items()}
        head = dict(self.linear_decoder.state_dict())
        if kind == "flat":
            return weights | {f"out.{n}": v for n, v in head.items()}
        weights["decoder.token_emb.embedding.weight"] = self.embedding.weight.detach()
        weights |= {f"decoder.decoder.{n}": v for n, v in self.decoder.state_dict().items()}
        weights |= {f"decoder.head.{n}": v for n, v in self.head.state_dict().items()}
        if kind == "mix":
            weights |= {f"linear_decoder.{n}": v for n, v in head.items()}
        return {name: value.float() for name, value in weights.items()}


def random_model(vocab_size: int = 19, num_rows: int = len(CODES) + 1) -> Reference:
    torch.manual_seed(3)
    model = Reference(vocab_size, num_rows).eval()
    for parameter in model.parameters():  # no norm or bias without effect
        nn.init.normal_(parameter, 0.2 if parameter.ndim == 1 else 0.0, 0.2)
    for part in (model.embedding, model.decoder, model.head):
        part.double()
    return model


def hub_folder(folder: Path, model: Reference, kind: str, **config: Any) -> Path:
    """Write a folder as on the hub, without a key."""
    folder.mkdir()
    weights = {name: value.clone() for name, value in model.state(kind).items()}
    save_file(weights, folder / "model.safetensors")
    settings = {"model_domain": "Multilingual_CANINE", "dropout_rate": 0.0, **config}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def hisco_folder(folder: Path, model: Reference, kind: str = "mix") -> Path:
    """Write a HISCO folder beside the public key file, whose codes lack leading zeros as there."""
    hub_folder(folder, model, kind, num_classes=[18] * 27, num_classes_flat=len(CODES) + 1)
    lines = [f"text {code},{code.removeprefix('0')},{row}" for row, code in enumerate(CODES)]
    lines = ["en_hisco_text,hisco,code", "empty, ,NA", *lines]
    (folder / "Key.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
