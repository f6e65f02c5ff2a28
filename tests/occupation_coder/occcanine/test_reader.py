"""Models in OccCANINE's layout: read, used, calibrated, fine-tuned, exported, or refused."""

import json
import pickle

import pytest
import torch

from datamodules.core.batches import padded_texts
from datamodules.tokenizers.codes import CodeBook, encode
from lit_models import LitOccupationCoder
from lit_models.occupation_coder.network import NONE, Memory
from lit_models.run_files import read_checkpoint
from tests.occupation_coder.occcanine.layout import (
    CODES,
    TEXTS,
    hisco_folder,
    hisco_id,
    hub_folder,
    random_model,
)
from tests.text_corpora import table, text_file


@pytest.fixture(scope="module")
def model():
    return random_model()


def batch_of(coder, texts, language):
    batch = padded_texts([encode(text, 119) for text in texts])
    ids = [coder.recipe["languages"].index(language)] * len(texts)
    return {**batch, "language_id": torch.tensor(ids)}


@pytest.mark.slow
@torch.no_grad()
def test_logits_are_those_of_the_layout_written_down_plainly(tmp_path, model):
    coder = LitOccupationCoder.load_from_checkpoint(hisco_folder(tmp_path / "mix", model))
    coder.eval()
    book = coder.recipe["code_book"]
    assert book["codes"] == CODES
    assert book["descriptions"][3] == "text 01110"
    for language, theirs in (("en", "en"), ("sv", "se"), ("unk", "unk")):
        texts = [f"{theirs}[SEP]{text}" for text in (*TEXTS, "y" * 118)]
        memory, flat = coder(batch_of(coder, [*TEXTS, "y" * 118], language))
        torch.testing.assert_close(flat, model.flat(texts)[:, 1:], rtol=0, atol=1e-5)
        chosen = torch.tensor([[5, 3, NONE], [2, 6, NONE], [0, NONE, NONE], [7, 1, 5]])
        targets = coder.network.trie.targets(chosen)
        memory = Memory(memory.hidden.double(), memory.mask)
        logits = coder.network.decoder.double()(targets, memory)
        # begin, five symbols a code, a code outside the tree five times, pads
        symbols = torch.full((4, 16), 1)
        for row, codes in enumerate(chosen.tolist()):
            spelled = [list(CODES[c]) if c > 2 else [CODES[c]] * 5 for c in codes if c >= 0]
            written = [2, *(hisco_id(s) for code in spelled for s in code)]
            symbols[row, : len(written)] = torch.tensor(written)
        expected = model.sequence(texts, symbols)
        for row, codes in enumerate(chosen.tolist()):
            size = 5 * sum(c >= 0 for c in codes) + 1
            ours = logits[row, :size][:, [3, 1, 2, *range(5, 18)]]
            plain = expected[row, :size][:, [1, 2, 3, *range(5, 18)]]
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)


def test_a_folder_is_coded_within_its_codes_by_both_heads(tmp_path, model):
    coder = LitOccupationCoder.load_from_checkpoint(hisco_folder(tmp_path / "mix", model)).eval()
    for method in ("flat", "greedy", "beam", "mixed"):
        for coded in coder.code(TEXTS, language="se", method=method):
            assert set(coded.codes) <= set(CODES)
            assert 0 <= coded.set_confidence <= 1
    plain, accents = coder.code(["gardmand aeoss", "Gårdmänd æöß"], language="sv")
    assert plain.set_confidence == accents.set_confidence


@pytest.mark.slow
def test_it_codes_a_table_is_calibrated_on_own_rows_and_exported(
    done, own_folder, own_cache, model
):
    hisco_folder(own_folder / "m", model)
    trades = {"smith": "83110", "vintner": "41025", "wife": "-1", "dyer": "75622"}
    rows = [(f"{trade} {i}", "se", code) for i in range(6) for trade, code in trades.items()]
    table(own_folder / "train.csv", rows, ("text", "language", "code_1"))
    data = ["--data=datamodules.OccupationDataModule", "--data.columns.language=language"]
    fit = ["--model.init_from=m", "--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=0"]
    fit = ["--model=lit_models.LitOccupationCoder", *fit, *data, "--data.train_files=train.csv"]
    fit += ["--trainer.max_steps=1", "--trainer.default_root_dir=run", "--trainer.devices=1"]
    done("fit", *fit, "--trainer.logger=false")
    tuned = LitOccupationCoder.load_from_checkpoint("run/checkpoints/last.ckpt")
    assert tuned.temperature != {"seq2seq": 1.0, "flat": 1.0}
    trained, before = read_checkpoint("m")["state_dict"], tuned.state_dict()
    for name in ("encoder.canine.projection.conv.weight", "decoder.layers.1.self_qkv.bias"):
        assert torch.equal(before[f"network.{name}"], trained[f"network.{name}"])
    head = before["network.flat.codes.bias"].tolist()
    for code, bias in zip(tuned.recipe["code_book"]["codes"], head, strict=True):
        known = trained["network.flat.codes.bias"].tolist()
        assert bias == (known[CODES.index(code)] if code in CODES else -6.0)
    done("export", "run/checkpoints/last.ckpt", "--to=out")
    again = LitOccupationCoder.from_exported("out")
    assert again.code(TEXTS, language="sv") == tuned.eval().code(TEXTS, language="sv")
    predict = ["--ckpt_path=m", "--data.predict_files=train.csv", "--data.predict_output=coded.csv"]
    done("predict", *data, *predict, "--trainer.devices=1")
    coded = (own_folder / "coded.csv").read_text("utf-8").splitlines()
    first = LitOccupationCoder.load_from_checkpoint("m").code(["smith 0"], language="se")[0]
    assert coded[1].split(",")[3] == first.codes[0]


