"""Decoder that covers GPT-2 and Llama; attention that keeps the documents of a row apart.

Shapes: R rows, T positions, S positions so far, D hidden, H heads, G key and value heads, K head
size, V vocabulary.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from datamodules.core.batches import document_bounds
from datamodules.core.plan import check_range
from lit_models.blocks import rotate
from lit_models.training.metrics import evaluating
from lit_models.training.sharding import TensorSplit

INITIAL_STD = 0.02
DOCUMENT_LENGTHS = (3, 4)  # in the row of the self-test, which ends with a padding position
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative to the largest value
HALF_TOLERANCE = 0.1
HALF_DTYPES = (torch.bfloat16, torch.float16)
Rotation = tuple[Tensor, Tensor] | None  # from `rotations`; `None` with learned positions
PRODUCTS = re.compile(r"\w+::(mm|addmm|_scaled_dot_product\w+|_varlen_attn)(\.|$)")


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder.

    Args:
        vocab_size: rows of the embedding; `None` takes the tokenizer's size.
        max_positions: longest document. Learned positions end there; rotary positions continue, but
            the network is not trained for such contexts.
        hidden_size: D.
        num_layers: blocks.
        num_heads: H.
        num_kv_heads: G, a divisor of H; `None` is H.
        feed_forward: inner width; `None` is 4 D, or 8/3 D for swiglu.
        norm: RMSNorm or LayerNorm.
        norm_eps: epsilon of the norms.
        positions: rotary, or a learned table of max_positions rows.
        rope_theta: base of the rotary frequencies.
        activation: swiglu, or gelu in its tanh form.
        bias: of linear layers and LayerNorm; not of keys, where it would have no effect.
        tied: the head shares the embedding's weights.
        dropout: after embedding, attention and feed-forward, 0 to below 1.

    Raises:
        ValueError: a size or the rate is out of its range, or sizes do not fit each other.
    """

    vocab_size: int | None = None
    max_positions: int = 1024
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    feed_forward: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    activation: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_range("network", 1, **{n: v for n, v in vars(self).items() if type(v) is int})
        check_range("network", 0, 0.99, dropout=self.dropout)
        unit = self.num_heads * (2 if self.positions == "rotary" else 1)  # it turns pairs
        if self.hidden_size % unit or self.num_heads % self.kv_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of {unit} (num_heads, or 2 x "
                f"num_heads with rotary positions), and num_heads {self.num_heads} of num_kv_heads "
                f"{self.kv_heads}; change one of them."
            )

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of this decoder, see `pretrained`."""
        return {"kind": "own", "config": asdict(self)}

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def inner_size(self) -> int:
        if self.feed_forward is not None:
            return self.feed_forward
        if self.activation == "gelu":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // 3 // 8) * 8


PRESETS = {
    "gpt2-124m": DecoderConfig(
        vocab_size=50_257,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        norm="layer",
        positions="learned",
        activation="gelu",
        bias=True,
    ),
    "llama-tiny": DecoderConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2),
    "shakespeare-cpu": DecoderConfig(max_positions=64, hidden_size=128, num_layers=4, num_heads=4),
    "shakespeare-gpu": DecoderConfig(
        max_positions=256, hidden_size=384, num_layers=6, num_heads=6, dropout=0.2
    ),
}


def preset(name: str) -> DecoderConfig:
    """Return a decoder of `PRESETS`, or depth-N: N layers, hidden size 64 N, N heads.

    Raises:
        ValueError: there is no preset of this name.
    """
    if match := re.fullmatch(r"depth-([1-9]\d*)", name):
        depth = int(match[1])
        return DecoderConfig(hidden_size=64 * depth, num_layers=depth, num_heads=depth)
    if name not in PRESETS:
        choices = ", ".join(PRESETS)
        raise ValueError(f'network "{name}" is no preset; choose one of {choices}, or depth-N.')
    return PRESETS[name]


class Documents(NamedTuple):
    """Which positions may attend to each other, built once per batch for all layers; without
    `bounds` and `mask`, every row is one document."""

    bounds: tuple[Tensor, int] | None = None  # of the documents, see `document_bounds`
    # [R, 1, T, S]: bool, true where a position attends; or additive, 0 there, else -infinity.
    mask: Tensor | None = None
    # In generation, prepends the layer's cached keys and values to the new ones.
    past: Callable[[Tensor, Tensor], Sequence[Tensor]] | None = None


def documents_of(
    document_ids: Tensor,
    like: Tensor,
    head_size: int,
    as_mask: bool = False,
    bounds: tuple[Tensor, int] | None = None,
) -> Documents:
    """Return which positions may attend to each other.

    On a CPU, attention runs per document, which costs no more than the documents' own positions. On
    a GPU one kernel does so, see `has_flash`; otherwise an additive mask replaces it. The mask is
    shared by all layers; from a bool mask each layer would save its own copy for the backward pass.

    Args:
        document_ids: [R, T] int64, ascending within a row; -1 = padding at the end.
        like: tensor with the dtype of hidden states; under autocast, autocast's dtype counts.
        head_size: K.
        as_mask: use a mask on a CPU, too.
        bounds: document_bounds and longest_document of the batch; `None` makes a GPU synchronize.
    """
    device, dtype = document_ids.device, like.dtype
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    is_flash = has_flash(device, dtype, head_size)
    if not is_flash and (as_mask or device.type != "cpu"):
        causal = torch.ones(document_ids.shape[1:] * 2, dtype=torch.bool, device=device).tril()
        sees = (document_ids[:, None, :, None] == document_ids[:, None, None, :]) & causal
        mask = torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill_(~sees, -torch.inf)
        return Documents(mask=mask)
    if bounds is None:
        starts, longest = document_bounds(document_ids.cpu().numpy())
        bounds = torch.from_numpy(starts).to(device), longest
    if not is_flash and int(bounds[0].diff().count_nonzero()) == len(document_ids):
        return Documents()
    return Documents(bounds)


def has_flash(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether PyTorch's `varlen_attn` can be used: in half precision, on a GPU of compute
    capability 8 or more, and not with deterministic algorithms."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return False
    fits = dtype in HALF_DTYPES and head_size % 8 == 0 and head_size <= 256
    is_bitwise = torch.are_deterministic_algorithms_enabled()
    return device.type in ("cuda", "meta") and fits and not is_bitwise


class KeyValueCache:
    """Keys and values [R, G, S, K] of each layer so far.

    With gradients they grow by concatenation. Without, memory for `room` more positions is
    reserved, so that a new position copies nothing. After the first call, T must be 1."""

    def __init__(self, num_layers: int, room: int = 0) -> None:
        self.room, self.lengths = room, [0] * num_layers
        self.layers: list[list[Tensor]] = [[] for _ in range(num_layers)]  # [R, G, S + room, K]

    def extended(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Append keys and values [R, G, T, K] of new positions; return all so far."""
        wholes = self.layers[layer] or [x[:, :, :0] for x in new]
        start, length = self.lengths[layer], self.lengths[layer] + new[0].shape[2]
        for number, x in enumerate(new):
            past = wholes[number][:, :, :start]
            if torch.is_grad_enabled():
                wholes[number] = torch.cat([past, x], 2)
                continue
            if length > wholes[number].shape[2]:
                wholes[number] = x.new_empty(*x.shape[:2], length + self.room, x.shape[3])
                wholes[number][:, :, :start] = past
            wholes[number][:, :, start:length] = x
        self.layers[layer], self.lengths[layer] = wholes, length
        return [whole[:, :, :length] for whole in wholes]

    def batch_select_indices(self, rows: Tensor) -> None:
        """Keep only these rows, [r] int64."""
        self.layers = [[whole[rows] for whole in wholes] for wholes in self.layers]


