"""Which storages a pickle of `torch.save` refers to: their element types and the names of their tensors.

Nothing is unpickled. The opcodes are followed on a stack of symbols: calls are written down, never made. A pickle that
cannot be followed to its end tells what it told until then.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from tierfs.chunks.formats.opcodes import opcodes
from tierfs.chunks.span import UNKNOWN, Item

_BYTES = 16 << 20
"""Of the longest pickle that is looked at."""
_STEPS = 1 << 19
"""Opcodes that are followed, and symbols that are visited for names: 17,000 tensors. Each takes up to 2 µs."""
_NAME = 512
"""Characters of the longest name; a longer one ends there."""

_TYPES = {
    "Double": Item(8, True),
    "Float": Item(4, True),
    "Half": Item(2, True),
    "BFloat16": Item(2, True),
    "ComplexDouble": Item(8, True),
    "ComplexFloat": Item(4, True),
    "Long": Item(8),
    "Int": Item(4),
    "Short": Item(2),
    "QInt32": Item(4),
}
"""By the names of storage classes, less "Storage"."""
_DTYPES = {
    "torch float8_e4m3fn": Item(1, True),
    "torch float8_e5m2": Item(1, True),
    "torch float8_e4m3fnuz": Item(1, True),
    "torch float8_e5m2fnuz": Item(1, True),
    "torch float8_e8m0fnu": Item(1, True),
    "torch uint16": Item(2),
    "torch uint32": Item(4),
    "torch uint64": Item(8),
}
"""Types that have no storage class: their tensors are made from untyped storages."""


class Storage(NamedTuple):
    item: Item
    name: str
    """The path of keys to the first tensor that uses it, joined by dots; "" for a pickle that is a tensor itself."""


class _Symbol:
    """What an opcode made: a container, or the result of a call."""

    __slots__ = ("args", "items", "state")

    def __init__(self, args: object = ()) -> None:
        self.args = args
        """Of the call; for a tuple, its members."""
        self.items: list[tuple[object, object]] = []
        """Members by key; None is the key of a list's."""
        self.state: object = None


class _Global(str):
    """Module and name of a class or function, with a space between."""

    __slots__ = ()


class _Reference:
    """A storage that lies in a record of its own."""

    __slots__ = ("item", "key", "name")

    def __init__(self, key: str, item: Item) -> None:
        self.key = key
        self.item = item
        self.name: str | None = None


class _End(Exception):
    """Nothing more can be followed."""


def storages(raw: memoryview) -> dict[str, Storage]:
    """What the pickle says of each storage, by its key (the last part of its record's name)."""
    if len(raw) > _BYTES:
        return {}
    machine = _Machine()
    machine.run(bytes(raw))
    if machine.stack:
        _give_names(machine.stack[-1])
    return {key: Storage(found.item, found.name or "") for key, found in machine.references.items()}


class _Machine:
    def __init__(self) -> None:
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[object, object] = {}
        self.references: dict[str, _Reference] = {}

    def run(self, raw: bytes) -> None:
        """Follow it as far as it goes; the result is on top of the stack."""
        try:
            for code, arg in islice(opcodes(raw), _STEPS):
                handle = _HANDLERS[code]
                if handle is not None:
                    handle(self, arg)
        except (_End, ValueError, IndexError, OverflowError, RecursionError):
            return  # damaged, or no pickle

    def pop(self) -> object:
        if not self.stack or (self.marks and self.marks[-1] == len(self.stack)):
            raise _End
        return self.stack.pop()

    def top(self) -> object:
        if not self.stack:
            raise _End
        return self.stack[-1]

    def since_mark(self) -> list[object]:
        if not self.marks:
            raise _End
        at = self.marks.pop()
        found = self.stack[at:]
        del self.stack[at:]
        return found

    # handlers, each for the opcodes that `_HANDLERS` gives it

    def literal(self, arg: object) -> None:
        self.stack.append(arg)

    def unknown(self, arg: object) -> None:
        raise _End

    def mark(self, arg: object) -> None:
        self.marks.append(len(self.stack))

    def drop(self, arg: object) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop()

    def drop_to_mark(self, arg: object) -> None:
        self.since_mark()

    def duplicate(self, arg: object) -> None:
        self.stack.append(self.top())

    def put(self, arg: object) -> None:
        self.memo[arg] = self.top()

    def memoize(self, arg: object) -> None:
        self.memo[len(self.memo)] = self.top()

    def get(self, arg: object) -> None:
        if arg not in self.memo:
            raise _End
        self.stack.append(self.memo[arg])

    def empty(self, arg: object) -> None:
        self.stack.append(_Symbol())

    def tuple_of(self, count: int) -> None:
        members = [self.pop() for _ in range(count)]
        self.stack.append(_Symbol(tuple(reversed(members))))

    def tuple_since_mark(self, arg: object) -> None:
        self.stack.append(_Symbol(tuple(self.since_mark())))

    def list_since_mark(self, arg: object) -> None:
        made = _Symbol()
        made.items = [(None, value) for value in self.since_mark()]
        self.stack.append(made)

    def dict_since_mark(self, arg: object) -> None:
        made = _Symbol()
        made.items = _pairs(self.since_mark())
        self.stack.append(made)

    def append(self, arg: object) -> None:
        value = self.pop()
        self._container().items.append((None, value))

    def appends(self, arg: object) -> None:
        values = self.since_mark()
        self._container().items += [(None, value) for value in values]

    def set_item(self, arg: object) -> None:
        value, key = self.pop(), self.pop()
        self._container().items.append((key, value))

    def set_items(self, arg: object) -> None:
        pairs = _pairs(self.since_mark())
        self._container().items += pairs

    def _container(self) -> _Symbol:
        found = self.top()
        if not isinstance(found, _Symbol):
            raise _End
        return found

    def name(self, arg: object) -> None:
        self.stack.append(_Global(arg))

    def name_on_stack(self, arg: object) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(_Global(f"{module} {name}"[:_NAME]))

    def call(self, arg: object) -> None:
        args, function = self.pop(), self.pop()
        if function == "torch._utils _rebuild_tensor_v3" and isinstance(args, _Symbol):
            _refine(args.args)
        self.stack.append(_Symbol((args,)))

    def call_with_keywords(self, arg: object) -> None:
        keywords, args, _ = self.pop(), self.pop(), self.pop()
        self.stack.append(_Symbol((args, keywords)))

    def call_since_mark(self, arg: object) -> None:
        self.stack.append(_Symbol(tuple(self.since_mark())))

    def build(self, arg: object) -> None:
        state = self.pop()
        self._container().state = state

    def persistent(self, arg: object) -> None:
        """``("storage", class, key, location, number of elements)``: what torch.save stands in for a storage."""
        pid = self.pop()
        fields = pid.args if isinstance(pid, _Symbol) else ()
        if isinstance(fields, tuple) and len(fields) >= 3 and fields[0] == "storage" and isinstance(fields[2], str):
            self.stack.append(self.references.setdefault(fields[2], _Reference(fields[2], _item(fields[1]))))
        else:
            self.stack.append(None)


