"""Released verbalizer and reconstructor pairs, beside a slow reading of their layout."""

import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from datamodules import ActivationDataModule
from datamodules.tokenizers.text import byte_tokenizer
from lit_models.consistency_lens.interchange import ROWS, ActivationPair, pair_rows
from lit_models.consistency_lens.subject import Subject, load_subject, subject_recipe
from tests.activation_dumps import dumped, stories, subject
from tests.causal_lm.folders import saved_with_bytes

CHAT = "{% for m in messages %}U:{{ m['content'] }}\n{% endfor %}A:"
BYTES = byte_tokenizer()
LEFT, HERE, RIGHT = BYTES.encode(">@<").tolist()
TOKENS = {"injection_char": "@", "injection_token_id": HERE}
TOKENS |= {"injection_left_neighbor_id": LEFT, "injection_right_neighbor_id": RIGHT}
TEMPLATES = {"av": "a @ is no place, <c>{injection_char}</c> is", "ar": "<t>{explanation}</t>:"}


@pytest.fixture
def released(tmp_path):
    """A folder of two small GPT-2s in the released layout, of width 16 and layer 1."""
    import transformers

    sizes = {"n_embd": 16, "n_positions": 128}
    meta = {"kind": "nla_model", "d_model": 16, "prompt_templates": TEMPLATES, "tokens": TOKENS}
    for role, scale in (("av", 90.0), ("ar", None)):
        folder = saved_with_bytes(tmp_path / "pair" / role, "GPT2", **sizes)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT}))
        of_role = {"role": role, "extraction_layer_index": 1}
        of_role |= {"extraction": {"injection_scale": scale, "mse_scale": 4.0}}
        (folder / "nla_meta.yaml").write_text(yaml.safe_dump({**meta, **of_role}))
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "pair" / "av")
    with torch.no_grad():  # its text depends on what it has read
        for name, parameter in model.named_parameters():
            if "attn" in name:
                parameter *= 5
            elif ".ln_" in name:
                parameter.fill_(float(name.endswith("weight")))
    model.save_pretrained(tmp_path / "pair" / "av")
    head = torch.randn(16, 16, generator=torch.manual_seed(1))
    save_file({"weight": head}, tmp_path / "pair" / "ar" / "value_head.safetensors")
    return tmp_path / "pair"


@torch.no_grad()
def test_a_pair_says_and_rebuilds_what_a_slow_reading_of_its_layout_does(released):
    import transformers

    pair, given = ActivationPair(released), torch.randn(3, 16, generator=torch.manual_seed(2))
    said = pair.explain(given, max_new_tokens=5)
    assert len(set(said)) > 1
    model = transformers.GPT2LMHeadModel.from_pretrained(released / "av").eval()
    asked = f"U:{TEMPLATES['av'].replace('{injection_char}', '@')}\nA:"
    prompt, place = BYTES.encode(asked).tolist(), asked.index(">@<") + 1
    for activation, text in zip(given, said, strict=True):
        embeddings = model.transformer.wte(torch.tensor([prompt]))
        embeddings[0, place] = activation / activation.norm() * 90.0
        ids: list[int] = []
        for _ in range(5):
            ids.append(int(model(inputs_embeds=embeddings).logits[0, -1].argmax()))
            more = model.transformer.wte(torch.tensor([[ids[-1]]]))
            embeddings = torch.cat([embeddings, more], dim=1)
        assert text == BYTES.decode(ids).strip()

    model = transformers.GPT2Model.from_pretrained(released / "ar").eval()
    model.ln_f = torch.nn.Identity()
    head = torch.randn(16, 16, generator=torch.manual_seed(1))
    found = pair.rebuild(["an owl", "owls"])
    for row, text in zip(found, ("an owl", "owls"), strict=True):
        ids = torch.tensor([BYTES.encode(f"<t>{text}</t>:").tolist()])
        made = head @ model(ids).last_hidden_state[0, -1]
        torch.testing.assert_close(row, made / made.norm(), rtol=1e-4, atol=1e-5)


def test_words_stand_between_their_tags(released, monkeypatch):
    pair = ActivationPair(released)
    ids = BYTES.encode("so <explanation>\n an owl </explanation> yes").tolist()
    monkeypatch.setattr(pair.verbalizer, "generate", lambda **given: torch.tensor([ids]))
    assert pair.explain(torch.ones(1, 16)) == ["an owl"]


def test_a_pair_is_scored_in_the_table_of_controls(released, tmp_path):
    of = subject()
    store = dumped(tmp_path / "store", stories(tmp_path, 60), of)
    data = ActivationDataModule(str(store.folder))
    network = Subject(load_subject(of, subject_recipe(of, store.tokenizer.vocab_size)), 1)
    pair = ActivationPair(released)
    rows = pair_rows(pair, network, data, most=20, max_new_tokens=4)["all"]
    assert set(rows) == set(ROWS)
    assert rows["greedy"]["count"] == 20
    assert rows["mean"]["fve"] == rows["mean"]["kl_recovered"] == 0
    true = torch.from_numpy(np.array(store.array(2, "activations")[:20]))
    rebuilt = pair.rebuild(pair.explain(true, 4)) * store.statistics.norms[0]
    spread = (true - torch.from_numpy(store.statistics.mean)).square().sum()
    expected = 1 - float((true - rebuilt).double().square().sum() / spread)
    assert rows["greedy"]["fve"] == pytest.approx(expected, rel=1e-4)
    assert rows["greedy"]["unit_fve"] != rows["shuffled_examples"]["unit_fve"]
    other = ActivationDataModule(
        str(dumped(tmp_path / "two", stories(tmp_path, 60), subject(2)).folder)
    )
    said = r"reads 16 features of block 1, and the data hold .*layer=2"
    with pytest.raises(ValueError, match=said):
        pair_rows(pair, network, other)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda f: (f / "av").rename(f / "other"),
            FileNotFoundError,
            r"no folder av or verbalizer",
        ),
        (lambda f: (f / "ar" / "value_head.safetensors").unlink(), FileNotFoundError, "value_head"),
        (
            lambda f: (f / "av" / "nla_meta.yaml").write_text(
                (f / "av" / "nla_meta.yaml")
                .read_text()
                .replace(f"neighbor_id: {RIGHT}", "neighbor_id: 1")
            ),
            ValueError,
            rf"holds the tokens \[{LEFT}, {HERE}, 1\] of its nla_meta.yaml 0 times, and must once",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(released, change, error, message):
    change(released)
    with pytest.raises(error, match=message):
        ActivationPair(released)
