"""Verbalizer, reconstructor, the lens that combines them with a subject, and its readings.

In a lens of several layers, values per layer have a first dimension of layers, none for a single
one, and `layer` [B] is the index of each row's layer among the lens's, `None` for a single one.
Shapes: B activations, D features, L blocks or layers, P positions of the prompt, t words, V
vocabulary, k explanations of each activation.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.core.batches import ActivationBatch
from datamodules.core.plan import check_range
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.pretrained import Network
from lit_models.consistency_lens.subject import (
    BaseOptions,
    Subject,
    copy_of,
    embedded,
    freeze_unused,
    outputs_of,
    read,
)
from lit_models.training.dropout import mixed
from lit_models.training.metrics import in_float32

_MANTISSA = 24  # bits of a uniform number in float32


def gumbel_noise(key: Tensor, place: int, vocab_size: int) -> Tensor:
    """Return Gumbel noise [B, V] float32, the same on any device for equal keys [B] int64 and an
    equal place of the word in the explanation."""
    uniform = uniforms(mixed(key, place), vocab_size)
    return -torch.log(-torch.log(uniform)).float()


def uniforms(key: Tensor, number: int) -> Tensor:
    """Return uniform numbers [B, number] float64 in (0, 1), determined by `key` [B] int64."""
    places = torch.arange(number, device=key.device)
    bits = mixed(key[:, None], places) & ((1 << _MANTISSA) - 1)
    return (bits.double() + 0.5) / (1 << _MANTISSA)


def straight_through(logits: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
    """Return one-hot words [B, V] with the gradient of a softmax at `temperature`.

    Args:
        logits: [B, V], in float32 or wider.
        noise: [B, V]; `None` takes the most probable word.
        temperature: above 0.

    Source: Jang et al. 2017, "Categorical Reparameterization with Gumbel-Softmax", section 2.2.
    """
    scores = logits if noise is None else logits + noise.to(logits.dtype)
    hard = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    if not scores.requires_grad:
        return hard
    soft = (scores / temperature).softmax(-1)
    return hard + soft - soft.detach()


IMPOSSIBLE = -1e4  # logit of excluded tokens: finite, as 0 x infinity would be NaN


def of_layer(table: Tensor, layer: Tensor | None) -> Tensor:
    """Return the entries [B, ...] of each row's layer of a table [L, ...]; for a single layer, the
    table [...]."""
    return table if layer is None else table[layer]


def of_rows(values: Sequence[Tensor], layer: Tensor | None) -> Tensor:
    """Return for each row the value of its layer [B, ...]. Args: values [B, ...] per layer."""
    if layer is None:
        return values[0]
    return torch.stack([*values])[layer, torch.arange(len(layer), device=layer.device)]


def stack(values: Sequence[Tensor]) -> Tensor:
    """Return the layers' values stacked; for a single layer, its value."""
    return values[0] if len(values) == 1 else torch.stack([*values])


def index_of(layers: Sequence[int], layer: int | None) -> int:
    """Return the index of a layer among the lens's; `None` stands for a single layer."""
    if layer is None and len(layers) == 1:
        return 0
    if layer not in layers:
        raise ValueError(
            f"layer {layer} is none of this lens's, which explains {', '.join(map(str, layers))}; "
            "name one of them with layer."
        )
    return layers.index(layer)


