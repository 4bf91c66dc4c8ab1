"""`export.*`: where the trained model goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class ExportConfig:
    """It is always written into the run's folder."""

    push_to: str | None = None
    """Hub repository OWNER/NAME that it is uploaded to at the end, with its model card; null: none."""
    private: bool = True
    """Whether the repository is private, where it is made new."""
    revision: str | None = None
    """Branch to upload to, made where it is missing; null: the default branch."""
