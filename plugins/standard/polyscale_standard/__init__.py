"""What torch itself gives, as polyscale plugins of every kind."""
