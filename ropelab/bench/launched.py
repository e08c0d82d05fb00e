"""Note the Triton kernels that calls launch, and plan a noted launch again without its tensors.

A note has the name of a kernel (``kernel``) and the hash of its compiled code (``code``). A launch of this project also
has the hash of the kernel's source, the hash of its constants, the grid, and the plan. The plan is the function of
`ropelab.kernels` that chose the constants, with the shapes, strides and dtypes of its tensors. `planned` calls the
function again, so that the launch of today can be compared with the launch that was measured
(`ropelab.bench.staleness`).
"""

import ast
import hashlib
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import CompiledKernel

from ropelab import kernels
from ropelab.bench.code_hash import DIGITS, syntax_tree
from ropelab.bench.compiled import code_hash_of
from ropelab.call import operation
from ropelab.kernels.choices import plain
from ropelab.kernels.launch import Launch

COLUMN = "triton_launches"
"""The column of a record: the notes of a row, by name."""
Note = dict[str, Any]


@contextmanager
def noted() -> Iterator[dict[str, Note]]:
    """Note the launches of all calls within the context. The mapping has each note once, in order."""
    notes: dict[str, Note] = {}
    plans: dict[int, Note] = {}
    codes: dict[int, str] = {}
    kept: list[object] = []  # the numbers that identify launches and kernels are theirs as long as they live
    running: list[list[str]] = []
    call, metadata = Launch.__call__, CompiledKernel.launch_metadata

    def keep(note: Note) -> None:
        notes.setdefault(json.dumps(note), note)

    def planning(function: str, plan: Callable) -> Callable:
        def noting(*arguments, **options):
            with _launches() as made:
                result = plan(*arguments, **options)
            about = {"function": function, "arguments": _Encoder().encoded((arguments, options))}
            text = json.dumps(about, separators=(",", ":"))
            plans.update({id(launch): {"plan": text, "number": number} for number, launch in enumerate(made)})
            kept.extend(made)
            return result

        return noting

    def called(launch, tensors, *numbers):
        running.append([])
        try:
            return call(launch, tensors, *numbers)
        finally:
            compiled, plan = running.pop(), plans.setdefault(id(launch), {})
            if "noted" not in plan:
                dtypes = " ".join("-" if x is None else _name(x.dtype) for x in tensors)
                keep(facts(launch) | {"code": "".join(compiled[:1]), "dtypes": dtypes} | plan)
                plan["noted"] = True
                kept.append(launch)

    def started(kernel, *arguments):
        if is_new := id(kernel) not in codes:
            codes[id(kernel)] = code_hash_of(kernel)
            kept.append(kernel)
        if running:
            running[-1].append(codes[id(kernel)])
        elif is_new:
            keep(_unplanned(kernel) | {"code": codes[id(kernel)]})
        return metadata(kernel, *arguments)

    prepared = dict(operation.prepared_calls)
    operation.prepared_calls.clear()  # so that each call is planned again
    with ExitStack() as opened:
        for module in _modules():
            for name in [name for name in vars(module) if name.startswith("plan_")]:
                function = f"{module.__name__.rpartition('.')[2]}.{name}"
                opened.enter_context(mock.patch.object(module, name, planning(function, getattr(module, name))))
        opened.enter_context(mock.patch.object(Launch, "__call__", called))
        opened.enter_context(mock.patch.object(CompiledKernel, "launch_metadata", started))
        try:
            yield notes
        finally:
            operation.prepared_calls.update(prepared)


def _unplanned(kernel: CompiledKernel) -> Note:
    """The name of a kernel that no plan launched, and the hash of its source if it is of this project."""
    function = getattr(kernel.src, "fn", None)
    if function is not None and function.__module__.startswith(kernels.__name__):
        return {"kernel": _kernel_name(function), "source": source_hash(function)}
    return {"kernel": kernel.name}


def planned(note: Note, gpu: Mapping[str, Any]) -> Launch:
    """The launch that today's code makes for the call of a note.

    Args:
        gpu: the facts of the GPU that a record has.

    Raises:
        Exception: today's code cannot plan such a call.
    """
    plan = json.loads(note["plan"])
    module, _, name = plan["function"].partition(".")
    properties = SimpleNamespace(multi_processor_count=gpu.get("sm_count"))
    capability = tuple(int(part) for part in gpu.get("capability", "9.0").split("."))
    device = "cuda" if "sm_count" in gpu else "cpu"
    with ExitStack() as opened:
        if device == "cuda":
            opened.enter_context(mock.patch.object(_module("float8_triton"), "INTERPRETED", False))
        opened.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties))
        opened.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability))
        opened.enter_context(FakeTensorMode())
        arguments, options = _Decoder(device).decoded(plan["arguments"])
        made = opened.enter_context(_launches())
        getattr(_module(module), name)(*arguments, **options)
    return made[note["number"]]


def facts(launch: Launch) -> Note:
    """The name of a launch's kernel, the hash of its source, and the hash of its constants.

    The constants are everything besides tensors and the numbers of a call: grid, strides, choices, and the options of
    the compiler.
    """
    constants = _digest(json.dumps(plain([launch.grid, launch.fixed, sorted(launch.options.items())])))
    about = {"kernel": _kernel_name(launch.kernel), "source": source_hash(launch.kernel)}
    return about | {"constants": constants, "grid": list(launch.grid)}


