"""Each setting of a check is declared once, and is read in five places."""

import inspect

import pytest
from typer.main import get_command

from gpt_duet import Target, check_model, check_scorer
from gpt_duet.cli import build_app
from gpt_duet.cli.job import read_project
from gpt_duet.running.meeting import meet
from gpt_duet.settings import (
    OPTIONS,
    CheckSettings,
    RunSettings,
    Settings,
    settings_in,
)

COMMAND = get_command(build_app()).commands["check"]
OF_COMMAND = {  # options that only the command's output uses
    *("models", "show_list", "map_file", "json_file", "form", "fresh"),
    *("verbose", "quiet", "debug"),
}
IN_STEAD = {  # options, and the arguments of functions that replace them
    "scorer": "make_score",
    "quick": "budget",
    "thorough": "budget",
}


def test_the_command_has_the_declared_options_and_output_options():
    options = {option.name: option for option in COMMAND.params}
    assert options.keys() - {one.name for one in OPTIONS} == OF_COMMAND
    for one in OPTIONS:
        option = options[one.name]
        assert option.opts == [f"--{one.option}"]
        assert option.help == one.shell.help
        assert option.default == one.unset


@pytest.mark.parametrize(
    ("function", "kind"), [(check_model, CheckSettings), (meet, Settings)]
)
def test_a_function_takes_the_declared_settings(function, kind):
    shown = inspect.signature(function).parameters
    for one in settings_in(kind):
        assert shown[one.name].default == one.shell.default
    with pytest.raises(TypeError, match=r"keyword argument 'layuot'"):
        function(lambda tokens: tokens, layuot="bt")


def test_an_unknown_value_is_refused_by_its_declaration():
    for name, known in (("outputs", "auto, logits, "), ("layout", "bt, tb")):
        with pytest.raises(ValueError, match=f"{name} must be one of {known}"):
            check_model(lambda tokens: tokens, **{name: "x"})


# the test gives None as the model, which shape checks refuse
@pytest.mark.unhooked
def test_a_target_takes_the_settings_of_a_run():
    names = [one.name for one in settings_in(RunSettings)]
    assert {*names} > {one.name for one in settings_in(Settings)}
    Target(None, expected={}, **dict.fromkeys(names))
    own = {one.name for one in settings_in(CheckSettings)} - {*names}
    for name in own | {"only", "bos", "layuot"}:
        with pytest.raises(TypeError, match=f"Target has no setting '{name}'"):
            Target(None, **{name: None})


def test_a_project_has_the_declared_settings_and_no_others(tmp_path):
    file = tmp_path / "pyproject.toml"
    head = "[tool.gpt-duet.targets.'a:b']\n"
    for option in COMMAND.params:
        name = option.opts[0].removeprefix("--")
        file.write_text(f"{head}{name} = '1'\n")
        if option.name in OF_COMMAND:
            with pytest.raises(ValueError, match=f"no setting '{name}'"):
                read_project(tmp_path)
        else:
            assert read_project(tmp_path) == {"a:b": {name: "1"}}


def test_a_scorer_takes_the_settings_for_scorers():
    taken = inspect.signature(check_scorer).parameters
    for one in OPTIONS:
        name = IN_STEAD.get(one.name, one.name)
        assert (name in taken) == one.fits(scorer=True), one.name
