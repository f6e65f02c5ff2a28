"""What a test computes, and where its second chain lies."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANDOM = "random_subject"


@dataclass(frozen=True)
class EvaluationOptions:
    """What a test computes.

    Args:
        num_draws: explanations drawn for each activation; the best of 2, 4, 8 and so on of them
            are rows of the table.
        num_examples: activations on the page of examples, evenly over the errors; 0 makes no page.
        random_subject: controls.json of a test of a lens whose subject has random weights, which
            becomes a row of the table.

    Raises:
        ValueError: a number out of its range.
    """

    num_draws: int = 8
    num_examples: int = 100
    random_subject: str | None = None

    def __post_init__(self) -> None:
        if self.num_draws < 1:
            raise ValueError(
                f"evaluation.num_draws must be at least 1, got {self.num_draws}; usual is 8."
            )
        if self.num_examples < 0:
            raise ValueError(
                f"evaluation.num_examples must be 0 or more, got {self.num_examples}; 0 makes no "
                "page of examples."
            )

    @property
    def best_of(self) -> tuple[int, ...]:
        """Of how many draws the best is a row: powers of two."""
        return tuple(2**n for n in range(1, self.num_draws.bit_length()))


def random_subject_rows(path: Path) -> dict[str, dict[str, float]]:
    """Return group -> values of the lens itself, of a test with a random subject.

    Args:
        path: controls.json of its run folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no table of controls, or its subject was trained.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"evaluation.random_subject {path} does not exist; it is the controls.json of a test "
            "whose model.subject.random_weights is true."
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        has_random_weights = content["subject"]["has_random_weights"]
        rows = {group: dict(found["greedy"]) for group, found in content["rows"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"evaluation.random_subject {path} is no controls.json of a test "
            f"({type(error).__name__}: {error}); name the one in the run folder of the second "
            "chain."
        ) from error
    if not has_random_weights:
        raise ValueError(
            f"evaluation.random_subject {path} is of a trained subject; name the controls.json of "
            "a test whose model.subject.random_weights is true."
        )
    return rows
