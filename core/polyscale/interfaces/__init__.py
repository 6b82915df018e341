"""The Protocols, one file per kind: what the object that a plugin hands over must do."""