def attend(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None = None
) -> Tensor:
    """Return grouped-query attention [R, H, T, K] of q [R, H, T, K], k and v [R, G, T, K]; `None`
    scales scores by 1 / sqrt(K).
    """
    if documents.past is not None:
        k, v = documents.past(k.to(v.dtype), v)  # under autocast rotated keys have a wider dtype
    is_cpu = q.device.type == "cpu"
    if documents.bounds is None:
        return attended(q, k, v, documents.mask, scale, is_cpu)
    (bounds, longest), rows = documents.bounds, len(q)
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(v.dtype) for x in (q, k, v))  # [R T, H or G, K]
    if is_cpu:
        sizes = [size for size in bounds.diff().tolist() if size]
        # Split, not sliced: the backward pass of each slice would make a full tensor of zeros.
        each = zip(*(x.transpose(0, 1)[None].split(sizes, dim=2) for x in (q, k, v)), strict=True)
        # Heads in the second-last dimension, as the next layer reads them, saves a copy.
        parts = [attended(a, b, c, None, scale, is_cpu).transpose(1, 2) for a, b, c in each]
        output = torch.cat(parts, dim=1)[0]
    else:
        from torch.nn.attention.varlen import varlen_attn  # slow: it imports the compiler

        options: Any = {"window_size": (-1, 0), "enable_gqa": q.shape[1] != k.shape[1]}
        options |= {"cu_seq_q": bounds, "cu_seq_k": bounds, "max_q": longest, "max_k": longest}
        output = varlen_attn(q, k, v, scale=scale, **options)
    return output.unflatten(0, (rows, -1)).transpose(1, 2)


def attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, is_cpu: bool
) -> Tensor:
    """Return attention with a mask; without one it is causal, or T is 1 and attends to everything.

    Grouped heads use k and v without copies if a fast kernel can: on a CPU, and on a GPU in half
    precision without a mask. Otherwise PyTorch would fall back to a kernel that stores all scores
    [R, H, T, T]; on a CPU with a mask and gradients, the gradients would have other bits.
    """
    share = q.shape[1] // k.shape[1]
    if share > 1 and q.shape[2] == 1 and not is_cpu:  # a group's heads act as positions
        q_rghk = q.unflatten(1, (-1, share)).squeeze(3)
        return F.scaled_dot_product_attention(q_rghk, k, v, mask, scale=scale).reshape(q.shape)
    is_plain = mask is None or (is_cpu and not torch.is_grad_enabled())
    if share > 1 and not (is_plain and (is_cpu or v.dtype in HALF_DTYPES)):
        k, v, share = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), 1
    # A conditional, since in compiled code with dynamic lengths the comparison is not a bool.
    options = {"is_causal": True} if mask is None and q.shape[2] == k.shape[2] else {}
    options["enable_gqa"] = share > 1
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, **options)


def rotations(
    position_ids: Tensor, head_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [R, 1, T, K / 2] of the angles at `position_ids` [R, T] int64."""
    pairs = torch.arange(0, head_size, 2, dtype=torch.float64, device=position_ids.device)
    frequency = theta ** -(pairs / head_size)  # [K / 2], radians per position
    angles = (position_ids.unsqueeze(-1) * frequency).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Attention(nn.Module):
    """Grouped-query attention, with rotary positions if a rotation is given."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        width, narrow = config.hidden_size, config.kv_heads * self.head_size
        self.q_proj = nn.Linear(width, width, bias=config.bias)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=config.bias)
        self.o_proj = nn.Linear(width, width, bias=config.bias)

    def forward(self, hidden: Tensor, rotation: Rotation, documents: Documents) -> Tensor:
        q = self._heads(self.q_proj(hidden))  # [R, H, T, K]
        k, v = self._heads(self.k_proj(hidden)), self._heads(self.v_proj(hidden))  # [R, G, T, K]
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        attended = attend(q, k, v, documents)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # -1: a tensor group splits the heads over its devices, see `Decoder.tensor_plan`.
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU, or two layers with GELU between them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.inner_size
        self.up_proj = nn.Linear(width, inner, bias=config.bias)
        self.down_proj = nn.Linear(inner, width, bias=config.bias)
        self.gate_proj = None
        if config.activation == "swiglu":
            self.gate_proj = nn.Linear(width, inner, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(hidden), approximate="tanh"))
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # Options of `torch.utils.checkpoint`, see `recomputation`; `None` recomputes nothing.
        self.recomputes: dict[str, Any] | None = None
        self.attention_norm, self.attention = _norm(config), Attention(config)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.feed_forward_norm, self.feed_forward = _norm(config), FeedForward(config)
        self.feed_forward_dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, rotation: Rotation, documents: Documents) -> Tensor:
        inputs = (hidden, rotation, documents)
        if self.recomputes and self.training:  # inside the block, so that fsdp gathers it once
            return checkpoint.checkpoint(self._computed, *inputs, **self.recomputes)
        return self._computed(*inputs)

    def _computed(self, hidden: Tensor, rotation: Rotation, documents: Documents) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), rotation, documents)
        hidden = hidden + self.attention_dropout(attended)
        transformed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self.feed_forward_dropout(transformed)


