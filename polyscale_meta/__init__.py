"""The polyscale metapackage; everything is in the members it requires."""
