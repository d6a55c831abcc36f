"""Reports the outcome of each test in the second sandbox, as a plugin of pytest or, where there is no pytest, as its own small runner.

What the policy wrote runs in the same process. It can end it, print what it likes and write to the file of results; an outcome counts only
with the secret, which is read, and its file removed, before any of its code is imported.

    python strop_report.py tests/test_a.py::test_b ...      or      PYTEST_ADDOPTS="-p strop_report" PYTHONPATH=/strop pytest ...
"""

import importlib.util
import os
import sys
import unittest
from contextlib import suppress
from typing import Any


def open_report(folder: str) -> Any:
    """Return a function that records the outcome of a test."""
    with open(os.path.join(folder, "secret")) as file:
        secret = file.read().strip()
    os.remove(os.path.join(folder, "secret"))
    results = open(os.path.join(folder, "results"), "a")  # noqa: SIM115 (until the end)

    def report(name: str, outcome: str) -> None:
        results.write("\n{}\t{}\t{}\n".format(secret, outcome, name.replace("\n", " ")))
        results.flush()

    return report


class Plugin:
    """What pytest calls."""

    def __init__(self, record: Any) -> None:
        def pytest_runtest_logreport(report: Any) -> None:
            expected = hasattr(report, "wasxfail")
            if report.outcome == "skipped":
                record(report.nodeid, "XFAIL" if expected else "SKIPPED")
            elif report.outcome == "failed":
                record(report.nodeid, "FAILED" if report.when == "call" else "ERROR")
            elif report.when == "call":
                record(report.nodeid, "XPASS" if expected else "PASSED")

        self.pytest_runtest_logreport = pytest_runtest_logreport


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput"):  # not in the workers of pytest-xdist
        config.pluginmanager.register(Plugin(open_report(os.path.dirname(os.path.abspath(__file__)))), "strop_reporter")


def run_plain(names: "list[str]", report: Any) -> None:
    """Run functions ``test*`` and the methods of ``unittest.TestCase`` in files."""
    for file in sorted({name.split("::")[0] for name in names}):
        try:
            spec: Any = importlib.util.spec_from_file_location(os.path.basename(file)[:-3], file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except BaseException as error:
            print(f"{file}: {error!r}")
            continue
        for key, value in sorted(vars(module).items()):
            if isinstance(value, type) and issubclass(value, unittest.TestCase):
                for method in unittest.defaultTestLoader.getTestCaseNames(value):
                    result = unittest.TestResult()
                    value(method).run(result)
                    report(
                        "::".join((file, key, method)), "PASSED" if result.wasSuccessful() and not result.skipped else "FAILED"
                    )
            elif key.startswith("test") and callable(value):
                report("::".join((file, key)), run_function(value))


def run_function(function: Any) -> str:
    try:
        function()
    except unittest.SkipTest:
        return "SKIPPED"
    except BaseException as error:
        print(repr(error))
        return "FAILED"
    return "PASSED"


def main(names: "list[str]") -> Any:
    report = open_report(os.path.dirname(os.path.abspath(__file__)))
    pytest: Any = None
    with suppress(ImportError):
        import pytest
    sys.path.insert(0, os.getcwd())  # only now: a file of the policy's must not take the place of a module above
    if pytest is None:
        return run_plain(names, report)
    return pytest.main([*names, "-p", "no:cacheprovider"], plugins=[Plugin(report)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