class Decoder(nn.Module):
    """Decoder from tokens to hidden states; `head` maps these to logits."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.config = config
        self.is_compiled = False
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            self._draw(name, parameter)

    def _draw(self, name: str, weight: Tensor) -> Tensor:
        if weight.dim() == 1:
            return nn.init.zeros_(weight) if name.endswith(".bias") else nn.init.ones_(weight)
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        depth = 2 * self.config.num_layers if is_residual else 1
        return nn.init.normal_(weight, std=INITIAL_STD / depth**0.5)

    def drawn(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and initial weights of a network on `meta`, each drawn on the CPU when it is
        yielded; equal to the weights that the constructor draws on the CPU."""
        for part in self.modules():
            if hasattr(part, "reset_parameters"):  # the same draws as in each layer's constructor
                copy.deepcopy(part).to_empty(device="cpu").reset_parameters()
        for name, parameter in self.named_parameters():
            yield name, self._draw(name, torch.empty_like(parameter, device="cpu"))

    @property
    def recipe(self) -> dict[str, Any]:
        return self.config.recipe

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def tensor_plan(self) -> dict[str, TensorSplit]:
        """Return how a tensor group splits the layers: attention heads, feed-forward channels."""
        parts = ("layers.*.attention", "layers.*.feed_forward")
        units = self.config.num_heads, self.config.kv_heads, self.config.inner_size
        return {**dict.fromkeys(parts, TensorSplit("input")), **splits_of(*parts, *units)}

    def recompute_blocks(self, keeps_products: bool = False) -> None:
        """Recompute activations in the backward pass, see `recomputation`."""
        for layer in self.layers:
            layer.recomputes = recomputation(keeps_products)

    def new_cache(self, room: int = 0) -> KeyValueCache:
        return KeyValueCache(len(self.layers), room)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        document_ids: Tensor | None,
        has_single_documents: bool = False,
        cache: KeyValueCache | None = None,
        inputs_embeds: Tensor | None = None,
        mask: Tensor | None = None,
        bounds: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """Return the hidden states [R, T, D], which `head` maps to logits.

        Args:
            input_ids: [R, T] int64; `None` with `inputs_embeds`.
            position_ids: [R, T] int64, from 0 in every document.
            document_ids: [R, T] int64, ascending within a row, -1 = padding; `None` with a cache.
            has_single_documents: no row holds two documents, so that causal attention suffices.
            cache: from `new_cache`, one document per row; `position_ids` continue from its end.
            inputs_embeds: [R, T, D], rows of `embedding` or other vectors in their place.
            mask: [R, S] bool, only with a cache: false at padding, which is on the left.
            bounds: of the documents, see `documents_of`.
        """
        hidden = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds  # [R, T, D]
        documents = Documents()
        if document_ids is not None and not has_single_documents:
            how = (self.config.head_size, self.is_compiled, bounds)
            documents = documents_of(document_ids, hidden, *how)
        elif mask is not None:  # new positions attend to themselves and to unpadded previous ones
            places = torch.arange(mask.shape[1], device=mask.device)
            new = places[-position_ids.shape[1] :, None]
            documents = Documents(mask=(mask[:, None, None, :] & (places < new)) | (places == new))
        rotation = None
        if self.positions is None:
            sizes = (self.config.head_size, self.config.rope_theta)
            rotation = rotations(position_ids, *sizes, hidden.dtype)
        else:
            hidden = hidden + self.positions(position_ids)
        hidden = self.dropout(hidden)
        for index, layer in enumerate(self.layers):
            if cache is not None:
                documents = documents._replace(past=partial(cache.extended, index))
            hidden = layer(hidden, rotation, documents)
        return self.norm(hidden)


def splits_of(
    attention: str, feed_forward: str, heads: int, groups: int, inner: int
) -> dict[str, TensorSplit]:
    """Return how a tensor group splits the linear layers in these parts of a block."""
    return {
        f"{attention}.q_proj": TensorSplit("columns", "num_heads", heads),
        f"{attention}.[kv]_proj": TensorSplit("columns", "num_kv_heads", groups),
        f"{attention}.o_proj": TensorSplit("rows", "num_heads", heads),
        f"{feed_forward}.[ug]*_proj": TensorSplit("columns", "feed_forward", inner),
        f"{feed_forward}.down_proj": TensorSplit("rows", "feed_forward", inner),
    }