class LayerMaps(nn.Module):
    """Affine map per layer, initially the identity; its bias lets a network identify the layer."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width).repeat(num_layers, 1, 1))  # [L, D, D]
        self.bias = nn.Parameter(torch.zeros(num_layers, width))

    def forward(self, values: Tensor, layer: Tensor) -> Tensor:
        """Return the mapped values [B, D]."""
        every = torch.einsum("bd,led->lbe", values, self.weight) + self.bias[:, None]
        return of_rows(every.unbind(), layer)


class Explanation(NamedTuple):
    """Words that explain activations.

    token_ids [B, t] int64; embeddings [B, t, D], which carry gradients; logits [B, t, V] float32,
    from which the words are chosen.
    """

    token_ids: Tensor
    embeddings: Tensor
    logits: Tensor


class Verbalizer(nn.Module):
    """Copy of the subject that continues a prompt, which contains the activation, with words.

    The prompt consists of learned vectors and an empty position, the marker. At the marker, the
    activation replaces the input of all blocks, or of the first `num_patched` ones, after an affine
    map per block, which is initially the identity. Words of the prompt around the marker are
    learned vectors, too, initialised with the words' embeddings.

    Args:
        network: a copy of the subject, or the subject itself.
        is_word: [V] bool, tokens that an explanation may contain.
        begin_id: token whose embedding initialises the learned positions.
        options: number of words t, learned positions, and blocks that take the activation.
        around: tokens of the prompt's words before and after the marker.
        layers: number of layers; with several, an affine map per layer comes first.
    """

    def __init__(
        self,
        network: Network,
        is_word: Tensor,
        begin_id: int,
        options: "LensOptions",
        around: tuple[list[int], list[int]] = ([], []),
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.network, self.num_words = network, options.num_words
        ids = [[begin_id] * options.num_prompt + around[0], around[1]]
        with torch.no_grad():
            start, end = (network.embedding(torch.tensor(one, dtype=torch.int64)) for one in ids)
        self.prompt = nn.Parameter(start.clone())  # before the marker, [n, D]
        self.behind = nn.Parameter(end.clone()) if len(end) else None
        width, num_layers = start.shape[1], len(network.blocks())
        num_layers = min(options.num_patched or num_layers, num_layers)
        self.map_weight = nn.Parameter(torch.eye(width).repeat(num_layers, 1, 1))  # [L, D, D]
        self.map_bias = nn.Parameter(torch.zeros(num_layers, width))
        self.entry = LayerMaps(layers, width) if layers > 1 else None
        self.register_buffer("is_word", is_word, persistent=False)

    def forward(self, activation: Tensor, token_ids: Tensor, layer: Tensor | None = None) -> Tensor:
        """Return the logits [B, t, V] of each word of texts [B, t] int64 given the previous words,
        for activations [B, D] of layers [B]."""
        previous = self.network.embedding(token_ids[:, :-1])
        start = self._prompt(len(activation))
        with self._injected(activation, layer):
            hidden = read(self.network, None, torch.cat([start, previous], dim=1))
        return self._logits(hidden[:, start.shape[1] - 1 :])

    def explain(
        self,
        activation: Tensor | None,
        noise_key: Tensor | None = None,
        temperature: float = 1.0,
        rows: int = 1,
        spread: float = 1.0,
        layer: Tensor | None = None,
    ) -> Explanation:
        """Return an explanation of each activation.

        Args:
            activation: [B, D]; `None` leaves the marker empty, as a control.
            noise_key: [B] int64, key of random draws; `None` always takes the most probable word.
            temperature: of the gradient, see `straight_through`.
            rows: B if there is no activation.
            spread: temperature of random draws.
            layer: [B] int64.
        """
        start = self._prompt(rows if activation is None else len(activation))
        cache, end = self.network.new_cache(), start.shape[1]
        with self._injected(activation, layer):
            hidden = read(self.network, None, start, cache)
        words: list[tuple[Tensor, Tensor, Tensor]] = []
        while True:
            logits = self._logits(hidden[:, -1])  # [B, V]
            noise = None
            if noise_key is not None:
                noise = spread * gumbel_noise(noise_key, len(words), logits.shape[-1])
            word = straight_through(logits, noise, temperature)
            token_ids = word.argmax(-1)
            if word.requires_grad:
                embedding = embedded(self.network, word)
            else:  # exact, in any precision
                embedding = self.network.embedding(token_ids)
            words.append((token_ids, embedding, logits))
            if len(words) == self.num_words:
                return Explanation(*(torch.stack(each, 1) for each in zip(*words, strict=True)))
            hidden = read(self.network, None, embedding[:, None], cache, end + len(words) - 1)

    def _prompt(self, rows: int) -> Tensor:
        start = F.pad(self.prompt, (0, 0, 0, 1))  # appends the marker
        whole = start if self.behind is None else torch.cat([start, self.behind])
        return whole.expand(rows, -1, -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return only_words(self.network.head(hidden), self.is_word)

    @contextmanager
    def _injected(self, activation: Tensor | None, layer: Tensor | None) -> Iterator[None]:
        """Replace the marker in the input of each block with a map by the mapped activation."""
        if activation is None:
            yield
            return
        entering = activation.to(self.map_weight.dtype)
        if self.entry is not None:
            entering = self.entry(entering, layer)
        mapped = torch.einsum("bd,led->lbe", entering, self.map_weight) + self.map_bias[:, None]
        place = len(self.prompt)

        def enter(entering: Tensor, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            entered = entering[:, None].to(hidden.dtype)
            hidden = torch.cat([hidden[:, :place], entered, hidden[:, place + 1 :]], dim=1)
            if args:
                return (hidden, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": hidden}

        with ExitStack() as hooks:
            for block, entering in zip(self.network.blocks(), mapped, strict=False):
                hook = partial(enter, entering)
                hooks.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
            yield


def only_words(logits: Tensor, is_word: Tensor) -> Tensor:
    """Return logits [..., V], in float32 or wider, with tokens outside `is_word` [V] excluded."""
    return in_float32(logits).masked_fill(~is_word, IMPOSSIBLE)


class Reconstructor(nn.Module):
    """Lowest blocks of a copy of the subject, which read a learned start and then the words in
    reverse, and an affine map of the layer's output at the last position. Each layer has its own
    start, initially the embedding of `begin_id`, and its own map, initially the identity."""

    def __init__(self, network: Network, begin_id: int, layers: Sequence[int] = (-1,)) -> None:
        super().__init__()
        self.network, self.layers = network, layers
        with torch.no_grad():
            start = network.embedding(torch.tensor([begin_id]))
        self.start = nn.Parameter(start.repeat(len(layers), 1))  # [L, D]
        width = start.shape[1]
        self.map = nn.Linear(width, width) if len(layers) == 1 else LayerMaps(len(layers), width)
        if isinstance(self.map, nn.Linear):
            nn.init.eye_(self.map.weight)
            nn.init.zeros_(self.map.bias)

    def forward(self, words: Tensor, layer: Tensor | None = None) -> Tensor:
        """Return the rebuilt activations [B, D] of layers [B] from the subject's embeddings of
        words [B, t, D]."""
        start = of_layer(self.start, layer)  # [1, D] or [B, D]
        texts = torch.cat([start[:, None].expand(len(words), -1, -1), words.flip(1)], dim=1)
        blocks = [self.network.blocks()[each] for each in self.layers]
        outputs = outputs_of(blocks, lambda: read(self.network, None, texts))
        last = of_rows([one[:, -1] for one in outputs], layer)
        return self.map(last) if layer is None else self.map(last, layer)


MARKER = "{activation}"  # placeholder in `LensOptions.prompt`
NEVER = -1  # `reference_step` without a reference


@dataclass(frozen=True)
class LensOptions:
    """Shape of a lens.

    Args:
        num_words: tokens of an explanation.
        num_prompt: learned positions before the activation in the verbalizer's prompt.
        verbalizer: what to train of the verbalizer's copy of the subject.
        reconstructor: the same for the reconstructor's copy.
        num_patched: number of the verbalizer's first blocks that take the activation in their
            input; `None` takes all.
        prompt: words around the activation, such as "The text says {activation}:"; `None` for none.
    """

    num_words: int = 6
    num_prompt: int = 1
    verbalizer: BaseOptions = BaseOptions()  # noqa: RUF009 - frozen
    reconstructor: BaseOptions = BaseOptions()  # noqa: RUF009
    num_patched: int | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        names = ("num_words", "num_prompt", "num_patched")
        check_range("lens", 1, **{name: getattr(self, name) for name in names})
        if self.prompt is not None and self.prompt.count(MARKER) != 1:
            raise ValueError(
                f"lens.prompt must name the activation's place once, as {MARKER}, got "
                f"{self.prompt!r}."
            )
        for name in ("verbalizer", "reconstructor"):  # dicts come from a checkpoint
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, BaseOptions(**getattr(self, name)))

    def tokens_around(self, tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt's words before and after the activation."""
        if self.prompt is None:
            return [], []
        before, _, behind = self.prompt.partition(MARKER)
        return tokenizer.encode(before).tolist(), tokenizer.encode(behind).tolist()


