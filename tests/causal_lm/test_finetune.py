"""Low-rank adapters and freezing: layer by layer, and in a run, saved, resumed, exported."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from datamodules import TextDataModule
from datamodules.tokenizers.text import TEMPLATES, byte_tokenizer
from lit_models.causal_lm import adapters
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.pretrained import load_network
from lit_models.training import ExactDropout, default_callbacks
from tests.causal_lm.folders import made, packed_logits, saved
from tests.causal_lm.tiny import BLOCKS, SMALL, run
from tests.text_corpora import rows_file, saved_tokenizer
from tests.toy import losses, toy_trainer

CONFIG = DecoderConfig(vocab_size=11, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1)
IDS = torch.tensor([[1, 2, 3, 4]])


def decoder() -> Decoder:
    torch.manual_seed(1)
    return Decoder(CONFIG)


def gpt2() -> nn.Module:
    return made("GPT2", vocab_size=11, n_positions=8)


def outputs(network: nn.Module) -> Tensor:
    if isinstance(network, Decoder):
        return network(IDS, torch.arange(4)[None], torch.zeros_like(IDS))
    return network(IDS).logits


def with_lora(network: nn.Module, **options: object) -> nn.Module:
    chosen = adapters.LoraOptions(**{"targets": ["*"], **options})
    adapters.add_lora(network, adapters.lora_recipe(network, chosen))
    return network


def trained(network: nn.Module) -> nn.Module:
    """Give the adapters nonzero values, as training does."""
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
            assert name.endswith(("lora_A", "lora_B"))
    return network


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_base_of_any_kind_keeps_its_output_and_no_input(kind):
    from transformers.pytorch_utils import Conv1D

    base = nn.Linear(24, 16) if kind == "linear" else Conv1D(16, 24)
    base.requires_grad_(False)
    layer, stored = adapters.LoraLinear(base, rank=2, alpha=4.0, dropout=0.0), []
    x = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        output = layer(x)
    torch.testing.assert_close(output, base(x), rtol=1e-5, atol=1e-5)
    assert len([t for t in stored if tuple(t.shape) == (70, 24)]) == 1  # only the adapter's
    (gradient,) = torch.autograd.grad(output.sum(), [x])
    (expected,) = torch.autograd.grad(base(x).sum(), [x])
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [decoder, gpt2])
def test_new_adapters_change_nothing_and_only_they_learn(make):
    plain, adapted = make(), with_lora(make())
    assert torch.equal(outputs(adapted), outputs(plain))
    names = {name for name, _ in plain.named_parameters()}
    more = {n for n, _ in adapted.named_parameters()} - names
    assert {n for n, p in adapted.named_parameters() if p.requires_grad} == more
    outputs(adapted).square().sum().backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if n in more)
    adapted.load_state_dict(plain.state_dict(), strict=False)  # under the base's names
    layers = [m for m in adapted.modules() if isinstance(m, adapters.LoraLinear)]
    assert len(layers) == {decoder: 14, gpt2: 8}[make]
    for layer in layers:
        bound = layer.lora_A.shape[1] ** -0.5  # PEFT's bound: Kaiming's with a = sqrt(5)
        assert 0.5 * bound < layer.lora_A.abs().max() <= bound
        assert layer.lora_B.eq(0).all()


def test_a_base_in_bfloat16_has_adapters_in_float32():
    adapted = with_lora(decoder(), base_dtype="bfloat16")
    kinds = {n.rpartition(".")[2]: p.dtype for n, p in adapted.named_parameters()}
    assert kinds == {"weight": torch.bfloat16, "lora_A": torch.float32, "lora_B": torch.float32}
    assert adapted.head.weight is adapted.embedding.weight
    assert outputs(adapted).dtype == torch.bfloat16
    outputs(adapted).sum().backward()


@pytest.mark.parametrize(
    ("kind", "stored"), [("GPT2", "float16"), ("Llama", "bfloat16"), ("Qwen2", "bfloat16")]
)
def test_a_base_read_in_its_own_precision_is_that_of_the_way_by_float32(tmp_path, kind, stored):
    saved(tmp_path, kind).to(getattr(torch, stored)).save_pretrained(tmp_path)
    found = []
    for dtype in (None, torch.float32):
        network = load_network(tmp_path, dtype)
        torch.manual_seed(1)
        found.append(with_lora(network, rank=2, base_dtype="bfloat16"))
    for (name, one), other in zip(found[0].named_parameters(), found[1].parameters(), strict=True):
        assert one.dtype == other.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        assert torch.equal(one, other), name
    logits = [packed_logits(each) for each in found]
    assert all(torch.equal(*pair) for pair in zip(*logits, strict=True))


def test_targets_are_ends_of_names_or_patterns_and_never_the_head():
    network = decoder()
    assert adapters.target_layers(network, ["q_proj", "1.feed_forward.*"]) == [
        "layers.0.attention.q_proj",
        "layers.1.attention.q_proj",
        "layers.1.feed_forward.up_proj",
        "layers.1.feed_forward.down_proj",
        "layers.1.feed_forward.gate_proj",
    ]
    assert not any("head" in name for name in adapters.target_layers(network, ["*"]))
    assert not any("head" in name for name in adapters.target_layers(gpt2(), ["*"]))
    for wrong in ("query", "head", "proj"):
        message = f'lora.targets names "{wrong}", which fits no linear layer.*down_proj.*v_proj'
        with pytest.raises(ValueError, match=message):
            adapters.target_layers(network, [wrong])


@pytest.mark.parametrize(
    ("make", "pattern", "trainable", "frozen"),
    [
        (decoder, "layers.0.*", "layers.1.attention_norm.weight", "layers.0.attention_norm.weight"),
        (decoder, "head.weight", "norm.weight", "embedding.weight"),  # tied weights: by either name
        (gpt2, "transformer.wte.*", "transformer.wpe.weight", "lm_head.weight"),
    ],
)
def test_names_that_fit_a_pattern_are_frozen(make, pattern, trainable, frozen):
    network = make()
    adapters.freeze(network, [pattern])
    assert network.get_parameter(trainable).requires_grad
    assert not network.get_parameter(frozen).requires_grad
    with pytest.raises(ValueError, match='"layer.0.*", which fits no parameter; names are such as'):
        adapters.freeze(network, ["layer.0.*"])


SHAPE = {**SMALL, "num_layers": 2}
LORA = adapters.LoraOptions(["[qv]_proj"], rank=2, alpha=8.0)


def fit(folder: Path, steps: int = 4, micro: int = 8, **options: Any) -> LitCausalLM:
    """Train; `ckpt_path`, `dropped` and `precision` are the trainer's."""
    extra = [ExactDropout()] if options.pop("dropped", False) else []
    limits = {"max_steps": steps, "limit_val_batches": 0, "precision": options.pop("precision", 64)}
    path = options.pop("ckpt_path", None)
    adamw = partial(torch.optim.AdamW, lr=0.05)
    module = LitCausalLM(adamw, network=DecoderConfig(**SHAPE), **options)
    limits["callbacks"] = [*default_callbacks(), *extra]
    data = {**BLOCKS, "micro_batch_size": micro}
    run(folder, module, ckpt_path=path, is_known=False, limits=limits, **data)
    return module


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    fit(folder)
    return last(folder)


