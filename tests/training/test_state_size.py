"""The size of a network whose parts have several dtypes, such as adapters on a frozen base."""

from lit_models.training.memory import gathered_bytes, gradient_bytes, parameter_bytes
from lit_models.training.state_size import sharded_groups, size_of
from tests.training.test_memory import Layers


def test_what_stands_still_in_another_dtype_has_its_own_bytes():
    module = Layers()
    module.configure_model()
    first = module.layers[0]
    for parameter in first.parameters():
        parameter.requires_grad_(False).data = parameter.data.bfloat16()
    held = sum(parameter.nbytes for parameter in module.parameters())
    frozen = sum(parameter.numel() for parameter in first.parameters())
    assert held == 1400 * 4 - frozen * 2
    size = size_of(module)
    assert parameter_bytes(size) == held
    assert gradient_bytes(size) == 4 * (1400 - frozen)
    assert gathered_bytes(size) == max(-(-600 * held // 1400) + 600 * 4, held)
    groups = sharded_groups(module)
    assert sum(trained for trained, _ in groups) == 1400 - frozen
    assert sum(still for _, still in groups) == frozen // 2  # of four bytes each
    assert parameter_bytes(size_of(module, "bf16-true")) == 1400 * 2
