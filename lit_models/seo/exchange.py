"""Export of retrievers and rankers to sentence-transformers, which need not be installed, and ONNX.

A sentence-transformers folder has an encoder in transformers' layout, a tokenizer with our marks,
and `modules.json`: pooling, then a retriever's normalisation or a ranker's two layers of its score.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, normalizers, processors
from torch import Tensor, nn

from datamodules.core.store import replacing
from datamodules.text.encoding import PROMPTS_FILE, TextEncoding
from lit_models.causal_lm.adapters import merged_weights
from lit_models.causal_lm.export import json_text
from lit_models.run_files import write_tensors
from lit_models.seo.encoders import (
    MODULES,
    POOLINGS,
    PretrainedEncoder,
    TextEncoder,
    TransformerEncoder,
)
from lit_models.seo.networks import BiEncoder, CrossEncoder

NAMES = {own: theirs for theirs, own in POOLINGS.items()}
FOLDERS = {"Pooling": "sentence_transformer"}  # package of a sentence-transformers module, or base
TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
ROPE_BASE = 1000.0  # of `rotary_table`
WITHOUT_BIAS = ("self.query", "self.key", "self.value", "output.dense")  # layers of our attention
NORM_EPSILON = 1e-5  # of nn.LayerNorm


def exported(
    ckpt: Path, to: Path, kind: Any, weights: dict[str, Tensor], format: str, trusted: bool
) -> int:
    """Write the checkpoint of a module of class `kind`, with these weights, in another program's
    format, and print how to read it there."""
    module = kind.load_from_checkpoint(ckpt, trust_checkpoint=trusted).eval()
    module.load_state_dict(weights)
    kinds = {"sentence-transformers": (BiEncoder, CrossEncoder), "onnx": (BiEncoder,)}
    if type(getattr(module, "network", None)) not in kinds.get(format, ()):
        known = f"{' and '.join(kinds)} for a LitRetriever, and the first for a LitRanker"
        raise ValueError(f"--format {format} of a {kind.__name__}: there are {known}.")
    with replacing(to) as unfinished:
        unfinished.mkdir()
        is_ranker = isinstance(module.network, CrossEncoder)
        for name, text in _tokenizer_files(module.recipe, is_ranker).items():
            (unfinished / name).write_text(text, "utf-8")
        if format == "onnx":
            write_programs(module, unfinished)
            print(f'read      onnxruntime: InferenceSession("{to}/encoder.int8.onnx")')
        else:
            print(f'read      sentence_transformers: {write_folder(module, unfinished)}("{to}")')
    return 0


def write_folder(module: Any, folder: Path) -> str:
    """Write a retriever or a ranker, without its tokenizer, into a folder, and return the name of
    the class that reads it, SentenceTransformer or CrossEncoder.

    In sentence-transformers, queries and documents share the limit `text.max_length`; a document is
    its title and text, separated by a line break. The exported tokenizer lower-cases each letter by
    itself, so that a final sigma of Greek capitals differs from ours.

    Raises:
        ValueError: the layout cannot express the module: a BagEncoder, a first stage's prior, or
            segments with rotary positions.
    """
    network, recipe = module.network, module.recipe
    is_ranker, limits = isinstance(network, CrossEncoder), TextEncoding(recipe).limits
    if is_ranker and network.prior_weight is not None:
        raise ValueError(
            "model.prior adds the score of a first stage, which CrossEncoder does not know; export "
            "it without --format."
        )
    config, weights = _encoder_files(network.encoder, limits.max_length, is_ranker)
    read: dict[str, Any] = {"max_seq_length": limits.max_length}
    pooled = {"embedding_dimension": network.encoder.width, "include_prompt": True}
    pooled["pooling_mode"] = NAMES[network.encoder.pooling]
    steps = [("Transformer", read, weights), ("Pooling", pooled, {})]  # module, config, weights
    own: dict[str, Any] = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
    if is_ranker:
        own = {"model_type": "CrossEncoder", "activation_fn": IDENTITY}
        read["processing_kwargs"] = {"text": {"truncation": "only_second"}}
        first = (network.dense, TANH, "sentence_embedding")
        for layer, activation, output in (first, (network.score, IDENTITY, "scores")):
            content = {"in_features": layer.in_features, "out_features": layer.out_features}
            content |= {"bias": layer.bias is not None, "activation_function": activation}
            content |= {"module_input_name": "sentence_embedding", "module_output_name": output}
            state = {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}
            steps.append(("Dense", content, state))
    else:
        own["truncate_dim"] = module.size
        own["prompts"] = recipe.get("prompts", {"query": "", "document": ""})
        steps.append(("Normalize", {}, {}))
    texts, rows = {"config.json": config, PROMPTS_FILE: own}, []
    for place, (kind, content, state) in enumerate(steps):
        path = f"{place}_{kind}" if place else ""
        rows.append({"idx": place, "name": str(place), "path": path})
        place_of = FOLDERS.get(kind, "base")
        rows[-1]["type"] = f"sentence_transformers.{place_of}.modules.{kind.lower()}.{kind}"
        (folder / path).mkdir(exist_ok=True)
        texts[f"{path}/config.json" if place else "sentence_bert_config.json"] = content
        if tensors := {name: t.detach().contiguous().clone() for name, t in state.items()}:
            write_tensors(tensors, folder / path / "model.safetensors")
    for name, values in {**texts, MODULES: rows}.items():
        (folder / name).write_text(json_text(values), "utf-8")
    return own["model_type"]


def _encoder_files(
    encoder: TextEncoder, max_length: int, has_segments: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of config.json and the weights of the equivalent transformers model."""
    state = encoder.state_dict()
    if isinstance(encoder, PretrainedEncoder):
        merged = merged_weights(encoder, state)
        names = {"architectures": [type(encoder.model).__name__]}
        config = encoder.model.config.to_diff_dict() | names
        return config, {name.removeprefix("model."): t for name, t in merged.items()}
    if not isinstance(encoder, TransformerEncoder):
        raise ValueError(
            f"sentence-transformers cannot express a {type(encoder).__name__}: a token that comes "
            "n times counts 1 + ln n times in a bag, which no module there does. Export it without "
            "--format, or train a TransformerEncoder with num_layers 0."
        )
    size, width = encoder.tokens.weight.shape
    config = {
        "vocab_size": size,
        "hidden_size": width,
        "num_hidden_layers": len(encoder.layers),
        "num_attention_heads": width // encoder.head_size,
        "max_position_embeddings": max_length,
        "layer_norm_eps": NORM_EPSILON,
        "hidden_dropout_prob": encoder.dropout.p,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    }
    segments, norm = encoder.segments.weight, encoder.norm.state_dict()
    if not encoder.layers:  # BERT without layers is a bag of embeddings
        config |= {"model_type": "bert", "architectures": ["BertModel"], "intermediate_size": width}
        stored = {
            "word_embeddings.weight": encoder.tokens.weight,
            "token_type_embeddings.weight": segments,
            "position_embeddings.weight": torch.zeros(max_length, width),
            **{f"LayerNorm.{name}": tensor for name, tensor in norm.items()},
        }
        return config, {f"embeddings.{name}": tensor for name, tensor in stored.items()}
    if has_segments:
        raise ValueError(
            "sentence-transformers cannot express this model: transformers has no encoder with "
            "both segments and rotary positions, which a ranker of model.encoder reads. Export it "
            "without --format, or fine-tune a folder with model.pretrained."
        )
    # ESM has the same pre-norm layers with rotary positions; its additional biases are 0.
    config |= {"model_type": "esm", "architectures": ["EsmModel"], "rope_theta": ROPE_BASE}
    config |= {"position_embedding_type": "rotary", "emb_layer_norm_before": False}
    config |= {"intermediate_size": encoder.layers[0].expand.out_features}
    config |= {"token_dropout": False, "mask_token_id": None}
    stored = {"embeddings.word_embeddings.weight": encoder.tokens.weight + segments[0]}
    steps = torch.arange(0, encoder.head_size, 2) / encoder.head_size
    stored["rotary_embeddings.inv_freq"] = ROPE_BASE**-steps
    heads = len(encoder.layers) * config["num_attention_heads"]
    stored["contact_head.regression.weight"] = torch.zeros(1, heads)  # for proteins, unused here
    stored["contact_head.regression.bias"] = torch.zeros(1)
    stored |= {f"encoder.emb_layer_norm_after.{name}": tensor for name, tensor in norm.items()}
    for number, layer in enumerate(encoder.layers):
        parts: dict[str, nn.Module] = {
            "attention.LayerNorm": layer.attention_norm,
            "LayerNorm": layer.feed_forward_norm,
            "intermediate.dense": layer.expand,
            "output.dense": layer.contract,
        }
        place = f"encoder.layer.{number}."
        for name, part in parts.items():
            stored |= {f"{place}{name}.{kind}": t for kind, t in part.state_dict().items()}
        tensors = (*layer.attention.qkv.weight.chunk(3), layer.attention.output.weight)
        for name, tensor in zip(WITHOUT_BIAS, tensors, strict=True):
            stored[f"{place}attention.{name}.weight"] = tensor
            stored[f"{place}attention.{name}.bias"] = torch.zeros(width)
    return config, stored


