"""Whose tokenizer is used: that of a trained model, of a pretrained one, or the options' own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.core.checkpoint_recipe import checkpoint_to_load, read_recipe
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions

TEXT_RECIPE_KEY = "text_recipe"


def trained_tokenizer(trainer: Any) -> TextTokenizer | None:
    """Return the tokenizer with which the model of an evaluation was trained; none if unknown.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the checkpoint is damaged, or of another family.
    """
    if trainer is None:
        return None
    recipe = getattr(trainer.lightning_module, "recipe", None)
    if path := checkpoint_to_load(trainer):
        recipe = read_recipe(Path(path), TEXT_RECIPE_KEY, "text", "LitCausalLM")
    return TextTokenizer.from_dict(recipe["tokenizer"]) if recipe else None


def model_options(trainer: Any, given: TokenizerOptions | None) -> TokenizerOptions:
    """Return the options of the tokenizer for training.

    Args:
        trainer: whose module may bring a tokenizer, the folder that `wanted_tokenizer()` returns.
        given: by the user; none takes the model's, else bytes. A chat template alone joins the
            model's tokenizer.

    Raises:
        ValueError: the user's tokenizer is not the model's.
    """
    return options_of_model(getattr(trainer, "lightning_module", None), given)


def options_of_model(model: Any, given: TokenizerOptions | None) -> TokenizerOptions:
    """Return the options of the tokenizer with which a model is trained, see `model_options`."""
    wanted = getattr(model, "wanted_tokenizer", None)
    folder = wanted() if wanted is not None else None
    if folder is None:
        return given or TokenizerOptions()
    if given is None:
        return TokenizerOptions(kind="folder", path=str(folder))
    if given == TokenizerOptions(chat_template=given.chat_template) != TokenizerOptions():
        return replace(given, kind="folder", path=str(folder))
    if given.path is None or Path(given.path).resolve() != Path(folder).resolve():
        named = given.path or f"kind {given.kind}"
        raise ValueError(
            f"data.tokenizer is {named}, and the pretrained model in {folder} was trained with "
            "its own; leave data.tokenizer out (null), but for its chat_template."
        )
    return given
