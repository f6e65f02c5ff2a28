"""Methods for Python of every family's module: an untrained one, and one text for many."""

from functools import partial
from typing import Any

import pytest
import torch

import lit_models
from lit_models.consistency_lens.loss import LensLosses
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.training import ExactModule

LENS = {"subject": SubjectOptions("folder"), "losses": LensLosses()}
METHODS = [
    ("LitOccupationCoder", "code", (["smith"],), {}),
    ("LitSeq2Seq", "translate", (["smth"],), {}),
    ("LitCausalLM", "generate", (["the"],), {}),
    ("LitCausalLM", "token_nats", ("the",), {}),
    ("LitConsistencyLens", "explain", (["the"],), LENS),
    ("LitConsistencyLens", "readings", (["the"],), LENS),
    ("LitTextScorer", "score", (["salt"],), {}),
    ("LitRanker", "rank", ("salt", ["iron"]), {}),
    ("LitRetriever", "encode", (["salt"], True), {}),
    ("LitSparseRetriever", "encode", (["salt"], True), {}),
    ("LitSnippetWriter", "write", (["salt"],), {}),
]


def module_of(name: str, options: dict[str, Any]) -> ExactModule:
    return getattr(lit_models, name)(optimizer=partial(torch.optim.AdamW, lr=0.1), **options)


@pytest.mark.parametrize(("name", "method", "given", "options"), METHODS)
def test_an_untrained_module_says_so(name, method, given, options):
    module = module_of(name, options)
    with pytest.raises(RuntimeError, match=f"this {name} has not been trained: load a run's check"):
        getattr(module, method)(*given)
    module.load_state_dict({"network.weight": torch.zeros(1)})  # as ddp_spawn hands them over
    with pytest.raises(RuntimeError, match=f"this {name} was trained by spawned processes: load"):
        getattr(module, method)(*given)


@pytest.mark.parametrize(
    ("name", "method", "given", "options"), [m for m in METHODS if m[1] != "token_nats"]
)
def test_one_text_in_the_place_of_a_list_is_refused(name, method, given, options):
    """Else each of its letters would be one."""
    module = module_of(name, options)
    module.is_built = True  # it is refused before anything is computed
    texts = [value[0] if isinstance(value, list) else value for value in given]
    with pytest.raises(ValueError, match="texts must be a list of texts, got one string"):
        getattr(module, method)(*texts)
