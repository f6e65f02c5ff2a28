"""A subject and the two networks that put its activations into words and back.

Shapes: B activations, D features, t words, V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.activations.statistics import ActivationStatistics
from datamodules.core.batches import ActivationBatch
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from lit_models.consistency_lens.copies import (
    BaseOptions,
    copy_of,
    freeze_unused,
    share_frozen,
)
from lit_models.consistency_lens.reading import read
from lit_models.consistency_lens.reconstructor import Reconstructor
from lit_models.consistency_lens.subject import Subject
from lit_models.consistency_lens.verbalizer import Injection, Verbalizer, only_words

NEVER = -1  # for the step at which the reference was kept


@dataclass(frozen=True)
class LensOptions:
    """How a lens is built.

    Args:
        num_words: tokens of an explanation.
        num_prompt: learned positions before the activation in the verbalizer's prompt.
        reads_backwards: the reconstructor reads from the last word to the first: explanations
            then begin with what matters most.
        injection: how the activation enters the verbalizer, see `Verbalizer`.
        gives_current_token: the reconstructor is told the word at the activation's position: no
            longer do the words carry all, and every table says so.
        verbalizer: what learns of its copy of the subject.
        reconstructor: as verbalizer.

    Raises:
        ValueError: a number below 1.
    """

    num_words: int = 6
    num_prompt: int = 1
    reads_backwards: bool = True
    injection: Injection = "per_block"
    gives_current_token: bool = False
    verbalizer: BaseOptions = BaseOptions()  # noqa: RUF009 - frozen
    reconstructor: BaseOptions = BaseOptions()  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("num_words", "num_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"lens.{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("verbalizer", "reconstructor"):  # of a checkpoint's plain values
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, BaseOptions(**getattr(self, name)))


class Lens(nn.Module):
    """Subject, verbalizer and reconstructor; and both as they were when they began to learn
    together, which is where the words' meaning is kept from drifting.

    Args:
        subject: stands still.
        tokenizer: of the subject.
        options: how the lens is built.
    """

    def __init__(self, subject: Subject, tokenizer: TextTokenizer, options: LensOptions) -> None:
        super().__init__()
        self.subject, self.options = subject, options
        network, words = subject.network, _words(tokenizer, subject)
        self.begin_id = tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id
        width = network.embedding.weight.shape[1]
        self.register_buffer("mean", torch.zeros(width))  # of the training part
        self.register_buffer("variance", torch.ones(()))
        self.register_buffer("reference_step", torch.tensor(NEVER))
        counts = torch.zeros(len(words), dtype=torch.int64)  # in the training part
        self.register_buffer("token_counts", counts, persistent=False)
        shape = (words, self.begin_id, options.num_words, options.num_prompt, options.injection)
        self.verbalizer = Verbalizer(copy_of(network, options.verbalizer), *shape)
        self.untrained = Verbalizer(network, *shape).requires_grad_(False)
        cut = copy_of(network, options.reconstructor, subject.layer + 1)
        flags = (options.reads_backwards, options.gives_current_token)
        self.reconstructor = Reconstructor(cut, self.begin_id, *flags)
        self._share_frozen()
        self.reference = nn.ModuleDict(
            {name: _reference(getattr(self, name)) for name in ("verbalizer", "reconstructor")}
        )
        self.register_load_state_dict_pre_hook(_with_reference_step)

    def _share_frozen(self) -> None:
        text = torch.full((1, 2), self.begin_id)
        activation = torch.zeros(1, len(self.mean))
        freeze_unused(self.verbalizer, lambda: self.verbalizer(activation, text))
        freeze_unused(self.reconstructor, lambda: self.reconstructor(self.words(text), text[:, 0]))
        for part in (self.verbalizer, self.reconstructor):
            share_frozen(part.network, self.subject.network)

    def take_statistics(self, statistics: ActivationStatistics) -> None:
        """Know the mean and the variance of the training part."""
        self.mean.copy_(torch.from_numpy(statistics.mean))
        self.variance.fill_(statistics.variance)

    @torch.no_grad()
    def keep_reference(self, step: int = 0) -> None:
        """Make verbalizer and reconstructor of now the reference.

        Args:
            step: optimizer step of now; `NEVER` where neither has learnt anything.
        """
        self.reference_step.fill_(step)
        for name, kept in self.reference.items():
            for own, copied in zip(
                getattr(self, name).parameters(), kept.parameters(), strict=True
            ):
                if copied is not own:  # words are shared
                    copied.copy_(own)

    @property
    def has_reference(self) -> bool:
        """Whether the reference was kept of networks that had learnt something."""
        return bool(self.reference_step >= 0)

    def train(self, mode: bool = True) -> "Lens":
        """Train verbalizer and reconstructor; what stands still stays in evaluation mode."""
        super().train(mode)
        for still in (self.subject, self.untrained, self.reference):
            still.eval()
        return self

    def blocks(self) -> list[nn.Module]:
        """Return the repeated layers of all networks."""
        networks = [self.subject.network, self.verbalizer.network, self.reconstructor.network]
        networks += [kept.network for kept in self.reference.values()]
        return [block for network in networks for block in network.blocks()]

    def activation(self, batch: ActivationBatch) -> Tensor:
        """Return [B, D]: what the store says, or else the subject."""
        if "activation" in batch:
            return batch["activation"].to(self.mean.dtype)
        with torch.no_grad():
            found = self.subject.activations(batch["input_ids"])
        rows = torch.arange(len(found), device=found.device)
        return found[rows, batch["position"]]

    def words(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [B, t, D] of words [B, t]."""
        return self.subject.network.embedding(token_ids)

    def language_logits(self, token_ids: Tensor) -> Tensor:
        """Return the subject's logits [B, t, V] float32 of each word of texts [B, t], as the
        beginning of a document; never of what is no word."""
        begin = torch.full_like(token_ids[:, :1], self.begin_id)
        hidden = read(self.subject.network, torch.cat([begin, token_ids[:, :-1]], dim=1))
        return only_words(self.subject.network.head(hidden), self.verbalizer.is_word)

    def unready(self, step: int) -> list[nn.Parameter]:
        """Return the parameters that do not learn yet at an optimizer step."""
        late: list[nn.Parameter] = []
        if step < self.options.verbalizer.unfreeze_at:
            late += self.verbalizer.network.parameters()
        if step < self.options.reconstructor.unfreeze_at:
            late += self.reconstructor.network.parameters()
        return [parameter for parameter in late if parameter.requires_grad]

    def unsaved_names(self) -> set[str]:
        """Return the names of all that belongs to the subject, which no checkpoint holds."""
        own = {id(p) for p in [*self.subject.parameters(), *self.untrained.parameters()]}
        return {
            name
            for name, value in self.state_dict(keep_vars=True).items()
            if id(value) in own or name.startswith(("subject.", "untrained."))
        }


def _with_reference_step(lens: nn.Module, content: dict[str, Any], prefix: str, *_: Any) -> None:
    """Of older checkpoints nobody knows whether the reference was kept."""
    content.setdefault(f"{prefix}reference_step", torch.tensor(NEVER))


def _reference(part: nn.Module) -> nn.Module:
    """A frozen copy of a network, which shares what stands still."""
    shared: dict[int, Any] = {id(p): p for p in part.parameters() if not p.requires_grad}
    return copy.deepcopy(part, shared).requires_grad_(False)


def _words(tokenizer: TextTokenizer, subject: Subject) -> Tensor:
    """[V] bool: the tokenizer's tokens but for special ones."""
    is_word = torch.zeros(subject.network.head.weight.shape[0], dtype=torch.bool)
    is_word[: tokenizer.vocab_size] = True
    is_word[torch.from_numpy(tokenizer.special_ids)] = False
    return is_word
