"""The mistakes that `make mutations` plants: each still has its place in the code, and its test."""

import ast
import re

from proofs.mutations import MUTATIONS, ROOT, planted, read_modules


def test_each_has_one_place_and_a_test():
    modules = read_modules(ROOT)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) == 40, "as docs/proofs.md says"
    for mutation in MUTATIONS:
        changed = planted(modules, mutation)
        assert changed is not None, f"{mutation.name}: its text is gone from hfdist/, or stands there more than once"
        ast.parse(changed[1])
        for path, function in re.findall(r"(tests/\S+?\.py)(?:::(\w+))?", mutation.test):
            assert f"def {function}" in (ROOT / path).read_text(encoding="utf-8"), mutation.test
