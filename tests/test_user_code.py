"""`--import`: files of the user. Catches a file that runs twice, a module that is replaced, and errors that name no option."""

import sys

import pytest

from minirt.errors import ConfigError, InputError
from minirt.user_code import import_file


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    yield write
    for name in ("first_of_mine", "beside_it"):
        sys.modules.pop(name, None)


def test_a_file_runs_once_with_the_modules_beside_it(file):
    file("beside_it.py", "runs = []")
    path = file("first_of_mine.py", "from beside_it import runs\nruns.append(__name__)\n")
    import_file(path)
    import_file(path)
    assert sys.modules["first_of_mine"].runs == ["first_of_mine"]


@pytest.mark.parametrize(("name", "text", "message"), [
    ("mine.txt", "", "not a Python file"),
    ("json.py", "", "another module is named json"),
    ("first_of_mine.py", "1 / 0", "running it fails: ZeroDivisionError: division by zero"),
    ("first_of_mine.py", "def f(:", "running it fails: SyntaxError"),
])  # fmt: skip
def test_what_cannot_be_imported(name, text, message, file):
    path, before = file(name, text), sys.modules.get("json")
    with pytest.raises(InputError, match=rf"^--import .*{name}: {message}"):
        import_file(path)
    with pytest.raises(InputError, match="not a Python file"):
        import_file(path + "x")
    assert sys.modules.get("json") is before
    assert "first_of_mine" not in sys.modules


def test_an_error_of_minirt_keeps_its_class(file):
    text = "from minirt.errors import ConfigError\nraise ConfigError('registered twice', where='mlp')"
    with pytest.raises(ConfigError, match=r"^--import .*first_of_mine\.py, mlp: registered twice"):
        import_file(file("first_of_mine.py", text))
