"""Export of a lens without its subject, which is found again by its digest."""

import json
import pickle
import shutil

import pytest
import torch

from datamodules.text.prompts import prompt_tokens
from lit_models import LitConsistencyLens
from lit_models.commands.export import export
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.run_files import read_checkpoint
from lit_models.training.optim import AVERAGED
from tests.causal_lm.folders import saved_with_bytes
from tests.consistency_lens.small_lens import JOINT, fitted, lens_module, story_data, trainer

CLASS = "lit_models.LitConsistencyLens"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a subject, the run of a lens on it, and the lens's export."""
    folder = tmp_path_factory.mktemp("export")
    subject = SubjectOptions(
        path=str(saved_with_bytes(folder / "gpt2", "GPT2", n_positions=32)), layer=1
    )
    data = story_data(folder, tokenizer=None)
    path = fitted(folder / "run", lens_module(subject), data, max_steps=3, precision=32)
    export(path, to=folder / "lens", class_path=CLASS)
    return folder


@pytest.fixture
def moved(trained, tmp_path):
    """The same in a copy that a test may damage."""
    shutil.copytree(trained / "lens", tmp_path / "lens")
    config = json.loads((tmp_path / "lens" / "config.json").read_text())
    config["init_args"]["subject"]["path"] = str(tmp_path / "gpt2")
    (tmp_path / "lens" / "config.json").write_text(json.dumps(config))
    return tmp_path


def explained(module):
    activation = torch.linspace(-1, 1, 40, dtype=module.lens.mean.dtype).reshape(5, 8)
    with torch.no_grad():
        words = module.lens.verbalizer.explain(activation)
        return words.token_ids, words.logits, module.lens.reconstructor(words.embeddings)


def test_neither_checkpoint_nor_export_holds_the_subject(trained):
    state = read_checkpoint(trained / "run" / "checkpoints" / "last.ckpt")["state_dict"]
    width = len(state["lens.mean"])
    assert not any(name.startswith(("lens.subject.", "lens.untrained.")) for name in state)
    assert not any(257 in value.shape for value in state.values())  # nor the subject's vocabulary
    assert state["lens.verbalizer.map_weight"].shape == (2, width, width)
    assert sum(n.startswith("lens.reference.verbalizer.network.") for n in state) > 10


def test_an_export_gives_the_lens_of_the_checkpoint(trained):
    loaded = LitConsistencyLens.load_from_checkpoint(trained / "run" / "checkpoints" / "last.ckpt")
    exported = LitConsistencyLens.from_exported(trained / "lens")
    exported = pickle.loads(pickle.dumps(exported))  # as ddp_spawn passes it to its processes
    exported.load_state_dict(loaded.state_dict())  # its file lacks the subject
    torch.testing.assert_close(explained(exported), explained(loaded.eval()), rtol=0, atol=0)
    text = "the owl saw"
    ids = torch.tensor(prompt_tokens(exported.tokenizer, [text]))
    hidden = exported.lens.subject.of_layers(ids)[-1]
    (words,) = exported.explain([text])
    assert loaded.explain([text]) == exported.explain(hidden[:, -1]) == [words]
    assert loaded.readings([text], None) == exported.readings([text], None)
    assert exported.explain([]) == []
    with pytest.raises(ValueError, match=r"activations must be \[n, \d+\], .* got \[1, 2\]"):
        exported.explain(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="activations must be finite"):
        exported.explain(hidden[:, -1] / 0)
    same = zip(loaded.named_parameters(), exported.named_parameters(), strict=True)
    assert all(torch.equal(a, b) and name == other for (name, a), (other, b) in same)


@pytest.mark.slow
def test_a_lens_from_a_checkpoint_is_tested_as_the_run_was(trained, tmp_path):
    data = story_data(trained, tokenizer=None)
    path = trained / "run" / "checkpoints" / "last.ckpt"
    subject = SubjectOptions(path=str(trained / "gpt2"), layer=1)
    by_path = trainer(tmp_path / "a", precision=32).test(
        lens_module(subject), data, ckpt_path=path, weights_only=True, verbose=False
    )
    loaded = LitConsistencyLens.load_from_checkpoint(path)
    assert trainer(tmp_path / "b", precision=32).test(loaded, data, verbose=False) == by_path
    tables = [(tmp_path / name / "controls.json").read_bytes() for name in "ab"]
    assert tables[0] == tables[1]


def test_a_subject_that_is_gone_is_named(moved):
    with pytest.raises(FileNotFoundError, match=r"explains the model in .*gpt2, which is not the"):
        LitConsistencyLens.from_exported(moved / "lens")


def test_a_subject_in_another_place_is_found(trained, moved):
    shutil.copytree(trained / "gpt2", moved / "gpt2")
    module = LitConsistencyLens.from_exported(moved / "lens")
    first = LitConsistencyLens.from_exported(trained / "lens")
    assert torch.equal(module.lens.mean, first.lens.mean)


def test_another_subject_is_refused(moved):
    saved_with_bytes(moved / "gpt2", "GPT2", n_positions=33)
    with pytest.raises(ValueError, match=r"another subject than this lens .*digest: \w+ then, \w+"):
        LitConsistencyLens.from_exported(moved / "lens")


def test_a_joint_run_begins_from_the_warm_start_of_another(trained, tmp_path):
    subject = SubjectOptions(path=str(trained / "gpt2"), layer=1)
    data = story_data(trained, tokenizer=None)
    module = lens_module(subject, JOINT, init_from=str(trained / "lens"))
    joint = read_checkpoint(fitted(tmp_path / "joint", module, data, max_steps=1, precision=32))
    warm = read_checkpoint(trained / "lens")
    for name, value in joint["state_dict"].items():
        if name.startswith("lens.reference."):  # stored at the first step
            assert torch.equal(value, warm["state_dict"][name.replace(".reference.", ".")]), name
    assert joint["state_dict"]["lens.reference_step"] == 0  # after the other lens's warm start
    assert warm["state_dict"]["lens.reference_step"] == 2
    assert joint["lens_recipe"]["trained_on"] == warm["lens_recipe"]["trained_on"]
    assert AVERAGED not in joint


def test_a_checkpoint_that_lacks_a_weight_or_has_one_too_many_is_refused(trained):
    module = LitConsistencyLens.from_exported(trained / "lens")
    state = module.state_dict()
    module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lens\.subject\.other"):
        module.load_state_dict({**state, "lens.subject.other": torch.zeros(1)})
    state.pop("lens.verbalizer.prompt")
    with pytest.raises(RuntimeError, match=r"Missing key.*lens\.verbalizer\.prompt"):
        module.load_state_dict(state)
