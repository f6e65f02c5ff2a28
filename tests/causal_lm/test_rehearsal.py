"""A language model that is compiled has the code of its own sizes after a rehearsal."""

from functools import partial, partialmethod
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lit_models.causal_lm.module import ComputationOptions, LitCausalLM
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.training import default_callbacks
from lit_models.training.memory import Rehearsal
from tests.causal_lm.tiny import SENTENCE, SMALL, trained_on_blocks


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_what_a_rehearsal_compiled_for_many_sizes_does_not_serve_the_run(tmp_path, monkeypatch):
    compiled = []  # whether its sizes are open, of each graph

    def noting(graph, inputs):
        values = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        sizes = [size for value in values for size in getattr(value, "shape", [value])]
        compiled.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph

    class Rehearsed(Callback):
        def on_sanity_check_start(self, trainer, pl_module):
            compiled.append("rehearsed")

    compile_blocks = partialmethod(Decoder.compile_blocks, backend=noting)
    monkeypatch.setattr(Decoder, "compile_blocks", compile_blocks)
    torch._dynamo.reset()
    endless = SimpleNamespace(capacity_bytes=100, start=lambda: None, peak_bytes=lambda: 1)
    first, *others = default_callbacks()
    module = LitCausalLM(
        partial(torch.optim.AdamW, lr=0.01),
        network=DecoderConfig(dropout=0.1, **SMALL),
        computation=ComputationOptions(compile=True),
    )
    trained_on_blocks(
        tmp_path / "run",
        module,
        {"micro_batch_size": "auto"},
        content=SENTENCE * 8,
        max_epochs=1,
        callbacks=[first, Rehearsed(), Rehearsal(endless), *others],
    )
    torch._dynamo.reset()
    begun = compiled.index("rehearsed")
    assert True in compiled[:begun]
    assert compiled[begun + 1] is False
