"""What the harness lm-eval measures of the trained model."""

from __future__ import annotations

import json
import logging

from hfdist.run.parts.part import Part
from hfdist.run.state import RunState
from hfdist.trainer.evaluation import lm_eval

logger = logging.getLogger(__name__)


class TasksPart(Part):
    """Lets the harness measure `evaluate.lm_eval`."""

    def finish(self, run: RunState) -> None:
        """Measure the exported model, unless a budget has stopped the run: it takes long.

        A failure of the harness does not fail the run.
        """
        config, trainer = run.config, run.trainer
        if not config.evaluate.lm_eval or run.budget.stopped_by is not None:
            return
        try:
            results = lm_eval.measure(run.outcome.folder, config, device=trainer.args.device)
            figures = lm_eval.figures(results)
            config.run.folder.lm_eval.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        except (lm_eval.HarnessError, OSError, KeyError) as error:
            # KeyError: another version of the harness gives something else; the message of that is the key alone.
            logger.warning("lm_eval: %s", f"its answer has no {error}" if isinstance(error, KeyError) else error)
            return
        # The best model may be that of an earlier step than the line says.
        trainer.log({"lm_eval/step": run.outcome.step, **figures})
        logger.info("lm_eval:\n%s", lm_eval.table(figures))