def _tokenizer_files(recipe: Mapping[str, Any], is_ranker: bool) -> dict[str, str]:
    """Return the files of a tokenizer that adds the same marks around texts as `TextEncoding`."""
    encoding = TextEncoding(dict(recipe))
    tokenizer, limits = encoding.tokenizer, encoding.limits
    if limits.stemmer or limits.stopwords:
        raise ValueError(
            "data.text.stemmer and data.text.stopwords have no counterpart in a tokenizer of other "
            "programs; export it without --format."
        )
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    if limits.lower_case:
        steps = [normalizers.Lowercase(), *filter(None, [backend.normalizer])]
        backend.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    ids = {
        i: backend.id_to_token(i)
        for i in (encoding.begin_id, encoding.separator_id)
        if i is not None
    }
    begin = [] if encoding.begin_id is None else [f"{ids[encoding.begin_id]}:0"]
    mark = ids[encoding.separator_id]
    single = [*begin, "$A:0", f"{mark}:0"]
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=" ".join(single),
        pair=" ".join([*single, "$B:1", f"{mark}:1"]),
        special_tokens=[(token, i) for i, token in ids.items()],
    )
    files = tokenizer.hugging_face_files()
    values = json.loads(files["tokenizer_config.json"])
    values.setdefault("pad_token", mark)  # any token will do, as the attention mask hides it
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * is_ranker
    values |= {"model_max_length": limits.max_length, "model_input_names": names}
    files["tokenizer.json"] = backend.to_str(pretty=True) + "\n"
    files["tokenizer_config.json"] = json_text(values)
    return files


