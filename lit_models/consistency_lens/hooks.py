"""Reading and replacing what goes into a block or comes out of it, in any network with `blocks`.

The place that is read is the place that is written: the output of a block itself, for the last
one too, and never the hidden states that a model reports, which its final norm may have changed.
Shapes: R rows, T positions, D features.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Edit = Callable[[Tensor], Tensor]


@contextmanager
def output_edited(block: nn.Module, edit: Edit) -> Iterator[None]:
    """Pass the output [R, T, D] of a block through `edit`, which may also only look at it."""

    def hook(module: nn.Module, given: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # of some models of transformers
            return (edit(output[0]), *output[1:])
        return edit(output)

    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def inputs_edited(blocks: list[nn.Module], edits: list[Edit]) -> Iterator[None]:
    """Pass the input [R, T, D] of each block through its edit."""

    def hook_of(edit: Edit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (edit(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": edit(kwargs["hidden_states"])}

        return hook

    handles = [
        block.register_forward_pre_hook(hook_of(edit), with_kwargs=True)
        for block, edit in zip(blocks, edits, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def output_kept(block: nn.Module) -> Iterator[list[Any]]:
    """Collect what a block returns, as it returns it: [R, T, D], or a tuple that begins with it."""
    kept: list[Any] = []
    handle = block.register_forward_hook(lambda module, given, output: kept.append(output))
    try:
        yield kept
    finally:
        handle.remove()


@contextmanager
def outputs_given(blocks: list[nn.Module], kept: list[Any]) -> Iterator[None]:
    """Let blocks return what was kept last of one of them, without computing anything.

    Args:
        blocks: of a network.
        kept: of `output_kept`, there at the latest when the first of the blocks is called.
    """

    def given(*args: Any, **kwargs: Any) -> Any:
        return kept[-1]

    earlier = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = given  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block, own in zip(blocks, earlier, strict=True):
            if own is None:
                del block.forward  # that of the class is back
            else:
                block.forward = own  # type: ignore[method-assign]
