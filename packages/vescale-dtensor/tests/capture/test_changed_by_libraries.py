"""What libraries change for themselves, once in a process, makes no recording old.

torch's compiler does at its first use, and what watches over ranks does where one waits long. Which
rank meets it, and when, is chance: programs that it made old would be recorded by some ranks only,
and a joint graph would be refused.
"""

import copy
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
import vescale_comm
import vescale_dtensor as vd
from torch import nn
from torch._dynamo import mutation_guard
from vescale_dtensor._capture import reads

MARK = "___needs_generation_tag_patch"


class Layers(nn.Module):
    """Finds its parts by names that it computes, so all of `nn.Module` may be asked for."""

    def __init__(self):
        super().__init__()
        self.l0, self.l1 = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        for number in range(2):
            x = getattr(self, f"l{number}")(x)
        return x


class Plain:
    pass


def is_mapping(x):
    return x * (2 if isinstance(SUBJECT, Mapping) else 3)


def by_variable(x):
    return x * len(os.environ.get("SOME_VARIABLE", "abc"))


SUBJECT = Plain()


def recordings(function, x):
    """How many recordings a captured function has made when it has run three times more."""
    for _ in range(3):
        function(x)
    return function._misses.recordings


@pytest.fixture
def fresh(monkeypatch):
    """As if torch's compiler had not run yet."""
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))
    monkeypatch.setattr(nn.Module, MARK, True, raising=False)
    monkeypatch.delattr(nn.Module, MARK)


def test_what_the_compiler_puts_before_methods_of_modules(fresh):
    captured, x = vd.capture(Layers()), torch.ones(2, 3)
    before = recordings(captured, x)
    mutation_guard.install_generation_tagging_init()
    assert recordings(captured, x) == before == 1
    assert nn.Module.__init__.__code__.co_filename == mutation_guard.__file__


def by_library(x):
    return nn.functional.relu(x)


def test_functions_that_the_compiler_is_not_to_look_into(monkeypatch):
    captured, x = vd.capture(by_library), torch.ones(2, 3)
    before = recordings(captured, x)
    monkeypatch.setattr(nn.functional, "relu", torch.compiler.disable(nn.functional.relu))
    assert recordings(captured, x) == before == 1
    monkeypatch.setattr(nn.functional, "relu", torch.compiler.disable(nn.functional.silu))
    assert torch.equal(captured(x), nn.functional.silu(x))


def test_parts_of_a_package_that_are_imported_later(fresh, monkeypatch):
    captured, x = vd.capture(Layers()), torch.ones(2, 3)
    before = recordings(captured, x)
    module = ModuleType("torch.imported_later")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch, "imported_later", module, raising=False)
    copy.deepcopy(nn.Linear(1, 1))
    assert recordings(captured, x) == before == 1


@pytest.mark.parametrize("name", ["__init__", "__setstate__"])
def test_what_users_put_there_is_a_change(fresh, name):
    captured, x = vd.capture(Layers()), torch.ones(2, 3)
    before = recordings(captured, x)
    was = getattr(nn.Module, name)
    setattr(nn.Module, name, lambda *args, **kwargs: was(*args, **kwargs))
    assert recordings(captured, x) == before + 1


def test_a_name_that_users_add_is_a_change(fresh, monkeypatch):
    captured, x = vd.capture(Layers()), torch.ones(2, 3)
    before = recordings(captured, x)
    monkeypatch.setattr(nn.Module, "l2", None, raising=False)
    assert recordings(captured, x) == before + 1


def test_classes_that_a_module_registers_as_it_is_imported(monkeypatch):
    captured, x = vd.capture(is_mapping), torch.ones(2)
    before = recordings(captured, x)
    module = ModuleType("imported_later")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("class Config: pass", vars(module))
    Mapping.register(module.Config)
    assert recordings(captured, x) == before == 1


def test_a_class_that_was_there_is_registered():
    captured, x = vd.capture(is_mapping), torch.ones(2)
    before = recordings(captured, x)
    assert captured(x).tolist() == [3.0, 3.0]
    Mapping.register(Plain)
    assert captured(x).tolist() == [2.0, 2.0]
    assert recordings(captured, x) == before + 1


def test_where_the_compiler_keeps_its_files(monkeypatch):
    captured, x = vd.capture(by_variable), torch.ones(2)
    before = recordings(captured, x)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    assert recordings(captured, x) == before == 1
    monkeypatch.setenv("SOME_VARIABLE", "ab")
    assert captured(x).tolist() == [2.0, 2.0]


def test_what_ranks_do_while_they_wait_is_not_watched(monkeypatch):
    folder = Path(vescale_comm.__file__).parent / "_watchdog"
    space = {"Path": Path}
    exec(compile("def waits(): Path('/').exists()", str(folder / "made_up.py"), "exec"), space)
    waits = space["waits"]
    heard, runs = [], reads.StateReads.runs

    def listening(self, code, globals_):
        heard.append(code.co_filename)
        return runs(self, code, globals_)

    def function(x):
        waits()
        return after(x)

    def after(x):
        return x * 2

    monkeypatch.setattr(reads.StateReads, "runs", listening)
    assert vd.capture(function)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert __file__ in heard
    assert not [one for one in heard if "pathlib" in one or "_watchdog" in one]
