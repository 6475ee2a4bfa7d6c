"""The page of the long sweeps tells what did not run."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_file_that_is_skipped_as_a_whole_is_named_with_its_reason(tmp_path):
    (tmp_path / "test_absent.py").write_text('import pytest\npytest.importorskip("no_such_package")\n')
    (tmp_path / "test_present.py").write_text("import pytest\n@pytest.mark.slow\ndef test_one(): pass\n")
    sweep = runpy.run_path(str(ROOT / "scripts" / "sweep.py"))

    page = sweep["page"](sweep["run"](["-p", "no:cacheprovider", "-n0", "--rootdir", str(tmp_path), str(tmp_path)]))

    assert "1 passed, 1 skipped" in page
    _, _, absent = page.partition("Files skipped as a whole")
    assert "`test_absent`: could not import 'no_such_package'" in absent
    assert "test_present" not in absent
