"""Between ranks: the process group, agreement through the store, and the watchdog."""
