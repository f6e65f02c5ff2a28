"""Steps of a lens: frozen parts, parts that learn later, on one device and on two; their replay."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from torch import Tensor

from lit_models.causal_lm.adapters import LoraOptions
from lit_models.commands.replay import find_step, replay_step
from lit_models.commands.verify import verify_run
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.subject import BaseOptions
from lit_models.training import default_callbacks
from lit_models.training.sharding import whole as whole_tensor
from tests.consistency_lens.small_lens import fitted, lens_module, story_data
from tests.distributed.launch import in_world
from tests.distributed.lens_family import story_files
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow

UNFREEZE_AT, STEPS = 4, 7
BASES = {
    "late": BaseOptions(unfreeze_at=UNFREEZE_AT),
    "lora": BaseOptions(lora=LoraOptions(["q_proj", "up_proj"], rank=2)),
    "frozen": BaseOptions(is_frozen=True),
}
OPTIONS = {key: LensOptions(3, verbalizer=base, reconstructor=base) for key, base in BASES.items()}
JOBS: dict[str, tuple[str, LensOptions]] = {
    name + end: (strategy, options)
    for name, options in OPTIONS.items()
    for strategy, end in (("ddp", ""), ("fsdp", ", fsdp"))
}
PARTS = ("verbalizer", "reconstructor")
LATE = OPTIONS["late"]
History = dict[int, dict[str, Tensor]]  # step -> name -> weight


class Weights(Callback):
    """Keeps all weights after each optimizer step, and at step 0, gathered as on one device."""

    def __init__(self) -> None:
        self.after: History = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(0, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.note(trainer.global_step, pl_module)

    def note(self, step: int, module: Any) -> None:
        own = module.lens.named_parameters(remove_duplicate=False)
        self.after[step] = {name: whole_tensor(p.detach()).clone() for name, p in own}


def fit(
    folder: Path,
    options: LensOptions,
    optimizer: Any = torch.optim.AdamW,
    data: dict[str, Any] | None = None,
    **more: Any,
) -> History:
    """Fit in float64 on the stories beside the folder; return the weights after each step."""
    module = lens_module(optimizer=partial(optimizer, lr=0.02, weight_decay=0.1), lens=options)
    activations = story_data(folder.parent, **{"global_batch_size": 8, **(data or {})})
    limits = {"max_steps": STEPS, "gradient_clip_val": 1.0, "limit_val_batches": 0, **more}
    weights = Weights()
    fitted(folder, module, activations, callbacks=[*default_callbacks(), weights], **limits)
    return weights.after


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unfreezing")
    story_files(folder)
    return folder


def moves(weights: History, name: str) -> list[bool]:
    """Return for each step whether a weight changed."""
    return [not torch.equal(weights[s][name], weights[s + 1][name]) for s in range(STEPS)]


def check_schedule(weights: History) -> None:
    for part in PARTS:
        name = f"{part}.network.layers.0.attention.q_proj.weight"
        assert moves(weights, name) == [step >= UNFREEZE_AT for step in range(STEPS)], part
        assert torch.equal(weights[0][name], weights[0][name.replace(part, "subject")])
    for name in ("verbalizer.prompt", "verbalizer.map_weight", "reconstructor.map.weight"):
        assert all(moves(weights, name)), name
    assert not any(moves(weights, "subject.network.layers.0.attention.q_proj.weight"))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)], ids=["AdamW", "SGD"]
)
def test_until_its_step_a_network_is_moved_by_nothing(stories, optimizer, request):
    check_schedule(fit(stories / request.node.name, LATE, optimizer=optimizer))


def test_the_norm_does_not_count_what_does_not_learn_yet(stories):
    for name in ("late", "frozen"):
        fit(stories / f"norm-{name}", OPTIONS[name])
    one, other = (ledger_lines(stories / n) for n in ("norm-late", "norm-frozen"))
    norms = [[line["grad_norm"] for line in lines] for lines in (one, other)]
    assert norms[0][:UNFREEZE_AT] == pytest.approx(norms[1][:UNFREEZE_AT], rel=1e-9)
    assert norms[0][UNFREEZE_AT] > 1.001 * norms[1][UNFREEZE_AT]


def test_a_resume_across_the_step_equals_an_uninterrupted_run(stories):
    whole = fit(stories / "whole", LATE)
    fit(stories / "cut", LATE, max_steps=UNFREEZE_AT - 1)
    last = str(stories / "cut" / "checkpoints" / "last.ckpt")
    resumed = fit(stories / "cut", LATE, resume=last)
    torch.testing.assert_close(resumed[STEPS], whole[STEPS], rtol=1e-8, atol=1e-10)


def test_accumulated_micro_batches_learn_as_late(stories):
    whole = fit(stories / "one batch", LATE)
    cut = fit(stories / "many", LATE, data={"micro_batch_size": 2})
    torch.testing.assert_close(cut[STEPS], whole[STEPS], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["frozen", "lora"])
def test_a_checkpoint_holds_what_learns_and_no_frozen_weight(stories, kind):
    weights = fit(stories / kind, OPTIONS[kind])
    saved = torch.load(stories / kind / "checkpoints" / "last.ckpt", weights_only=True)
    names = {name.removeprefix("lens.") for name in saved["state_dict"] if "lens." in name}
    assert names - {"mean", "variance", "reference_step"} == {n for n in names if _is_own(n)}
    for name in weights[0]:
        assert any(moves(weights, name)) == _is_own(name), name


def _is_own(name: str) -> bool:
    ends = ("prompt", "map_weight", "map_bias", "start", "map.weight", "map.bias")
    is_untrained = name.startswith(("untrained", "subject"))
    return not is_untrained and name.endswith((*ends, "lora_A", "lora_B"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledgers of all jobs on two devices, and the weights that each rank saw."""
    folder = tmp_path_factory.mktemp("two")
    story_files(folder)
    in_world(2, fit_all, folder)
    return folder


