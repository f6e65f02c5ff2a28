"""What the loss holds at once, and in which precision it computes."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_models.causal_lm.loss import LossOptions, language_model_loss, sample_nats
from tests.causal_lm.test_loss import D, R, T, a_batch, direct, inputs


def test_autocast_multiplies_in_half_and_sums_in_full_precision():
    batch = a_batch()
    hidden, head = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = language_model_loss(hidden, head, batch, LossOptions(chunk_size=4))["tokens"]
    assert loss.total.dtype == torch.float32
    loss.total.backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.float32
    reference = inputs(torch.float32)
    rounded = [x.bfloat16().float() for x in reference]
    expected = direct(*rounded, batch, LossOptions())
    assert loss.total.item() == pytest.approx(expected.item(), rel=5e-3)
    expected.backward()
    torch.testing.assert_close(head.grad, reference[1].grad, rtol=0.05, atol=0.05)


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 8)
        return result


@pytest.mark.parametrize("training", [True, False])
def test_no_tensor_is_larger_than_a_chunk_or_the_head(training):
    num_tokens, chunk = 400, 2
    batch = a_batch(num_tokens=num_tokens)
    hidden, head = inputs(num_tokens=num_tokens)
    with Largest() as seen, torch.set_grad_enabled(training):
        options = LossOptions(0.1, 0.01, chunk)
        if training:
            language_model_loss(hidden, head, batch, options)["tokens"].total.backward()
        else:
            sample_nats(hidden, head, batch, options)
    assert seen.elements <= max(num_tokens * D, num_tokens * chunk)
    with Largest() as seen:
        direct(hidden, head, batch, LossOptions())
    assert seen.elements >= R * T * num_tokens