class Lens(nn.Module):
    """Subject, verbalizer and reconstructor; and `reference`, a copy of both from the step at which
    they begin to learn together, which keeps the words' meaning from drifting."""

    def __init__(self, subject: Subject, tokenizer: TextTokenizer, options: LensOptions) -> None:
        super().__init__()
        self.subject, self.options = subject, options
        network = subject.network
        words = torch.zeros(network.head.weight.shape[0], dtype=torch.bool)  # no special tokens
        words[: tokenizer.vocab_size] = True
        words[torch.from_numpy(tokenizer.special_ids)] = False
        self.begin_id = tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id
        width, num_layers = network.embedding.weight.shape[1], len(subject.layers)
        of_each = (num_layers,) if num_layers > 1 else ()
        self.register_buffer("mean", torch.zeros(*of_each, width))  # of the training part
        self.register_buffer("variance", torch.ones(of_each))
        self.register_buffer("reference_step", torch.tensor(NEVER))
        counts = torch.zeros(len(words), dtype=torch.int64)  # in the training part
        self.register_buffer("token_counts", counts, persistent=False)
        self.register_buffer("told_map", None, persistent=False)  # from `loss.told_map`
        shape = (words, self.begin_id, options, options.tokens_around(tokenizer), num_layers)
        self.verbalizer = Verbalizer(copy_of(network, options.verbalizer), *shape)
        self.untrained = Verbalizer(network, *shape).requires_grad_(False)
        cut = copy_of(network, options.reconstructor, subject.layers[-1] + 1)
        self.reconstructor = Reconstructor(cut, self.begin_id, subject.layers)
        text = torch.full((num_layers, 2), self.begin_id)
        layer, mean = torch.arange(num_layers) if of_each else None, self.mean.view(-1, width)
        freeze_unused(self.verbalizer, lambda: self.verbalizer(mean, text, layer))
        freeze_unused(self.reconstructor, lambda: self.reconstructor(self.words(text), layer))
        for part in (self.verbalizer, self.reconstructor):  # share frozen weights with the subject
            for name, parameter in list(part.network.named_parameters(remove_duplicate=False)):
                if not parameter.requires_grad:
                    owner, _, last = name.rpartition(".")
                    setattr(part.network.get_submodule(owner), last, network.get_parameter(name))
        self.reference = nn.ModuleDict()  # copies that share weights which are already frozen
        for name, part in (("verbalizer", self.verbalizer), ("reconstructor", self.reconstructor)):
            shared: dict[int, Any] = {id(p): p for p in part.parameters() if not p.requires_grad}
            self.reference[name] = copy.deepcopy(part, shared).requires_grad_(False)

    @torch.no_grad()
    def keep_reference(self, step: int = 0) -> None:
        """Copy verbalizer and reconstructor to the reference. Args: step: optimizer step, or
        `NEVER` if both are untrained."""
        self.reference_step.fill_(step)
        for name, kept in self.reference.items():
            learner = getattr(self, name)
            for own, copied in zip(learner.parameters(), kept.parameters(), strict=True):
                if copied is not own:  # embeddings of words are shared
                    copied.copy_(own)

    def train(self, mode: bool = True) -> "Lens":
        """Set the mode of verbalizer and reconstructor; frozen parts stay in eval mode."""
        super().train(mode)
        for still in (self.subject, self.untrained, self.reference):
            still.eval()
        return self

    def blocks(self) -> list[nn.Module]:
        parts: Any = (self.subject, self.verbalizer, self.reconstructor, *self.reference.values())
        return [block for part in parts for block in part.network.blocks()]

    def activation(self, batch: ActivationBatch) -> Tensor:
        """Return activations [B, D] from a batch on any device, if it has them, else from the
        subject."""
        if "activation" in batch:
            return batch["activation"].to(self.mean)
        device, layer = self.mean.device, batch.get("layer")
        with torch.no_grad():
            hidden = self.subject.of_layers(batch["input_ids"].to(device))
        rows = torch.arange(len(hidden[0]), device=device)
        of_each = [one[rows, batch["position"].to(device)] for one in hidden]
        return of_rows(of_each, None if layer is None else layer.to(device))

    def rows_of(self, index: int, number: int) -> Tensor | None:
        """Return `layer` for `number` rows of one layer."""
        is_single = len(self.subject.layers) == 1
        return None if is_single else torch.full((number,), index, device=self.mean.device)

    def words(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [B, t, D] of words [B, t]."""
        return self.subject.network.embedding(token_ids)

    def language_logits(self, token_ids: Tensor) -> Tensor:
        """Return the subject's logits [B, t, V] float32 of each word of texts [B, t] at the start
        of a document; tokens that are no words are excluded."""
        begin = torch.full_like(token_ids[:, :1], self.begin_id)
        hidden = read(self.subject.network, torch.cat([begin, token_ids[:, :-1]], dim=1))
        return only_words(self.subject.network.head(hidden), self.verbalizer.is_word)


DRAW = 4  # first key of random draws; `controls` uses the lower keys
AT_ONCE = 64  # activations per pass


def best_reading(
    lens: Lens, activation: Tensor, key: Tensor, number: int, layer: Tensor | None = None
) -> Explanation:
    """Return for each activation [B, D] of layers [B] the one of `number` explanations that
    rebuilds it best: the most probable words, which win ties, and random draws keyed by `key` [B].
    """
    draws = range(number - 1)
    keys = [None, *(mixed(key, DRAW + draw) for draw in draws)]
    drafts = [lens.verbalizer.explain(activation, one, layer=layer) for one in keys]
    if not draws:
        return drafts[0]
    rebuilt = [lens.reconstructor(one.embeddings, layer) for one in drafts]
    errors = torch.stack([(in_float32(r) - activation).square().sum(-1) for r in rebuilt])  # [k, B]
    best, rows = errors.argmin(0), torch.arange(len(activation), device=activation.device)
    return Explanation(*(torch.stack(each)[best, rows] for each in zip(*drafts, strict=True)))


def worth(
    lens: Lens, true: Tensor, explanation: Explanation, layer: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, cosine and fve [B] of explanations, as in `Reading`."""
    chosen = explanation.logits.log_softmax(-1).gather(2, explanation.token_ids[..., None])
    one, rebuilt = true.double(), lens.reconstructor(explanation.embeddings, layer).double()
    mean = of_layer(lens.mean, layer).double()
    error, spread = ((one - guess).square().sum(-1) for guess in (rebuilt, mean))
    return chosen.mean((1, 2)).exp(), F.cosine_similarity(rebuilt, one), 1 - error / spread


@dataclass(frozen=True)
class Reading:
    """Explanation of the activation at one token of a text.

    Args:
        position: of the token, from 0; a begin-of-text token counts.
        token: its text.
        explanation: the words.
        confidence: geometric mean of the words' probabilities, 0 to 1.
        cosine: similarity of the rebuilt and the true activation.
        fve: 1 - squared error / squared distance from the training mean, of this activation.
        layer: of the subject.
    """

    position: int
    token: str
    explanation: str
    confidence: float
    cosine: float
    fve: float
    layer: int
