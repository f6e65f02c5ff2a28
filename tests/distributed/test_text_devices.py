"""Language models on ragged documents: one gradient, however it is computed."""

import pytest
import torch

from tests.distributed.launch import run
from tests.distributed.text_gradient import write_documents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Return the gradients by `processes-micro batch`."""
    folder = tmp_path_factory.mktemp("gradients")
    documents = folder / "documents.jsonl"
    write_documents(documents)
    script = ["-m", "tests.distributed.text_gradient", str(folder), str(documents)]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for command in ([*script, "8", "4", "1"], [*two, *script, "2"]):
        done = run(*command)
        assert done.returncode == 0, done.stdout[-4000:]
    return {path.stem: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}


@pytest.mark.parametrize("other", ["1-4", "1-1", "2-2"])
def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_cut(
    gradients: dict[str, dict[str, torch.Tensor]], other: str
) -> None:
    whole = gradients["1-8"]
    norm = torch.stack([g.norm() for g in whole.values()]).norm()
    assert norm > 0.1
    for name, value in gradients[other].items():
        assert (value - whole[name]).abs().max() <= 1e-5 * norm, name
