"""Python methods of every family's module."""

from functools import partial

import pytest
import torch

import lit_models
from lit_models.consistency_lens.loss import LensLosses
from lit_models.consistency_lens.subject import SubjectOptions

LENS = {"subject": SubjectOptions("folder"), "losses": LensLosses()}


@pytest.mark.parametrize(
    ("name", "method", "given"),
    [
        ("LitOccupationCoder", "code", {"texts": ["smith"]}),
        ("LitSeq2Seq", "translate", {"texts": ["smth"]}),
        ("LitCausalLM", "generate", {"prompts": ["the"]}),
        ("LitCausalLM", "token_nats", {"prompt": "the"}),
        ("LitConsistencyLens", "explain", {"given": ["the"]}),
        ("LitConsistencyLens", "readings", {"texts": ["the"]}),
        ("LitTextScorer", "score", {"texts": ["salt"]}),
        ("LitRanker", "rank", {"documents": ["salt"], "query": "iron"}),
        ("LitRetriever", "encode", {"texts": ["salt"], "is_query": True}),
        ("LitSparseRetriever", "encode", {"texts": ["salt"], "is_query": True}),
        ("LitSnippetWriter", "write", {"pages": ["salt"]}),
    ],
)
def test_an_untrained_module_says_so_and_one_text_is_no_list_of_letters(name, method, given):
    options = LENS if name == "LitConsistencyLens" else {}
    module = getattr(lit_models, name)(optimizer=partial(torch.optim.AdamW, lr=0.1), **options)
    call = partial(getattr(module, method), **given)
    with pytest.raises(RuntimeError, match=f"this {name} has not been trained: load a run's check"):
        call()
    module.load_state_dict({"network.weight": torch.zeros(1)})  # as ddp_spawn returns them
    with pytest.raises(RuntimeError, match=f"this {name} was trained by spawned processes: load"):
        call()
    module.is_built = True  # the error comes before anything is computed
    for role, (text,) in ((k, v) for k, v in given.items() if isinstance(v, list)):
        with pytest.raises(ValueError, match=rf"list of texts, got one string: write \['{text}'\]"):
            call(**{role: text})
