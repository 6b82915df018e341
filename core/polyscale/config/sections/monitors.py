"""Where metrics go: ``tensorboard`` is honoured; the others are known and refused while on."""

from __future__ import annotations

from typing import ClassVar

from polyscale.config.section import Int, Section, honoured


class TensorBoardSection(Section):
    """Scalars for TensorBoard, written by rank 0."""

    switch: ClassVar = ("enabled", (False,))

    enabled: bool = honoured(False, "Write scalars.")
    output_path: str = honoured("", "Folder of the logs; empty: ./runs.")
    job_name: str = honoured("DeepSpeedJobName", "Folder under output_path.")


class CsvSection(Section):
    """One CSV file per scalar."""

    switch: ClassVar = ("enabled", (False,))

    enabled: bool = honoured(False, "Write scalars.")
    output_path: str = honoured("", "Folder of the files.")
    job_name: str = honoured("DeepSpeedJobName", "Folder under output_path.")


class WandbSection(Section):
    """Weights & Biases."""

    switch: ClassVar = ("enabled", (False,))

    enabled: bool = honoured(False, "Send scalars.")
    group: str | None = honoured(None, "Group of runs.")
    team: str | None = honoured(None, "Team (entity).")
    project: str = honoured("deepspeed", "Project.")


class CometSection(Section):
    """Comet."""

    switch: ClassVar = ("enabled", (False,))

    enabled: bool = honoured(False, "Send scalars.")
    samples_log_interval: Int = honoured(100, "Samples between two values.", ge=1)
    project: str | None = honoured(None, "Project.")
    workspace: str | None = honoured(None, "Workspace.")
    api_key: str | None = honoured(None, "Key of the service.")
    experiment_name: str | None = honoured(None, "Name of the experiment.")
    experiment_key: str | None = honoured(None, "Key of an experiment to go on with.")
    online: bool | None = honoured(None, "Send at once, or write to disk.")
    mode: str | None = honoured(None, "get, create or get_or_create.")
