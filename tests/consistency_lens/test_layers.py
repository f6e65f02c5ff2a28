"""A lens over several layers: at first equal to a lens for each, in data, terms and controls."""

import json

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from datamodules import ActivationDataModule, ActivationDumpDataModule
from datamodules.activations.store import ActivationStore
from lit_models import LitSubject
from lit_models.consistency_lens import controls
from lit_models.consistency_lens.loss import (
    LensLosses,
    LossWeight,
    TeacherText,
    lens_terms,
    told_map,
)
from lit_models.run_files import read_checkpoint
from tests.activation_dumps import contents, documents, dumped, stories, subject
from tests.activation_dumps import trainer as dump_trainer
from tests.consistency_lens.small_lens import BOTH, fitted, lens_module, trainer
from tests.consistency_lens.tiny import batch_of, lens_and_baselines, part_of
from tests.toy import json_rows

# The subject always stays in evaluation mode.
pytestmark = pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start")
LAYERS = (0, 2)
WORDS = ("teacher_text", "teacher_reconstruction", "reconstruction", "reference", "effect")
JOINED = ("fluency", "contrast")


def batch(number=8, seed=0):
    found = batch_of(number, seed) | {"layer": torch.arange(number) % len(LAYERS)}
    return found | {"group": torch.zeros(number, dtype=torch.int64)}


def lens_on(*layers):
    """Return an untrained lens that knows the statistics of its activations, and its baselines."""
    lens, baselines = lens_and_baselines(*layers)
    lens.requires_grad_(False)
    sample, maps = batch_of(100, seed=1), []
    for index in range(len(layers)):
        layer = {"layer": torch.full((100,), index)} if len(layers) > 1 else {}
        maps.append(told_map(lens, iter([sample | layer])))
    lens.told_map = torch.stack(maps) if len(layers) > 1 else maps[0]
    return lens, baselines


def of_one(given, layer):
    """Return the rows of one layer, as a lens on this layer alone gets them."""
    rows = given["layer"] == LAYERS.index(layer)
    return rows, {n: v for n, v in part_of(given, rows).items() if n != "layer"}


@torch.no_grad()
def test_every_control_of_a_row_is_at_first_that_of_a_lens_of_its_layer():
    def fidelities(lens, baselines, given):
        own = lens.activation(given)
        case = controls.Case(lens, baselines, given, own, own.roll(2, 0), TeacherText(2), 3)
        assert (case.activation == own).all()
        return case.fidelities() | case.predictions(), case.variance

    given = batch()
    found, _ = fidelities(*lens_on(*LAYERS), given)
    for layer in LAYERS:
        rows, some = of_one(given, layer)
        lens, baselines = lens_on(layer)
        own = lens.activation(some)
        other = own.roll(1, 0)  # two layers in turn, every other row
        case = controls.Case(lens, baselines, some, own, other, TeacherText(2), 3)
        for row, values in case.fidelities().items():
            units = torch.ones(6, dtype=torch.float64)
            units[:2] = float(lens.variance)  # the unit of errors of several layers
            for name, one, expected, unit in zip(
                controls.Fidelity._fields, found[row], values, units, strict=True
            ):
                torch.testing.assert_close(
                    one[rows], expected / unit, rtol=2e-4, atol=2e-5, msg=f"{row} {name}"
                )
        for name, expected in case.predictions().items():
            torch.testing.assert_close(found[name][rows], expected, rtol=2e-4, atol=2e-5)


@torch.no_grad()
def test_every_term_of_a_row_is_at_first_that_of_a_lens_of_its_layer():
    given, terms = batch(), set(WORDS + JOINED)
    given["wrong"] = torch.randn(8, 3, 16, generator=torch.manual_seed(3))

    def of(lens, some):
        return lens_terms(lens, some, lens.activation(some), terms, 1.0, TeacherText(2))

    found = of(lens_on(*LAYERS)[0], given)
    assert found.keys() == terms
    for layer in LAYERS:
        rows, some = of_one(given, layer)
        for name, expected in of(lens_on(layer)[0], some).items():
            torch.testing.assert_close(found[name][rows], expected, rtol=2e-4, atol=2e-5, msg=name)


