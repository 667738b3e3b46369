"""A JSON object in a file of a checkpoint, whose errors name the file and the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from gridsieve.common.contract.errors import StartupError


class Fields(dict[str, Any]):
    """The fields of a JSON object. Fields that are null are left out, at any depth.

    file: the file's name. path: of the object in the file, with a dot after it; "" of the whole. written: the object
    with its nulls, for transformers' classes. Some of these tell null from absence: `weight_block_size` null means one
    scale for a matrix, and without the field blocks of 128.
    Raises StartupError where a field is read as `fields[name]` that is absent.
    """

    def __init__(self, file: str, written: Mapping[str, Any], path: str = "") -> None:
        self.file, self.path, self.written = file, path, written
        super().__init__({name: value for name, value in written.items() if value is not None})
        self |= {name: Fields(file, value, f"{path}{name}.") for name, value in self.items() if isinstance(value, dict)}

    def __missing__(self, name: str) -> NoReturn:
        raise StartupError(f"{self.file} lacks {self.path}{name}")

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`. Raises StartupError for another value, and without it and a default."""
        value = self[name] if default is None else self.get(name, default)
        if not _is_number(value) or value != int(value) or value < least:
            raise self.refusal(name, f"a whole number of at least {least}")
        return int(value)

    def number(
        self,
        name: str,
        default: float | None = None,
        allowed: Callable[[float], bool] = lambda value: value > 0,
        limit: str = "above 0",
    ) -> float:
        """A finite number. limit: says which are allowed. Raises StartupError as `whole`."""
        value = self[name] if default is None else self.get(name, default)
        if not _is_number(value) or not allowed(value):
            raise self.refusal(name, f"a number {limit}")
        return float(value)

    def numbers(self, name: str, count: int, default: Sequence[float] | None = None) -> tuple[float, ...]:
        """A list of `count` numbers; a single number is read as `count` equal ones. Raises StartupError as `whole`."""
        values = self[name] if default is None else self.get(name, default)
        values = [values] * count if _is_number(values) else values
        if not isinstance(values, list | tuple) or len(values) != count or not all(map(_is_number, values)):
            raise self.refusal(name, f"{count} numbers")
        return tuple(values)

    def part(self, name: str) -> Fields:
        """An object, empty where it is absent. Raises StartupError for another value."""
        value = self.get(name, Fields(self.file, {}, f"{self.path}{name}."))
        if not isinstance(value, Fields):
            raise self.refusal(name, "an object")
        return value

    def refusal(self, name: str, limit: str) -> StartupError:
        """The error for a field that has another value than it may have."""
        return StartupError(f"{self.file}: {self.path}{name} must be {limit}, got {self.get(name)!r}")


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Makes a StartupError, which begins with `where`, of an error with which transformers refuses a value."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StartupError(f"{where}: {' '.join(str(error).split())}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
