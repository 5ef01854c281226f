"""The `gemini-ft` command: plug-ins, missing extras, errors as sentences, a fast help."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from gemini_ft.cli import main as cli
from gemini_ft.cli.exit_codes import ExitCode
from gemini_ft.contracts.errors import GeminiError


def _plugin(name: str, attribute: str, module: str = __name__) -> EntryPoint:
    sys.modules.setdefault(__name__, sys.modules[hello.__module__])
    return EntryPoint(name, f"{module}:{attribute}", cli.ENTRY_POINT_GROUP)


def hello(name: str) -> None:
    """Say hello."""
    typer.echo(f"hello {name}")


group = typer.Typer(help="A group of two.")


@group.command()
def one() -> None:
    typer.echo("one")


@group.command()
def two() -> None:
    raise GeminiError("slot 3 has no node; start a standby")


def test_a_function_and_a_typer_app_both_become_subcommands() -> None:
    plugins = [_plugin("hello", "hello"), _plugin("group", "group")]
    runner = CliRunner()
    assert runner.invoke(cli.build_app(["hello"], plugins), ["hello", "you"]).output == "hello you\n"
    assert runner.invoke(cli.build_app(["group"], plugins), ["group", "one"]).output == "one\n"
    listed = runner.invoke(cli.build_app(["--help"], plugins), ["--help"]).output
    assert "Say hello." in listed
    assert "A group of two." in listed


def test_only_the_named_plugin_is_imported() -> None:
    broken = _plugin("broken", "x", module="no_such_module_of_ours")
    result = CliRunner().invoke(cli.build_app(["hello"], [broken, _plugin("hello", "hello")]), ["hello", "a"])
    assert result.exit_code == 0
    with pytest.raises(ModuleNotFoundError):
        cli.build_app(["--help"], [broken])


def test_a_missing_extra_is_one_sentence_and_does_not_spoil_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli._EXTRA_OF_MODULE, "no_such_module_of_ours", "worker")
    plugins = [_plugin("agent", "x", module="no_such_module_of_ours")]
    runner = CliRunner()
    listed = runner.invoke(cli.build_app(["--help"], plugins), ["--help"])
    assert listed.exit_code == 0
    assert "needs the extra `worker`" in listed.output
    used = runner.invoke(cli.build_app(["agent"], plugins), ["agent", "run", "--port", "1"])
    assert used.exit_code == ExitCode.REFUSED
    assert used.stderr == "error: `gemini-ft agent` needs the extra `worker`: pip install 'gemini-ft[worker]'\n"


def test_a_refusal_is_one_sentence_on_stderr_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [_plugin("group", "group")])
    monkeypatch.setattr(sys, "argv", ["gemini-ft", "group", "two"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.REFUSED
    assert capsys.readouterr().err == "error: slot 3 has no node; start a standby\n"


def test_help_and_version_of_the_installed_command_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from gemini_ft.cli.main import main\n"
        "sys.argv = ['gemini-ft', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'deepspeed', 'fastapi', 'sqlalchemy', 'numpy', 'nats', 'httpx'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else end.code)\n"
    )
    for argument, expected in (("--help", "doctor"), ("--version", "gemini-ft 0.")):
        done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
