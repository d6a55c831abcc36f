"""Reports the outcome of each test in the second sandbox, as a plugin of pytest or, where there is no pytest, as its own small runner.

What the policy wrote runs in the same process. It can end it, print what it likes and write to the file of results; an outcome counts only
with the secret, which is read, and its file removed, before any of its code is imported.

    python strop_report.py tests/test_a.py::test_b ...      or      PYTEST_ADDOPTS="-p strop_report" PYTHONPATH=/strop pytest ...
"""

import os
import sys


def open_report(folder):
    """Return a function that records the outcome of a test."""
    with open(os.path.join(folder, "secret")) as file:
        secret = file.read().strip()
    os.remove(os.path.join(folder, "secret"))
    results = open(os.path.join(folder, "results"), "a")  # noqa: SIM115 (until the end)

    def report(name, outcome):
        results.write("\n{}\t{}\t{}\n".format(secret, outcome, name.replace("\n", " ")))
        results.flush()

    return report


class Plugin:
    """What pytest calls."""

    def __init__(self, report):
        def pytest_runtest_logreport(report_):
            expected = hasattr(report_, "wasxfail")
            if report_.outcome == "skipped":
                report(report_.nodeid, "XFAIL" if expected else "SKIPPED")
            elif report_.outcome == "failed":
                report(report_.nodeid, "FAILED" if report_.when == "call" else "ERROR")
            elif report_.when == "call":
                report(report_.nodeid, "XPASS" if expected else "PASSED")

        self.pytest_runtest_logreport = lambda report: pytest_runtest_logreport(report)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # not in the workers of pytest-xdist
        config.pluginmanager.register(Plugin(open_report(os.path.dirname(os.path.abspath(__file__)))), "strop_reporter")


def run_plain(names, report):
    """Run functions ``test*`` and the methods of ``unittest.TestCase`` in files, or those that ``FILE::NAME`` names."""
    import importlib.util
    import unittest

    def run(name, function):
        try:
            function()
        except unittest.SkipTest:
            report(name, "SKIPPED")
        except BaseException as error:
            report(name, "FAILED")
            print(f"{name}: {error!r}")
        else:
            report(name, "PASSED")

    for file in sorted({name.split("::")[0] for name in names}):
        try:
            spec = importlib.util.spec_from_file_location(os.path.basename(file)[:-3], file)
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
                run("::".join((file, key)), value)


def main(names):
    report = open_report(os.path.dirname(os.path.abspath(__file__)))
    try:
        import pytest
    except ImportError:
        pytest = None
    sys.path.insert(0, os.getcwd())  # only now: a file of the policy's must not take the place of a module above
    if pytest is None:
        return run_plain(names, report)
    return pytest.main([*names, "-p", "no:cacheprovider"], plugins=[Plugin(report)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