def of_today(note: Note, gpu: Mapping[str, Any]) -> Note:
    """The facts of a noted launch of this project, as today's code makes it.

    Raises:
        Exception: today's code has no such kernel, or cannot plan such a call.
    """
    if "plan" in note:
        return facts(planned(note, gpu))
    module, _, name = note["kernel"].partition(".")
    return {"source": source_hash(getattr(_module(module), name))}


def source_hash(kernel: Any) -> str:
    """The hash of the syntax trees of a kernel, of everything of this project that it names, and so on.

    Comments and docstrings do not count (`ropelab.bench.code_hash`). Numbers and words count by their values.
    """
    found: dict[str, str] = {}
    waiting = [kernel.fn]
    while waiting:
        function = waiting.pop()
        home, name = function.__module__, function.__name__
        if (place := f"{home}.{name}") in found:
            continue
        around = vars(importlib.import_module(home))
        found[place], used = _definitions(Path(around["__file__"]).read_bytes())[name]
        for other in used & around.keys():
            value = around[other]
            value = getattr(value, "fn", value)  # a function as Python has it
            if _is_constant(value):
                noted = False if other.endswith("INTERPRETED") else plain(value)  # a record is of a GPU
                found[f"{home}.{other}"] = repr(noted)
            elif str(getattr(value, "__module__", "")).startswith(kernels.__name__):
                waiting.append(value)
    return _digest(json.dumps(sorted(found.items())))


@cache
def _definitions(source: bytes) -> dict[str, tuple[str, set[str]]]:
    """The name of each function and class of a module -> its syntax tree, and the names in it."""
    return {
        node.name: (syntax_tree(node), {part.id for part in ast.walk(node) if isinstance(part, ast.Name)})
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def collected(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Note]]:
    """The table with the names of notes in place of the notes in its column, and the notes by their names."""
    notes: dict[str, Note] = {}

    def names(text: object) -> str:
        found = {}
        for note in json.loads(text) if isinstance(text, str) and text else ():
            found[f"{note['kernel'].rpartition('.')[2]}:{_digest(json.dumps(note))[:8]}"] = note
        notes.update(found)
        return " ".join(found)

    if COLUMN not in frame:
        return frame, notes
    written = frame.assign(**{COLUMN: frame[COLUMN].map(names)})
    return (written if notes else written.drop(columns=COLUMN)), notes


# ------------------------------------------------------------------------------------------------- plans as JSON


class _Encoder:
    """Write the arguments of a plan as JSON; a tensor that comes again is the same tensor."""

    def __init__(self):
        self.tensors: list[torch.Tensor] = []

    def encoded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for number, tensor in enumerate(self.tensors):
                if tensor is value:
                    return {"same": number}
            self.tensors.append(value)
            return {"tensor": [list(value.shape), list(value.stride()), _name(value.dtype)]}
        if isinstance(value, torch.dtype):
            return {"dtype": _name(value)}
        if is_dataclass(value) and not isinstance(value, type):
            given = {f.name: getattr(value, f.name) for f in fields(value)}
            defaults = {f.name: f.default for f in fields(value) if f.default is not MISSING}
            changed = {k: v for k, v in given.items() if k not in defaults or v != defaults[k]}
            return self._made(value, changed)
        if hasattr(value, "_asdict"):
            return self._made(value, {name: x for name, x in value._asdict().items() if x is not None})
        if isinstance(value, Mapping):
            return {"options": {name: self.encoded(x) for name, x in value.items()}}
        if isinstance(value, tuple | list):
            return [self.encoded(x) for x in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"plan: expected tensors, numbers and tuples of them, got {type(value).__name__}")

    def _made(self, value: Any, given: Mapping[str, Any]) -> Any:
        module = type(value).__module__.removeprefix(f"{kernels.__name__}.")
        return {"of": f"{module}.{type(value).__name__}", "with": {n: self.encoded(x) for n, x in given.items()}}


class _Decoder:
    """Read the arguments of a plan from JSON, with tensors of the current mode on a device."""

    def __init__(self, device: str):
        self.device = device
        self.tensors: list[torch.Tensor] = []

    def decoded(self, value: Any) -> Any:
        match value:
            case {"same": number}:
                return self.tensors[number]
            case {"tensor": [shape, stride, dtype]}:
                x = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=self.device)
                self.tensors.append(x)
                return x
            case {"dtype": name}:
                return getattr(torch, name)
            case {"options": options}:
                return {name: self.decoded(x) for name, x in options.items()}
            case {"of": name, "with": given}:
                module, _, kind = name.rpartition(".")
                made = getattr(_module(module), kind)
                lacking = dict.fromkeys(getattr(made, "_fields", ()))
                return made(**(lacking | {name: self.decoded(x) for name, x in given.items()}))
            case list():
                return tuple(self.decoded(x) for x in value)
        return value


@contextmanager
def _launches() -> Iterator[list[Launch]]:
    """The launches that are made within the context."""
    made: list[Launch] = []
    make = Launch.__init__

    def making(launch, *arguments, **options):
        make(launch, *arguments, **options)
        made.append(launch)

    with mock.patch.object(Launch, "__init__", making):
        yield made


def _modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(kernels.__path__)]
    return [_module(name) for name in names if name.endswith("_triton")]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{kernels.__name__}.{name}")


def _kernel_name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_constant(value: Any) -> bool:
    return isinstance(getattr(value, "value", value), bool | int | float | str | tuple)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
