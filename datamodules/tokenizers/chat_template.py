"""Chats as text: Jinja templates of the Hugging Face kind, rendered as transformers does it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Message = Mapping[str, Any]  # role and content, and what else a template reads

TEMPLATES = {
    "plain": (
        "{% for message in messages %}"
        "{{ message.role + ':\\n' + message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{{ '\\n\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
}


def named_template(name: str) -> str:
    """Return a built-in template, or the content of a file.

    Raises:
        FileNotFoundError: it is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f'tokenizer.chat_template: "{name}" is no file and none of the built-in templates '
            f"({', '.join(TEMPLATES)}); name a Jinja file."
        )
    return path.read_text("utf-8")


class Renderer:
    """A compiled template. It runs in transformers' sandbox: templates come from strangers.

    Args:
        template: Jinja text.
        special_tokens: name -> token, which the template may use.
    """

    def __init__(self, template: str, special_tokens: dict[str, str]) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        # Rendering reads the special tokens and no vocabulary.
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **special_tokens
        )

    def __call__(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of a chat.

        Raises:
            ValueError: the template is wrong, or refuses these messages.
        """
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template refuses these messages ({error}); correct them, or name "
                "another template with data.tokenizer.chat_template."
            ) from error