def test_adapters_learn_on_a_base_that_stands_still_and_are_not_dropped_silently(base, tmp_path):
    tuned = fit(tmp_path / "tuned", 8, init_from=str(base), lora=LORA)
    before = torch.load(base, weights_only=True)["state_dict"]
    after = tuned.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    added = {name for name in after if name not in before}
    assert len(added) == 2 * 2 * 2  # A, B of q and v of two layers
    assert all(after[name].any() for name in added)
    assert {n for n, p in tuned.named_parameters() if p.requires_grad} == added
    found = losses(tmp_path / "tuned")
    assert min(found[1:]) < found[0] < 0.7 * losses(base.parents[1])[0]
    with pytest.raises(ValueError, match="was trained with LoRA, and this run has none"):
        fit(tmp_path / "plain", 1, init_from=str(last(tmp_path / "tuned")))


def test_a_run_with_adapters_is_resumed_and_reloaded(base, tmp_path):
    whole = fit(tmp_path / "whole", init_from=str(base), lora=LORA)
    fit(tmp_path / "halves", 2, init_from=str(base), lora=LORA)
    fit(tmp_path / "halves", ckpt_path=last(tmp_path / "halves"), lora=LORA)
    reloaded = LitCausalLM.load_from_checkpoint(last(tmp_path / "halves"))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(reloaded.state_dict()[name].to(value), value, msg=name)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


def test_chats_of_share_gpt_are_learnt_with_adapters_in_one_command(own_folder, done):
    saved(own_folder / "base", "Llama", vocab_size=257)
    saved_tokenizer(replace(byte_tokenizer(), chat_template=TEMPLATES["plain"]), Path("base"))
    turns = [{"from": "human", "value": "Legs of {}?"}, {"from": "gpt", "value": "It has {}."}]
    rows = [
        {"conversations": [{**t, "value": t["value"].format(i)} for t in turns]} for i in range(200)
    ]
    (own_folder / "chats.json").write_text(json.dumps(rows))
    files = ["--model.pretrained=base", "--data.train_files=chats.json"]
    limits = ["--data.context_length=64", "--trainer.max_epochs=1", "--model.optimizer.lr=0.02"]
    done("fit", "--config", "causal_lm/lora_chat.yaml", *files, *limits)
    found = losses(own_folder / "runs" / "causal_lm-lora_chat")
    assert len(found) == 23
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


def test_dropout_of_adapters_does_not_depend_on_micro_batches(tmp_path):
    lora = adapters.LoraOptions(["*"], rank=2, dropout=0.3)
    for micro in (8, 2):
        fit(tmp_path / str(micro), micro=micro, dropped=True, lora=lora)
    fit(tmp_path / "none", lora=adapters.LoraOptions(["*"], rank=2))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "8"), rel=1e-9)
    assert losses(tmp_path / "none") != pytest.approx(losses(tmp_path / "8"), rel=1e-3)


def test_exact_dropout_needs_rows_that_are_samples(tmp_path):
    path = rows_file(tmp_path / "mine.jsonl", [{"text": f"t{i}"} for i in range(12)])

    def fit(layout: str, dropout: float) -> None:
        network = DecoderConfig(**SMALL, dropout=dropout)
        module = LitCausalLM(partial(torch.optim.AdamW, lr=0.05), network=network)
        sizes = {"context_length": 16, "global_batch_size": 4, "micro_batch_size": 4}
        limits = {"max_steps": 1, "limit_val_batches": 0}
        callbacks = [*default_callbacks(), ExactDropout()]
        trainer = toy_trainer(tmp_path / f"{layout}-{dropout}", callbacks=callbacks, **limits)
        trainer.fit(module, TextDataModule(path, layout=layout, **sizes))

    with pytest.raises(ValueError, match="exact_dropout needs data.layout packed or blocks"):
        fit("documents", 0.1)
    fit("documents", 0.0)
    fit("packed", 0.1)
