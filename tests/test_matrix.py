"""The page of what is served says what the tests said."""

from __future__ import annotations

from pathlib import Path

from tests import matrix


def test_each_row_has_tests_that_exist_or_says_that_it_was_read() -> None:
    assert matrix.missing_tests() == []
    for row in matrix.ROWS:
        assert row.answer in matrix.ANSWERS
        assert bool(row.tests) == (row.where != matrix.UNSEEN), row
        emulated = any(test.startswith("emulated") for test in row.tests)
        assert emulated == (row.where == matrix.EMULATED), row
    assert matrix.missing_tests([matrix.ROWS[0]._replace(tests=("test_matrix.py::test_no",))])


def test_the_page_is_made_from_the_rows_and_from_tests_that_passed() -> None:
    results = matrix.read_results()
    assert matrix.PAGE.read_text() == matrix.page(results)
    for row in matrix.ROWS:
        assert {results[test]["outcome"] for test in row.tests} <= {"passed"}, row


def test_of_several_cases_the_worst_is_told(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    cases = (
        '<testcase classname="tests.e2e.test_a" name="test_b[1]"/>'
        '<testcase classname="tests.e2e.test_a" name="test_b[2]"><failure/></testcase>'
        '<testcase classname="tests.e2e.test_a" name="test_c"><skipped/></testcase>'
        '<testcase classname="tests.e2e.test_a" name="test_d"/>'
    )
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert matrix.outcomes(report) == {
        "e2e/test_a.py::test_b": "failed",
        "e2e/test_a.py::test_c": "skipped",
        "e2e/test_a.py::test_d": "passed",
    }