def test_fve_of_each_layer_is_that_worked_by_hand():
    rows = ("greedy", "mean", "token_mean")
    error = {"greedy": [1.0, 2, 6], "mean": [4.0, 6, 10], "token_mean": [2.0, 3, 4]}
    whole = [torch.tensor(error["mean"]).double()] * 5
    found = {row: controls.Fidelity(torch.tensor(error[row]).double(), *whole) for row in rows}
    table = controls.FidelityTable(rows, ["one", "two"], [3, 7])
    given = {"document": torch.arange(3), "weight": torch.tensor([1.0, 1, 1])}
    given |= {"group": torch.tensor([0, 1, 1]), "layer": torch.tensor([1, 0, 1])}
    table.update(found, given)
    values = {group: one["greedy"]["fve"] for group, one in table.compute().items()}
    expected = {"all": 1 - 9 / 20, "one": 3 / 4, "two": 1 - 8 / 16}
    assert values == pytest.approx(expected | {"layer/3": 1 - 2 / 6, "layer/7": 1 - 7 / 14})


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A folder of stories with the stores of three layers from one pass."""
    folder = tmp_path_factory.mktemp("stores")
    data = ActivationDumpDataModule(str(folder / "acts"), **documents(stories(folder, 60)))
    module = LitSubject(subject(), layers=[0, 1, 2])
    dump_trainer(folder).predict(module, data, return_predictions=False)
    return folder


def store_data(folder, *layers, **options):
    names = [str(folder / "acts" / f"layer-{layer}") for layer in layers]
    return ActivationDataModule(names, **{"global_batch_size": 16, **options})


def module_on(*layers, losses=BOTH, **options):
    return lens_module(subject(layers[-1]), losses, layers=list(layers), **options)


def test_samples_are_all_layers_of_each_place_and_partners_are_of_the_same(stores):
    data = store_data(stores, 2, 0)  # in any order
    module = module_on(0, 2, losses=LensLosses(contrast=LossWeight(1.0, begin=2)))
    data.model = module.model_facts()
    data.setup("fit")
    data.setup("test")
    sets = {}
    for layer in LAYERS:
        one = store_data(stores, layer)
        one.model = module_on(layer).model_facts()
        one.setup("test")
        sets[layer] = one.datasets["test"]
    dataset = data.datasets["test"]
    assert len(dataset.lengths) == 2 * len(sets[0].lengths)
    numbers = np.array([5, 2, 7, 12])
    found = dataset.batch(numbers, 0)
    assert found["layer"].tolist() == [1, 0, 1, 0]
    for row, number in enumerate(numbers.tolist()):
        alone = sets[LAYERS[number % 2]].batch(np.array([number // 2]), 0)
        for name in ("activation", "position", "document", "attributes", "lengths"):
            assert torch.equal(found[name][[row]], alone[name]), name
            assert torch.equal(found["other"][name][[row]], alone["other"][name]), name
        assert dataset.describe(number, 0)["layer"] == str(LAYERS[number % 2])
    assert len(set(dataset.batch(np.arange(40), 0)["noise_key"].tolist())) == 40
    training = data.datasets["train"]
    some = training.batch(np.arange(30), 1)
    tokens = some["input_ids"][torch.arange(30), some["position"]]
    stored = [training.activations.arrays[index] for index in (0, 1)]
    for row in range(30):
        for wrong in some["wrong"][row].numpy():
            place = np.flatnonzero((stored[row % 2] == wrong).all(1))[0]
            piece = training.piece[2 * place]
            assert training.pieces.tokens(int(piece))[training.position[2 * place]] == tokens[row]


def run(folder, name, module, data, **options):
    seed_everything(1, verbose=False)
    return read_checkpoint(fitted(folder / name, module, data, max_steps=4, **options))


def test_a_lens_of_one_layer_in_lists_is_the_lens_of_that_layer(stores, tmp_path):
    plain = ActivationDataModule(str(stores / "acts" / "layer-1"), global_batch_size=16)
    one = run(tmp_path, "plain", lens_module(subject(1)), plain, precision=32)
    other = run(tmp_path, "lists", module_on(1), store_data(stores, 1), precision=32)
    assert one["lens_recipe"] == other["lens_recipe"]
    assert one["state_dict"].keys() == other["state_dict"].keys()
    torch.testing.assert_close(other["state_dict"], one["state_dict"], rtol=0, atol=0)
    lines = [json.loads((tmp_path / n / "plan.json").read_text()) for n in ("plain", "lists")]
    assert lines[0] == lines[1]


@pytest.fixture(scope="module")
def whole(stores):
    """A lens of two layers after four steps, in two runs that resume each other."""
    return run(stores, "whole", module_on(0, 2), store_data(stores, 0, 2))


def test_a_resumed_lens_of_several_layers_is_the_uninterrupted_one(stores, whole, tmp_path):
    module, data = module_on(0, 2), store_data(stores, 0, 2)
    seed_everything(1, verbose=False)
    resume = fitted(tmp_path / "half", module, data, max_steps=2)
    found = run(tmp_path, "rest", module_on(0, 2), store_data(stores, 0, 2), resume=resume)
    assert found["state_dict"]["lens.mean"].shape == (2, 16)
    torch.testing.assert_close(found["state_dict"], whole["state_dict"], rtol=1e-9, atol=1e-12)


def test_every_parameter_of_a_layer_has_learnt(whole):
    state = whole["state_dict"]
    for name in ("verbalizer.entry", "reconstructor.map"):
        weight, bias = (state[f"lens.{name}.{kind}"] for kind in ("weight", "bias"))
        assert ((weight - torch.eye(16)).abs().amax((1, 2)) > 1e-3).all()
        assert (bias.abs().amax(1) > 1e-3).all()
    assert (state["lens.reconstructor.start"][0] != state["lens.reconstructor.start"][1]).any()


def test_a_test_and_a_prediction_name_the_layer_of_each_row(stores, whole, tmp_path):
    module, path = module_on(0, 2), stores / "whole" / "checkpoints" / "last.ckpt"
    data = store_data(stores, 0, 2, predict_output=str(tmp_path / "said.jsonl"))
    runs = trainer(tmp_path / "run")
    [values] = runs.test(module, data, ckpt_path=path, weights_only=True, verbose=False)
    rows = json.loads((tmp_path / "run" / "controls.json").read_text())["rows"]
    assert list(rows) == ["all", "layer/0", "layer/2"]
    assert values["test/fve"] == pytest.approx(rows["all"]["greedy"]["fve"])
    for layer in LAYERS:
        fve = rows[f"layer/{layer}"]["greedy"]["fve"]
        assert values[f"test/layer/{layer}/fve"] == pytest.approx(fve)
        assert 0 <= values[f"test/layer/{layer}/recall"] <= 1
        assert rows[f"layer/{layer}"]["mean"]["fve"] == pytest.approx(0, abs=0.1)
    runs.predict(module, data, return_predictions=False)
    lines = json_rows(tmp_path / "said.jsonl")
    assert [line["layer"] for line in lines[:4]] == [0, 2, 0, 2]
    errors = [[x["error"] for x in lines if x["layer"] == layer] for layer in LAYERS]
    assert [len(one) for one in errors] == [rows["layer/0"]["greedy"]["count"]] * 2
    found = module.readings(["a cat at hill"], None)[0]
    assert [(one.position, one.layer) for one in found[:4]] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    for layer, last in zip(LAYERS, found[-2:], strict=True):
        [[alone]] = module.readings(["a cat at hill"], layer=layer)
        assert vars(alone) == vars(last) | {"fve": pytest.approx(last.fve, rel=1e-12)}
        assert module.explain(["a cat at hill"], layer=layer) == [last.explanation]
    with pytest.raises(ValueError, match="layer None is none of this lens's.* 0, 2; name one"):
        module.explain(["a cat"])
    with pytest.raises(ValueError, match="layer 1 is none of this lens's"):
        module.readings(["a cat"], layer=1)
    assert module.reading(data, "a cat at hill", -1, 1.0)[0]["explanation"] == last.explanation


def test_documents_without_a_store_give_the_lens_of_their_stores(stores, whole, tmp_path):
    options = documents(str(stores / "mine.jsonl"), global_batch_size=16)
    found = run(tmp_path, "documents", module_on(0, 2), ActivationDataModule(**options))
    for name in ("lens.mean", "lens.variance", "lens.verbalizer.entry.bias"):
        one, other = (run["state_dict"][name] for run in (found, whole))
        torch.testing.assert_close(one, other, rtol=2e-4, atol=1e-5)  # stores are in float32


def test_stores_that_are_not_of_one_dump_are_refused(stores, tmp_path):
    def opened(*paths):
        ActivationDataModule([str(path) for path in paths]).open_store()

    acts = stores / "acts"
    with pytest.raises(ValueError, match="both hold layer 2; name each layer's store once"):
        opened(acts / "layer-2", acts / "layer-0", acts / "layer-2")
    dumped(tmp_path / "others", stories(tmp_path, 50, seed=3), subject(2))
    with pytest.raises(ValueError, match=r"layer-0 and .*others differ in .*tokens.*in the layer"):
        opened(acts / "layer-0", tmp_path / "others")
    assert (
        contents(acts / "layer-0")["train.piece.npy"]
        == contents(acts / "layer-2")["train.piece.npy"]
    )


def test_a_lens_and_data_of_other_layers_are_refused(stores, whole, tmp_path):
    def tested(module, data):
        path = stores / "whole" / "checkpoints" / "last.ckpt"
        trainer(tmp_path / "run").test(module, data, ckpt_path=path, weights_only=True)

    with pytest.raises(ValueError, match=r"layer: 1 there, \[0, 2\] here.* with model.layers"):
        tested(module_on(0, 2), store_data(stores, 1))
    with pytest.raises(ValueError, match=r"layer: \[0, 1\] there, \[0, 2\] here"):
        tested(module_on(0, 2), store_data(stores, 1, 0))
    with pytest.raises(ValueError, match="trained with another subject"):
        tested(module_on(2), store_data(stores, 2))
    with pytest.raises(ValueError, match="such a file holds one layer alone; name a jsonl"):
        store_data(stores, 0, 2, predict_output="x.parquet")
    with pytest.raises(ValueError, match="layer 3 is none of the subject's 3 blocks"):
        trainer(tmp_path / "far").fit(module_on(0, 3), store_data(stores, 0, 2))
    assert isinstance(ActivationStore(stores / "acts" / "layer-0").subject.layer, int)
