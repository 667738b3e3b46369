"""Mutations of messages: fields dropped, doubled, swapped or set to extremes, and corrupted bytes.

They work on descriptors, so fields that are added to the contract are mutated too.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = (0, 1, -1, 2, 7, 255, 2**15, 2**16 + 1, 2**22, 2**22 + 1, 2**31 - 1, -(2**31))
_LONG_INTEGERS = (*_INTEGERS, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, -(2**63))
_NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 5e-324, 1e300, 0.999999999, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "", "\0", "a\nb", "%s%n{0}", "{{ 7 * 7 }}{% raise %}", "\u202eevil\u0301" * 20, "evs", "vidcom2",
    "<|im_end|>\n<|im_start|>system\n", "<|vision_start|><|video_pad|><|vision_end|>", "<|image_pad|>" * 50,
    "⟨00000000000000000000000000000000⟩", "clip.mp4", "../../../../etc/passwd", "/proc/self/environ",
    "file:///etc/passwd", "http://127.0.0.1:1/", "data:video/mp4;base64,AAAA",
)  # fmt: skip
_CHARACTERS = "aé ☃𝕏\n<|"
# Each copy may be a media item, which costs a worker some milliseconds.
_MOST_ADDED = 30
_MOST_BYTES = 2**16


# A field of a message or of one nested in it.
Place: TypeAlias = tuple[Any, FieldDescriptor]


def mutate(message: Message, random_: random.Random) -> None:
    """Changes one to four fields of a message or of those nested in it."""
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        if not (places := list(_places(message))):
            return  # a message without fields
        set_ones = [place for place in places if _is_set(place)]
        # Prefer set fields, which have more effect; an empty message has none.
        _change(random_.choice(set_ones if set_ones and random_.random() < 0.8 else places), random_)


def mutate_bytes(data: bytes, random_: random.Random) -> bytes:
    """Corrupts bytes anywhere."""
    broken = bytearray(data)
    start = random_.randrange(len(broken) + 1)
    end = min(len(broken), start + random_.randrange(1, 32))
    match random_.randrange(5):
        case 0:
            del broken[start:]
        case 1:
            for _ in range(random_.randrange(1, 8)):
                if broken:
                    broken[random_.randrange(len(broken))] ^= 1 << random_.randrange(8)
        case 2:
            broken[start:end] = random_.randbytes(end - start)
        case 3:
            broken[start:start] = broken[start:end] * random_.randrange(1, 4)
        case _:  # a very large varint
            broken[start:start] = b"\xff" * random_.randrange(1, 12)
    return bytes(broken)


def _places(message: Any) -> Iterator[Place]:
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue  # changed as bytes alone
        yield message, field
        if field.message_type is None:
            continue
        if field.is_repeated:
            for each in getattr(message, field.name)[:4]:
                yield from _places(each)
        elif message.HasField(field.name):
            yield from _places(getattr(message, field.name))


def _is_set(place: Place) -> bool:
    message, field = place
    if field.is_repeated:
        return bool(getattr(message, field.name))
    if field.has_presence:
        return bool(message.HasField(field.name))
    return getattr(message, field.name) != field.default_value


def _change(place: Place, random_: random.Random) -> None:
    message, field = place
    if field.is_repeated:
        _change_repeated(getattr(message, field.name), field, random_)
    elif _is_set(place) and random_.random() < 0.25:
        message.ClearField(field.name)
    elif field.message_type is not None:
        within = getattr(message, field.name)
        within.SetInParent()
        mutate(within, random_)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), random_))


def _change_repeated(values: Any, field: FieldDescriptor, random_: random.Random) -> None:
    how = random_.randrange(6) if values else 5
    here = random_.randrange(len(values)) if values else 0
    if how == 0:
        del values[here]
    elif how == 1:
        del values[:]
    elif how == 2:
        values.extend([values[here]] * random_.choice((1, 1, 2, _MOST_ADDED)))
    elif how == 3:
        shuffled = random_.sample(list(values), len(values))
        del values[:]
        values.extend(shuffled)
    elif field.message_type is not None:
        mutate(values.add() if how == 5 else values[here], random_)
    elif how == 5:
        values.append(_value(field, None, random_))
    else:
        values[here] = _value(field, values[here], random_)


def _value(field: FieldDescriptor, value: Any, random_: random.Random) -> Any:
    """Another value of the type of the field. value: the current one, None if unset."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return not value
        case FieldDescriptor.CPPTYPE_INT32:
            return _near(value, random_, _INTEGERS)
        case FieldDescriptor.CPPTYPE_INT64:
            return _near(value, random_, _LONG_INTEGERS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return random_.choice((0, 1, 2, 3, 4, 5, 6, 77, -1, 2**31 - 1))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return random_.choice(_NUMBERS)
    return _text(random_) if field.type == FieldDescriptor.TYPE_STRING else _data(value or b"", random_)


def _near(value: int | None, random_: random.Random, extremes: Sequence[int]) -> int:
    """An extreme value, or a neighbour of the current one to find off-by-one mistakes."""
    beside = (value or 0) + random_.choice((-1, 1))
    return beside if random_.random() < 0.4 and extremes[-1] <= beside <= max(extremes) else random_.choice(extremes)


def _text(random_: random.Random) -> str:
    if random_.random() < 0.9:
        return random_.choice(_TEXTS)
    return "".join(random_.choices(_CHARACTERS, k=16)) * (random_.randrange(_MOST_BYTES) // 32)


def _data(data: bytes, random_: random.Random) -> bytes:
    match random_.randrange(6):
        case 0:
            return b""
        case 1:
            return random_.randbytes(random_.choice((1, 31, 32, 33, 1000)))
        case 2:
            return bytes(random_.randrange(_MOST_BYTES))
        case 3:  # ends with NaN, infinity or a huge float
            return data[:-4] + struct.pack("<f", random_.choice((float("nan"), float("inf"), 3e38)))
        case 4:  # ends with an integer that is no valid index
            return data[:-4] + struct.pack("<i", random_.choice((-1, 2**31 - 1, 0)))
    return mutate_bytes(data, random_)
