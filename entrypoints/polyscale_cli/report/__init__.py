"""Facts behind ``scale-report``: functions that return dataclasses. Nothing here prints, and nothing here raises for
what is wrong with the machine: that is what the report is about."""
