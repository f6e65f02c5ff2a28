"""A strategy by its name takes options on the command line, as its class does."""

import pytest

from lit_models.config_files import expand_configs
from lit_models.scheduling.acceptance import ParsedCLI
from lit_models.training import strategies
from lit_models.training.rules import STRATEGY_CLASSES
from lit_models.training.run_folder import Run

OPTION = "--trainer.strategy.tensor_parallel_size=2"
NAMED = "--trainer.strategy=fsdp"
AS_CLASS = f"--trainer.strategy={STRATEGY_CLASSES['fsdp']}"


def test_the_class_stands_before_its_options():
    assert expand_configs([OPTION, "--trainer.strategy", "fsdp", "--x"]) == [
        "--x",
        AS_CLASS,
        OPTION,
    ]
    assert expand_configs([NAMED]) == [NAMED]
    assert expand_configs([OPTION, AS_CLASS]) == [OPTION, AS_CLASS]
    for path in STRATEGY_CLASSES.values():
        assert hasattr(strategies, path.rpartition(".")[2])


@pytest.mark.parametrize(
    ("in_file", "given"),
    [("ddp", [NAMED, OPTION]), (None, [OPTION, NAMED]), ("fsdp", [OPTION])],
    ids=["name first", "option first", "name in a file"],
)
def test_the_parsed_strategy_has_the_option(in_file, given, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{max_epochs: 3, strategy: {in_file or 'auto'}}}\n")
    parts = ["--model=tests.toy.LitToy", "--data=tests.toy.ToyData"]
    argv = expand_configs(["--config", str(path), *given, *parts])
    trainer = ParsedCLI(["fit", *argv], Run("runs")).config["fit"].trainer
    assert trainer.strategy.class_path == STRATEGY_CLASSES["fsdp"]
    assert trainer.strategy.init_args.tensor_parallel_size == 2
    assert trainer.max_epochs == 3


def test_a_name_without_a_class_is_told_what_takes_options(tmp_path):
    option = "--trainer.strategy.bucket_cap_mb=50"
    words = "bucket_cap_mb: the strategy `ddp_spawn` takes no options.*start_method=spawn"
    with pytest.raises(ValueError, match=words):
        expand_configs(["--trainer.strategy=ddp_spawn", option])
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {strategy: ddp_spawn}\n")
    with pytest.raises(ValueError, match=words):
        expand_configs(["--config", str(path), option])


def test_the_way_out_is_a_strategy_that_can_be_made():
    strategies.ReplicatedStrategy(start_method="spawn", bucket_cap_mb=50)