def fit_all(folder: Path) -> None:
    """Fit every job; each rank writes NAME/weights-RANK.pt: step -> name -> weight."""
    torch.set_num_threads(1)
    for name, (strategy, options) in JOBS.items():
        weights = fit(folder / name, options, devices=2, strategy=strategy)
        torch.save(weights, folder / name / f"weights-{os.environ['RANK']}.pt")
    dist.destroy_process_group()


@pytest.mark.soak
@pytest.mark.parametrize("name", list(JOBS))
def test_two_devices_learn_what_one_learns_and_agree(two, stories, name):
    ranks = [torch.load(two / name / f"weights-{r}.pt", weights_only=True) for r in (0, 1)]
    for step, weights in ranks[0].items():
        assert all(torch.equal(w, ranks[1][step][n]) for n, w in weights.items()), step
    alone = fit(stories / f"alone {name}", JOBS[name][1])
    if name.startswith("late"):
        check_schedule(ranks[0])
    for weight_name, weight in alone[STEPS].items():
        found = ranks[0][STEPS][weight_name]
        torch.testing.assert_close(found, weight, rtol=1e-7, atol=1e-8, msg=weight_name)
    losses = [
        [line["loss"] for line in ledger_lines(f / n)]
        for f, n in ((two, name), (stories, f"alone {name}"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a whole run, which trains jointly from step 2 on."""
    folder = tmp_path_factory.mktemp("whole")
    fitted(folder / "run", lens_module(), story_data(folder, micro_batch_size=8), max_steps=4)
    return folder / "run"


def test_the_ledger_of_a_lens_proves_its_steps(whole):
    assert verify_run(whole).faults == []
    lines = ledger_lines(whole)
    assert [set(line["terms"]) for line in lines[1:3]] == [
        {"teacher_text", "teacher_reconstruction"},
        {"reconstruction", "reference"},
    ]
    # The first joint step: the networks are their own reference.
    assert lines[2]["terms"]["reference"] == pytest.approx(0, abs=1e-12)
    assert lines[3]["terms"]["reference"] > 1e-8


@pytest.mark.parametrize("step", [1, 3, 4])  # the third step is the first joint one
def test_a_step_of_a_lens_is_replayed(whole, step):
    data = story_data(whole.parent)
    found = find_step(whole, step)
    values = {"max_epochs": 9, "max_steps": 4, "precision": "64-true"}
    seed_everything(1, verbose=False)
    untrained = replace(found, checkpoint=None, checkpoint_step=0)
    result = replay_step(untrained, lens_module(), data, values, advance=True)
    assert result.loss == pytest.approx(found.line["loss"], rel=1e-10)
    assert result.grad_norm == pytest.approx(found.line["grad_norm"], rel=1e-9)
    assert len(result.samples) == 16
