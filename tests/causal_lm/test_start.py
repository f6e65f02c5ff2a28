"""A loaded model, or weights that a run begins with: made ready for training, and what they fit."""

import pytest
import torch

from datamodules.tokenizers.text import TokenizerOptions
from lit_models.causal_lm import module as module_file
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.module import ComputationOptions, LitCausalLM
from lit_models.causal_lm.network import Decoder, DecoderConfig, check_isolation
from tests.causal_lm.test_resume import LORA, SGD, SHAPE, model, run
from tests.toy import ledger_lines

LEARNED = {"positions": "learned"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint that began with the weights of another one, which has gone."""
    folder = tmp_path_factory.mktemp("runs")
    first = run(folder / "first", model())
    second = run(folder / "second", model(init_from=str(first)), steps=2)
    first.unlink()  # no training from the second one needs it
    return second


@pytest.fixture
def isolation_tests(monkeypatch):
    """The networks that were tested."""
    tested = []
    monkeypatch.setattr(
        module_file, "check_isolation", lambda n: (tested.append(n), check_isolation(n))
    )
    return tested


def test_a_loaded_model_is_made_ready_for_training(trained, tmp_path, isolation_tests):
    computation = ComputationOptions(activation_checkpointing=True)
    module = LitCausalLM.load_from_checkpoint(
        trained, optimizer=SGD, freeze=["embedding.*"], computation=computation
    )
    before = torch.load(trained, weights_only=True)["state_dict"]
    run(tmp_path / "run", module)
    assert all(block.recomputes for block in module.blocks())
    assert isolation_tests == [module.network]
    after = {name: value.float() for name, value in module.state_dict().items()}
    changed = {n for n, value in before.items() if not torch.equal(after[n], value.float())}
    assert changed
    assert not {"network.embedding.weight", "network.head.weight"} & changed


def test_a_training_after_a_validation_is_made_ready(tmp_path, isolation_tests):
    module = model(freeze=["layers.*"])
    run(tmp_path / "run", module, "validate")
    assert not isolation_tests
    run(tmp_path / "run", module)
    assert len(isolation_tests) == 1
    assert not any(p.requires_grad for p in module.network.layers.parameters())


def test_compiled_blocks_are_tested_as_they_were_written():
    calls = []
    network = Decoder(DecoderConfig(vocab_size=30, hidden_size=16, num_heads=2))

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    network.compile_blocks(backend)
    check_isolation(network)
    assert not calls
    assert network.is_compiled


def test_a_loaded_model_is_not_trained_on_other_tokens(trained, tmp_path):
    module = LitCausalLM.load_from_checkpoint(trained, optimizer=SGD)
    with pytest.raises(ValueError, match="trained with another tokenizer than that of the data"):
        run(tmp_path / "run", module, tokenizer=TokenizerOptions(kind="characters"))


@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_context_beyond_learned_positions_is_refused(tmp_path, verb, is_loaded):
    written = run(tmp_path / "trained", model(**LEARNED))
    if is_loaded:
        module, path = LitCausalLM.load_from_checkpoint(written, optimizer=SGD), None
    else:
        module, path = model(**LEARNED), written
    with pytest.raises(ValueError, match="context_length 17 is longer than the network's 16"):
        run(tmp_path / "run", module, verb, 2, path, context_length=17)


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ({}, {"num_heads": 4}, "network.num_heads 2 there and 4 here"),
        ({"lora": LORA}, {"lora": LoraOptions(["v_proj"], 2, 16.0)}, "lora.layers"),
        ({"tied": False}, {}, "network.tied False there and True here"),
    ],
)
def test_weights_of_another_function_are_no_start(tmp_path, there, here, message):
    written = run(tmp_path / "trained", model(**there))
    with pytest.raises(ValueError, match=f"init_from .* with other options.*{message}"):
        run(tmp_path / "run", model(**here, init_from=str(written)))


def test_a_start_may_add_adapters_and_part_the_head(tmp_path):
    written = run(tmp_path / "trained", model(lora=LORA))
    more = LoraOptions(["q_proj", "v_proj"], 2, 16.0, base_dtype="bfloat16")
    run(tmp_path / "run", model(lora=more, init_from=str(written)))
    plain = run(tmp_path / "plain", model())
    parted = model(tied=False, init_from=str(plain))
    run(tmp_path / "parted", parted)


def test_the_command_line_knows_the_checkpoint_beforehand(tmp_path, monkeypatch, unisono):
    monkeypatch.chdir(tmp_path)
    start, text = run(tmp_path / "start", model()), tmp_path / "start" / "text.txt"
    shape = [f"--model.network.{name}={value}" for name, value in SHAPE.items()]
    sizes = ["--data.context_length=16", "--data.global_batch_size=8", "--data.split.by=tail"]
    quiet = [f"--trainer.enable_{name}=false" for name in ("progress_bar", "model_summary")]
    device = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.default_root_dir=r/a"]
    command = ["fit", "--model=lit_models.LitCausalLM", "--model.optimizer=torch.optim.SGD"]
    command += ["--model.optimizer.lr=0.01", "--data=datamodules.TextDataModule", *shape, *sizes]
    command += [f"--data.train_files={text}", *quiet, *device, "--ckpt_path=auto"]
    status, output = unisono(*command, f"--model.init_from={start}", "--trainer.max_steps=1")
    assert status == 0, output
    start.unlink()
    status, output = unisono(*command, f"--model.init_from={start}", "--trainer.max_steps=2")
    assert status == 0, output
    assert [line["step"] for line in ledger_lines(tmp_path / "r/a")] == [1, 2]