class Vectors(nn.Module):
    """Maps tokens and their mask, [R, T] int64, to unit vectors. Args: network: a BiEncoder."""

    def __init__(self, network: Any, size: int | None) -> None:
        super().__init__()
        self.network, self.size = network, size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        vectors = self.network.encode(input_ids, attention_mask.bool())
        return F.normalize(vectors[:, : self.size], dim=-1)


def write_programs(module: Any, folder: Path) -> None:
    """Write encoder.onnx, and encoder.int8.onnx, dynamically quantised by onnxruntime.

    Raises:
        ValueError: the extra `onnx` is not installed.
    """
    try:
        import onnxscript  # noqa: F401 - needed by the exporter
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise ValueError(f"--format onnx needs pip install 'unisono[onnx]' ({error}).") from error
    shape = dict(enumerate(map(torch.export.Dim, ("rows", "positions"))))
    program = torch.onnx.export(
        Vectors(module.network, module.size).eval(),
        tuple(torch.ones(2, 8, dtype=torch.long) for _ in range(2)),
        dynamo=True,
        verbose=False,
        dynamic_shapes=(shape, shape),
        input_names=["input_ids", "attention_mask"],
        output_names=["vector"],
    )
    whole, small = folder / "encoder.onnx", folder / "encoder.int8.onnx"
    program.save(whole)
    quantize_dynamic(whole, small, weight_type=QuantType.QInt8)
