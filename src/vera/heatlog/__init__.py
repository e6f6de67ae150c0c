"""The heat log of a server: how hot its pages were, recalibration by recalibration. `log` writes it, `vera heat` shows it."""
