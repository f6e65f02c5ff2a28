"""Code systems: the rules by which occupation codes are written, and what breaks them."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

CONTROL_SYMBOLS = ("<pad>", "<begin>", "<end>", "<empty>")
DIGITS = "0123456789"
MOST_CODES = 5  # of one record


class CodeSystem:
    """The rules by which a code is written; `parse` checks one code and returns its normal form.

    Args:
        length: symbols of every ordinary code (levels, where a separator is given); None = any.
        alphabet: characters that a code may hold; None = any character.
        specials: codes outside the rules, each one symbol, such as -1 for "no title".
        special_descriptions: one description per special, used where a code book names none.
        max_codes: most codes of one record, 1 to 5; None = as many as a row of the data has.
        level_separator: text between the levels of a code; a level value is then one symbol.
    """

    def __init__(
        self,
        length: int | None = None,
        alphabet: str | None = None,
        specials: Sequence[str] = (),
        special_descriptions: Sequence[str] = (),
        max_codes: int | None = None,
        level_separator: str | None = None,
    ) -> None:
        if length is not None and length < 1:
            raise ValueError(f"length must be at least 1 or null for any length, got {length}.")
        if max_codes is not None and not 1 <= max_codes <= MOST_CODES:
            raise ValueError(
                f"max_codes must be 1 to {MOST_CODES}, got {max_codes}: the loss tries every "
                "order of a record's codes."
            )
        if level_separator == "":
            raise ValueError(
                "level_separator must not be empty; leave it out where each character of a code "
                "is a symbol of its own."
            )
        if special_descriptions and len(special_descriptions) != len(specials):
            raise ValueError(
                f"special_descriptions must be one per special ({len(specials)}), got "
                f"{len(special_descriptions)}."
            )
        self.length = length
        self.alphabet = alphabet
        self.specials = tuple(specials)
        self.special_descriptions = tuple(special_descriptions) or ("",) * len(self.specials)
        self.max_codes = max_codes
        self.level_separator = level_separator

    def to_dict(self) -> dict[str, Any]:
        """The system as plain JSON types."""
        return {
            "length": self.length,
            "alphabet": self.alphabet,
            "specials": list(self.specials),
            "special_descriptions": list(self.special_descriptions),
            "max_codes": self.max_codes,
            "level_separator": self.level_separator,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "CodeSystem":
        """The system that `to_dict` described."""
        return CodeSystem(**state)

    def split(self, code: str) -> list[str]:
        """The symbols of a code in normal form; a special is one symbol."""
        if code in self.specials:
            return [code]
        return code.split(self.level_separator) if self.level_separator else list(code)

    def join(self, symbols: Sequence[str]) -> str:
        """The code that these symbols spell."""
        return (self.level_separator or "").join(symbols)

    def parse(self, raw: str) -> str:
        """The code in its normal form: outer spaces dropped, nothing else changed.

        Raises:
            ValueError: the code breaks the rules; says which one and shows the likely right code.
        """
        code = raw.strip()
        if code in self.specials:
            return code
        if not code:
            raise ValueError("the code is empty; leave the row out or give it a code.")
        if self.level_separator:
            code = self.level_separator.join(s.strip() for s in code.split(self.level_separator))
        self._check_decimal(code)
        symbols = self.split(code)
        self._check_symbols(code, symbols)
        if self.length is not None and len(symbols) != self.length:
            raise ValueError(self._length_error(code, len(symbols)))
        return code

    def _check_decimal(self, code: str) -> None:
        if "." in (self.alphabet or "") or self.level_separator == ".":
            return
        match = re.fullmatch(r"(-?\d+)\.0*", code)
        if match and (self.alphabet is not None or self.length is not None):
            right = match[1]
            if self.length is not None and right not in self.specials:
                right = right.zfill(self.length)
            raise ValueError(
                f'code "{code}" was written as a decimal number; keep code columns as text '
                f'(here "{right}").'
            )

    def _check_symbols(self, code: str, symbols: list[str]) -> None:
        for place, symbol in enumerate(symbols, start=1):
            if not symbol:
                raise ValueError(
                    f'code "{code}" has an empty level {place}; a level needs a value between the '
                    f'separators "{self.level_separator}".'
                )
            if symbol in CONTROL_SYMBOLS:
                raise ValueError(f'code "{code}" holds "{symbol}", which is a reserved symbol.')
            wrong = [c for c in symbol if self.alphabet is not None and c not in self.alphabet]
            if wrong:
                specials = f" or one of {', '.join(self.specials)}" if self.specials else ""
                raise ValueError(
                    f'code "{code}" holds the unknown symbol "{wrong[0]}" at place {place}; '
                    f'a code is made of "{self.alphabet}"{specials}.'
                )

    def _length_error(self, code: str, length: int) -> str:
        unit = "levels" if self.level_separator else "symbols"
        rule = f"every code has {self.length}"
        if length > (self.length or 0):
            return f'code "{code}" is too long: {length} {unit}, {rule}.'
        if not self.level_separator and re.fullmatch(r"\d+", code):
            return (
                f'code "{code}" has {length} {unit}, {rule}: it seems to have lost its leading '
                f'zeros ("{code.zfill(self.length or 0)}"); read and save code columns as text.'
            )
        return f'code "{code}" is too short: {length} {unit}, {rule}.'


class HISCO(CodeSystem):
    """HISCO: five digits, up to five codes per record, and -1, -2, -3 outside the tree."""

    def __init__(self, max_codes: int = 5) -> None:
        super().__init__(
            length=5,
            alphabet=DIGITS,
            specials=("-1", "-2", "-3"),
            special_descriptions=(
                "Missing, no title",
                "Source explicitly states that the person does not work",
                "Non work related title",
            ),
            max_codes=max_codes,
        )


class OCC1950(CodeSystem):
    """The 1950 census classification (OCC1950): three digits, up to two codes per record."""

    def __init__(self, max_codes: int = 2) -> None:
        super().__init__(length=3, alphabet=DIGITS, max_codes=max_codes)


NAMED_SYSTEMS: dict[str, type[CodeSystem]] = {
    "hisco": HISCO,
    "occ1950": OCC1950,
    "from_data": CodeSystem,
}


def named_code_system(system: str | CodeSystem) -> CodeSystem:
    """The code system of this name (hisco, occ1950, from_data); a CodeSystem is passed through."""
    if isinstance(system, CodeSystem):
        return system
    if system not in NAMED_SYSTEMS:
        near = difflib.get_close_matches(system, NAMED_SYSTEMS, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise ValueError(
            f'code_system "{system}" is not one of {", ".join(NAMED_SYSTEMS)}.{hint} Any other '
            "system is a class: {class_path: datamodules.CodeSystem, init_args: …}."
        )
    return NAMED_SYSTEMS[system]()