def test_local_files_flat_models_and_decoders_alone_are_read(tmp_path, model):
    key = {code: row + 1 for row, code in enumerate(CODES)} | {" ": 0}
    state = {"model": model.state("mix"), "key": key, "step": 3}
    torch.save(state, tmp_path / "mix.bin")
    local = LitOccupationCoder.load_from_checkpoint(tmp_path / "mix.bin")
    hub = LitOccupationCoder.load_from_checkpoint(hisco_folder(tmp_path / "mix", model))
    torch.testing.assert_close(local.state_dict(), hub.state_dict(), rtol=0, atol=0)
    for kind, method in (("flat", "flat"), ("s2s", "beam")):
        one = LitOccupationCoder.load_from_checkpoint(hisco_folder(tmp_path / kind, model, kind))
        assert one.decoding.method == method
        theirs = hub.code(TEXTS, language="en", method=method)
        for ours, mixed in zip(one.code(TEXTS, language="en"), theirs, strict=True):
            assert ours.codes == mixed.codes
            assert ours.set_confidence == pytest.approx(mixed.set_confidence, abs=1e-6)


def test_codes_of_other_systems_are_spelled_by_their_own_symbols(tmp_path):
    chars = ["0", "1", "2", "A"]
    folder = hub_folder(
        tmp_path / "occ", random_model(10, 3), "mix", num_classes=[9] * 8, num_classes_flat=3
    )
    text_file(folder / "key.json", json.dumps({"12A": 0, "0": 1, "A10": 2}))
    text_file(folder / "chars.json", json.dumps(chars))
    content = read_checkpoint(folder)
    book = CodeBook.from_dict(content["occupation_recipe"]["code_book"])
    assert book.codes == ["12A", "0", "A10"]
    assert book.max_codes == 2  # of 8 positions
    assert book.table.tolist() == [[6, 7, 8], [5, 2, 2], [8, 6, 5]]  # the layout's ids begin at 4
    pair = {"1,14,0": 0, "2,-1": 1, "14": 2}  # symbols of several characters, separated by commas
    text_file(folder / "key.json", json.dumps(pair))
    text_file(folder / "chars.json", json.dumps([0, 1, 2, 14, -1]))
    book = CodeBook.from_dict(read_checkpoint(folder)["occupation_recipe"]["code_book"])
    assert book.table.tolist() == [[6, 8, 5], [7, 9, 2], [8, 2, 2]]
    text_file(folder / "key.json", json.dumps({"12Z": 0, "0": 1, "A10": 2}))
    with pytest.raises(ValueError, match="its codes hold A, which is none of its symbols"):
        read_checkpoint(folder)


class Harm:
    def __reduce__(self):
        return print, ("run",)


def other_network(folder):
    (folder / W).unlink()
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")


W = "model.safetensors"
FAULTS = {
    "model.safetensors is damaged": lambda m: (m / W).write_bytes((m / W).read_bytes()[:5000]),
    "lacks model.safetensors and pytorch_model.bin": lambda m: (m / W).unlink(),
    r"names no codes: put key.json .* for HISCO, Key.csv": lambda m: (m / "Key.csv").unlink(),
    r'no column "code" .* it has: a, b': lambda m: text_file(m / "Key.csv", "a,b\n1,2\n"),
    "2 codes with rows up to 77, and the flat head has 9 rows": lambda m: text_file(
        m / "Key.csv", "hisco,code\n83110,0\n41025,77\n"
    ),
    "config.json is damaged": lambda m: text_file(m / "config.json", '{"model_domain"'),
    "config, but its weights are of another layout": other_network,
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_cannot_be_read_is_refused_with_a_sentence(tmp_path, model, message):
    path = hisco_folder(tmp_path / "m", model)
    FAULTS[message](path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LitOccupationCoder.load_from_checkpoint(path)


def test_a_file_with_code_in_it_is_refused_and_the_code_does_not_run(tmp_path, model, capsys):
    path = tmp_path / "harm.bin"
    path.write_bytes(pickle.dumps(Harm()))
    with pytest.raises(ValueError, match="harm.bin is damaged: it is cut short or no checkpoint"):
        LitOccupationCoder.load_from_checkpoint(path)
    torch.save({"model": model.state("mix"), "key": Harm()}, path)
    with pytest.raises(ValueError, match="Only plain data is loaded, never code"):
        LitOccupationCoder.load_from_checkpoint(path)
    assert "run" not in capsys.readouterr().out