def compile_blocks(network: Any, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each block of a network in place as one graph, without changes to names and
    parameters; compilation fails at a graph break.

    Documents are then separated by a mask on a CPU, too, since code compiled for the documents of
    one batch would not fit the next.
    """
    network.is_compiled = True
    torch.compiler.reset()  # compiled code of earlier networks would count towards PyTorch's limit
    for block in network.blocks():
        block.compile(backend=backend, fullgraph=True)


def recomputation(keeps_products: bool) -> dict[str, Any]:
    """Return options of `torch.utils.checkpoint` that save only the inputs of blocks for the
    backward pass; `keeps_products` also saves the results of matrix products and attention, so that
    none is computed twice. Dropout and results stay the same."""

    def policy(_: Any, operation: Any, *args: Any, **options: Any) -> checkpoint.CheckpointPolicy:
        is_kept, choices = PRODUCTS.match(operation.name()), checkpoint.CheckpointPolicy
        return choices.MUST_SAVE if is_kept else choices.PREFER_RECOMPUTE

    selected = {"context_fn": partial(checkpoint.create_selective_checkpoint_contexts, policy)}
    return {"use_reentrant": False, **(selected if keeps_products else {})}


def _norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


def as_written(network: Any) -> AbstractContextManager[Any]:
    """Run a compiled network in eager mode, since every new length would compile it once more."""
    if not network.is_compiled:  # set_stance would import the compiler
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def check_isolation(network: Any) -> None:
    """Raise RuntimeError if tokens of a `Decoder` or `PretrainedDecoder`, unsharded on any device,
    depend on other documents of the row or on later tokens.

    Training would not fail with such a leak, but its loss would be wrong and a little too low. Two
    documents in one row must have the same hidden states as each alone, and a token's hidden state
    must have no gradient for embeddings of the other document or of later tokens. The test changes
    no modes, gradients or random numbers, and compiles nothing.
    """
    weight = network.embedding.weight
    places = [torch.arange(length) for length in DOCUMENT_LENGTHS]
    positions = torch.cat([*places, torch.zeros(1, dtype=torch.long)])
    ids = torch.tensor([n for n, size in enumerate(DOCUMENT_LENGTHS) for _ in range(size)] + [-1])
    tokens = (torch.arange(len(ids)) * 5 + 1) % weight.shape[0]  # distinct in a large V
    packed = [x[None].to(weight.device) for x in (tokens, positions, ids)]  # [1, T] each
    devices = [weight.device] if weight.device.type == "cuda" else []
    apart = torch.random.fork_rng(devices)
    with evaluating(network), apart, as_written(network), torch.enable_grad():
        leak = _leak(network, packed)
    if leak is not None:
        raise RuntimeError(
            f"{type(getattr(network, 'model', network)).__name__} lets a token see what it must "
            f"not: {leak} (in a self-test with two documents in one row). Its loss would be wrong. "
            "Take a model with full causal attention, such as Llama, Qwen or GPT-2, or a newer "
            "version of transformers."
        )


def _leak(network: Any, packed: list[Tensor]) -> str | None:
    """Return a description of the leak, if any. Args: token, position and document ids [1, T]."""
    leaves: list[Tensor] = []

    def catch(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1]

    with network.embedding.register_forward_hook(catch):
        hidden = network(*packed)  # [1, T, D]
    # Weights differ by channel, as sums and squares of normed states are constant.
    probe = hidden[0] @ torch.arange(hidden.shape[-1], device=hidden.device).cos().to(hidden)  # [T]

    def seen(number: Tensor) -> Tensor:
        """Return which tokens a scalar depends on [T] bool; NaN counts as dependence."""
        return torch.autograd.grad(number, leaves[0], retain_graph=True)[0][0].ne(0).any(-1)

    end = 0
    for length in DOCUMENT_LENGTHS:
        start, end = end, end + length
        tokens, positions, ids = (x[:, start:end] for x in packed)
        with torch.no_grad():
            alone = network(tokens, positions, ids - ids[:, :1])
        apart = float((alone - hidden.detach()[:, start:end]).abs().max() / alone.abs().max())
        if not apart <= TOLERANCES.get(hidden.dtype, HALF_TOLERANCE):
            return f"hidden states differ by {apart:.2g} of the largest one"
        reached = seen(probe[start:end].sum())
        if reached[:start].any() or reached[end:].any():
            return "a token's hidden state depends on another document of its row"
        if seen(probe[end - 2])[end - 1]:
            return "a token's hidden state depends on one that follows it"
    return None
