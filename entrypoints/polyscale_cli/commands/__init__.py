"""The commands: what users type and see. Facts come from ``polyscale_cli.report`` and the libraries."""
