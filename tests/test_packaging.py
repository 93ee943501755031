from importlib.metadata import entry_points, version
from importlib.resources import files

import torch

import pstar_compile


def test_backend_is_found_without_an_import() -> None:
    assert "patrickstar" in torch.compiler.list_backends()
    (backend,) = entry_points(group="torch_dynamo_backends", name="patrickstar")
    assert callable(backend.load())


def test_command_and_version() -> None:
    (command,) = entry_points(group="console_scripts", name="pstar")
    assert callable(command.load())
    assert version("pstar-compile") == pstar_compile.__version__


def test_packages_are_typed() -> None:
    assert files("pstar_compile").joinpath("py.typed").is_file()
    assert files("passes").joinpath("py.typed").is_file()
