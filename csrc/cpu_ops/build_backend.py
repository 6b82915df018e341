"""Builds this package: flit_core's wheel, with the extensions compiled where there is a compiler (PEP 517)."""

from __future__ import annotations

from typing import Any

from flit_core import buildapi

build_editable = buildapi.build_editable
build_sdist = buildapi.build_sdist
prepare_metadata_for_build_editable = buildapi.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = buildapi.prepare_metadata_for_build_wheel


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel; polyscale is imported here alone, so that an editable install does without it."""
    from polyscale.ops.wheel import with_extensions

    return with_extensions(buildapi.build_wheel(wheel_directory), wheel_directory, config_settings)
