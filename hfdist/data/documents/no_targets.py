"""Why examples have no target: what an error says of the roles that were found, and what to change."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

from hfdist.config.data import DataConfig, TooLong
from hfdist.data.documents.corpus import Corpus
from hfdist.errors import DataError

_MOST_LOOKED_AT = 200
"""Examples whose roles are counted."""
_ANSWERS = "assistant"


def explain_no_targets(corpus: Corpus, config: DataConfig) -> tuple[str, str | None]:
    """Look at the first examples: give what was found in them, and a hint; None: they are no conversations."""
    roles: Counter[str] = Counter()
    for number in islice(range(corpus.num_documents), _MOST_LOOKED_AT):
        try:
            example = json.loads(corpus.text(number))
        except (DataError, ValueError):
            continue
        turns = example.get("messages") or []
        roles.update(str(turn.get("role")) for turn in turns if isinstance(turn, dict))
    if not roles:
        return "", None
    found = f"turns of the roles {', '.join(f'{role} ({count:,})' for role, count in roles.most_common(5))}"
    if _ANSWERS not in roles:
        return found, f"a turn of the role `{_ANSWERS}` is what is learned: rename the role of the answers in the rows"
    cut = "data.too_long=truncate_start" if config.too_long is TooLong.truncate_end else "a larger data.sequence_length"
    return found, f"{cut} where answers were cut off; data.chat.train_on=all where the template does not mark them"