def _item(kind: object) -> Item:
    if not isinstance(kind, _Global):
        return UNKNOWN
    return _TYPES.get(kind.rpartition(" ")[2].removesuffix("Storage"), UNKNOWN)


def _refine(args: object) -> None:
    """A tensor of a type without a storage class: its type is the seventh argument."""
    if isinstance(args, tuple) and len(args) >= 7 and isinstance(args[0], _Reference) and isinstance(args[6], _Global):
        args[0].item = _DTYPES.get(args[6], args[0].item)


def _pairs(values: list[object]) -> list[tuple[object, object]]:
    if len(values) % 2:
        raise _End
    return list(zip(values[::2], values[1::2], strict=True))


def _tuples(count: int) -> Callable[[_Machine, object], None]:
    return lambda machine, arg: machine.tuple_of(count)


_Handler = Callable[[_Machine, object], None]

_BY_NAME: Final[dict[str, _Handler | None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP", "READONLY_BUFFER"), None),
    **dict.fromkeys(("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"), _Machine.empty),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("LIST", "FROZENSET"), _Machine.list_since_mark),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _Machine.appends),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    **dict.fromkeys(("INST", "OBJ"), _Machine.call_since_mark),
    "MARK": _Machine.mark,
    "POP": _Machine.drop,
    "POP_MARK": _Machine.drop_to_mark,
    "DUP": _Machine.duplicate,
    "MEMOIZE": _Machine.memoize,
    "TUPLE": _Machine.tuple_since_mark,
    "TUPLE1": _tuples(1),
    "TUPLE2": _tuples(2),
    "TUPLE3": _tuples(3),
    "DICT": _Machine.dict_since_mark,
    "APPEND": _Machine.append,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_on_stack,
    "NEWOBJ_EX": _Machine.call_with_keywords,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}


def _handlers() -> list[_Handler | None]:
    """By opcode. One without a handler that takes nothing from the stack and puts one value there is a literal."""
    found: list[_Handler | None] = [_Machine.unknown] * 256
    for opcode in pickletools.opcodes:
        literal = not opcode.stack_before and len(opcode.stack_after) == 1
        found[ord(opcode.code)] = _BY_NAME.get(opcode.name, _Machine.literal if literal else _Machine.unknown)
    return found


_HANDLERS: Final = _handlers()


def _give_names(root: object) -> None:
    """Name each storage after the first place in the object where a tensor uses it, in the order of the pickle."""
    seen: set[int] = set()
    waiting: list[Iterator[tuple[str, object]]] = [iter([("", root)])]
    steps = 0
    while waiting and steps < _STEPS:
        steps += 1
        path, found = next(waiting[-1], (None, None))
        if path is None:
            waiting.pop()
        elif isinstance(found, _Reference):
            if found.name is None:
                found.name = path
        elif isinstance(found, _Symbol) and id(found) not in seen:
            seen.add(id(found))
            waiting.append(_members(path, found))


def _members(path: str, symbol: _Symbol) -> Iterator[tuple[str, object]]:
    """Arguments and state have their owner's path, members of lists and dictionaries their own."""
    if isinstance(symbol.args, tuple):
        for arg in symbol.args:
            if isinstance(arg, _Symbol | _Reference):
                yield path, arg
    for index, (key, value) in enumerate(symbol.items):
        if not isinstance(value, _Symbol | _Reference):
            continue
        part = index if key is None else key
        text = part if isinstance(part, str) else str(part) if type(part) is int and abs(part) < 1 << 63 else "?"
        yield (f"{path}.{text}" if path else text)[:_NAME], value
    yield path, symbol.state
