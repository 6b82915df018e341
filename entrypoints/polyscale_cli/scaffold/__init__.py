"""Folders of new plugins: names that may be taken, templates, and writing them."""
